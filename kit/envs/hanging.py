"""Detect hanging environments, and end worker processes together with their parent."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any, ClassVar


class StepWatch:
    """Measures how long another thread has been in its current call to a watched function.

    The watch reads the thread's stack frames, so environment steps have no overhead.

    Args:
        thread: ``ident`` of the watched thread.
    """

    CALLS: ClassVar[set[CodeType]] = set()
    """Code objects of the watched functions, which step or reset environments."""

    def __init__(self, thread: int | None) -> None:
        self._thread = thread or 0
        self._call: FrameType | None = None
        self._since = 0.0

    def seconds(self) -> float:
        """Return the seconds since the current watched call was first seen, or 0 outside a call."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame.f_code not in self.CALLS:
            frame = frame.f_back
        if frame is None or frame is not self._call:
            self._call, self._since = frame, time.monotonic()
        return time.monotonic() - self._since if frame is not None else 0.0


OF_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that worker processes ignore because their parent handles them."""


def is_parents_affair(in_main_thread: bool) -> None:
    """Ignore signals that the parent process handles, and kill this process when the parent dies.

    Terminals send Ctrl-C to all processes, and batch systems signal all processes of a job. Workers
    ignore such signals because the parent needs them to finish its iteration. A thread kills this
    process when the parent dies. On Linux, the kernel also does so, even if the GIL is held.

    Args:
        in_main_thread: whether the parent's main thread started this process; otherwise the kernel
            would kill this process as soon as the starting thread ends.
    """
    for number in OF_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_PARENT)  # blocked while the process was spawned
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    if in_main_thread and sys.platform == "linux":
        before = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != before:
            os.kill(os.getpid(), signal.SIGKILL)


def is_main_thread() -> bool:
    """Return whether the caller runs in Python's main thread."""
    return threading.current_thread() is threading.main_thread()


ASK = signal.SIGUSR2
"""Signal that asks a process to exit if the process no longer reads its pipe."""


def end_process(process: Any, seconds: float) -> None:
    """Wait for a process to end. If it does not, send SIGUSR2 and then SIGKILL."""
    process.join(seconds)
    for number in (ASK, signal.SIGKILL):
        if process.is_alive():
            os.kill(process.pid, number)
            process.join(1.0)
