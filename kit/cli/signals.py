"""Signals while a run of the command line runs."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, ClassVar

from kit.envs.hanging import StepWatch
from kit.logging.files import from_here

_STOPPING = (signal.SIGTERM, signal.SIGINT)
_SAVING = signal.SIGUSR1
_HANGING = signal.SIGALRM
_PATIENCE = 1.5
"""seconds that a step of the environments may take after Ctrl-C."""


class Signals:
    """Signal handlers of a run.

    SIGTERM and SIGINT (Ctrl-C) end it after the current iteration, or at once while it is built. A
    second one ends the process. SIGUSR1 saves a checkpoint after the current or first iteration.
    Ctrl-C does not wait for environments that hang.

    Args:
        command: shell command of the recipe.
    """

    ending: ClassVar[bool] = False
    """Whether a signal is ending a run of this process."""
    save_next: ClassVar[bool] = False
    """Whether SIGUSR1 was received before a run was built."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.trainer: Any = None
        self.number: int | None = None
        self.hung = False

    def begin(self, trainer: Any) -> None:
        """Pass signals on to a trainer, which is built."""
        self.trainer = trainer
        if Signals.save_next:
            Signals.save_next = False
            trainer.request_checkpoint()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals inside; in another thread than the main one Python does not let us.

        Raises:
            SystemExit: at the end if a signal came: 143 for SIGTERM, 130 for SIGINT.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (*_STOPPING, _SAVING, _HANGING)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            try:
                yield
            except KeyboardInterrupt:
                if self.number is None:
                    raise
            finally:
                for number, handler in before.items():
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)
            if self.number is not None:
                print(f"\n{self._advice(self.number)}", file=sys.stderr)
                raise SystemExit(128 + self.number)
        finally:
            Signals.ending = False  # `stop_with_parent` ends what remains: not before the advice

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == _SAVING:
            if self.trainer is None:
                Signals.save_next = True
            else:
                self.trainer.request_checkpoint()
        elif number in _STOPPING:
            Signals.ending = True
            self.number, name = number, signal.Signals(number).name
            for again in _STOPPING:
                signal.signal(again, signal.SIG_DFL)
            if self.trainer is None:
                raise KeyboardInterrupt
            self.trainer.request_stop(f"{name} was received")
            when = "finishes the iteration and saves"
            if not self.trainer.ledger.iterations:  # evaluations and prefill are no iteration
                when = "ends after what it does now, at the latest with the first iteration"
            _say(f"{name}: {when}; a second one ends the run at once")
            if number == signal.SIGINT:
                threading.Thread(target=self._interrupt_what_hangs, daemon=True).start()
        elif self.hung:
            raise KeyboardInterrupt

    def _interrupt_what_hangs(self) -> None:
        main = threading.main_thread()
        watch, collector = StepWatch(main.ident), self.trainer.collector
        while not self.hung:
            time.sleep(0.1)
            elsewhere = getattr(collector, "seconds_in_step", float)
            self.hung = max(watch.seconds(), elsewhere()) > _PATIENCE
        signal.pthread_kill(main.ident or 0, _HANGING)

    def _advice(self, number: int) -> str:
        trainer = self.trainer
        if trainer is None:
            return f"stopped by {signal.Signals(number).name} before the run began"
        axis = trainer.plan.axis
        when = f"after {getattr(trainer.ledger, axis):,} {axis.replace('_', ' ')}"
        if self.hung:
            when += ", while environments hang (env.step_timeout=SECONDS ends such a step)"
        stopped = f"stopped by {signal.Signals(number).name} {when}"
        if trainer.folder is None:
            return f"{stopped}; nothing was saved (log_dir=null)"
        return f"{stopped}; resume it with: {self.command} resume={from_here(trainer.folder)}"


def hold_saving() -> None:
    """Pass SIGUSR1, which ``recipes`` blocked during its import, to the next run."""
    signal.signal(_SAVING, lambda *_: setattr(Signals, "save_next", True))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {_SAVING})


@functools.cache
def stop_with_parent() -> None:
    """Send SIGTERM to this process when its parent is gone, and again after its run.

    Linux's ``PR_SET_PDEATHSIG`` sends one for each thread of the parent, and a second one would end
    the run at once.
    """
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        while True:  # the first ends a run, the second what remains of this process
            time.sleep(0.2)  # a signal to all processes of a job comes here as well
            if not Signals.ending:
                os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _say(text: str) -> None:
    """Write a line from a signal handler: Python's own stream may be in the middle of one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), f"\n{text}\n".encode())
