"""Environments that hang, and processes without their parent."""

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
    """For how long a thread has been in the same call of a watched function, seen from another.

    It looks at the thread's frames, so that steps themselves cost nothing more.

    Args:
        thread: ``ident`` of the watched one.
    """

    CALLS: ClassVar[set[CodeType]] = set()
    """of the functions: those that step or reset environments."""

    def __init__(self, thread: int | None) -> None:
        self._thread = thread or 0
        self._call: FrameType | None = None
        self._since = 0.0

    def seconds(self) -> float:
        """Seconds since the present call was first seen; 0 without one."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame.f_code not in self.CALLS:
            frame = frame.f_back
        if frame is None or frame is not self._call:
            self._call, self._since = frame, time.monotonic()
        return time.monotonic() - self._since if frame is not None else 0.0


OF_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that a process leaves to its parent."""


def is_parents_affair(in_main_thread: bool) -> None:
    """Leave signals to the parent of this process of ``multiprocessing``, and die with it.

    Ctrl-C goes to all processes of a terminal, and the signals of batch systems to all of a job:
    the parent finishes its iteration with their help. A dead parent's process is killed whatever it
    is doing: by a thread, and on Linux by the system, which does not wait for code that holds
    Python's lock.

    Args:
        in_main_thread: whether the parent's main thread started this process; Linux would otherwise
            kill it with the thread that did.
    """
    for number in OF_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_PARENT)  # which were blocked until now
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
    """Whether this is Python's main thread."""
    return threading.current_thread() is threading.main_thread()


ASK = signal.SIGUSR2
"""asks a process to end that does not listen to its pipe."""


def end_process(process: Any, seconds: float) -> None:
    """Wait for a process that was asked to end, ask by a signal, and then insist."""
    process.join(seconds)
    for number in (ASK, signal.SIGKILL):
        if process.is_alive():
            os.kill(process.pid, number)
            process.join(1.0)
