"""Signal handlers for runs that were started from the command line."""

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

from kit.distributed import Ranks
from kit.envs.hanging import StepWatch
from kit.logging.files import from_here
from kit.runs.recipe import Recipe

_STOPPING = (signal.SIGTERM, signal.SIGINT)
_SAVING = signal.SIGUSR1
_HANGING = signal.SIGALRM
_RECEIVED = " was received"
_PATIENCE = 1.5
"""Seconds after which an environment step counts as hanging once Ctrl-C was pressed."""


class Signals:
    """Signal handlers for a run.

    SIGTERM and SIGINT (Ctrl-C) stop the run after the current iteration, or immediately if the
    trainer is not built yet. A second signal ends the process. SIGUSR1 saves a checkpoint after the
    current iteration. Ctrl-C does not wait for environments that hang.

    Args:
        recipe: recipe of the run, whose command resumes it.
    """

    ending: ClassVar[bool] = False
    """Whether a signal is stopping a run in this process."""
    save_next: ClassVar[bool] = False
    """Whether SIGUSR1 was received before the trainer was built."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.trainer: Any = None
        self.number: int | None = None
        self.hung = False

    def begin(self, trainer: Any) -> None:
        """Forward signals to a trainer."""
        self.trainer = trainer
        if Signals.save_next:
            Signals.save_next = False
            trainer.request_checkpoint()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals within the context. Has no effect outside the main thread.

        Raises:
            SystemExit: after a signal stopped the run; code 143 for SIGTERM and 130 for SIGINT.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (*_STOPPING, _SAVING, _HANGING)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            try:
                yield
                self._take_over()
            except KeyboardInterrupt:
                if self.number is None:
                    raise
            finally:
                for number, handler in before.items():
                    signal.signal(number, signal.SIG_DFL if handler is None else handler)
            if self.number is not None:
                if Ranks.current is None or Ranks.current.is_first:
                    print(f"\n{self._advice(self.number)}", file=sys.stderr)
                raise SystemExit(128 + self.number)
        finally:
            Signals.ending = False  # from now on, `stop_with_parent` may end the process

    def _take_over(self) -> None:
        """End as other ranks do if one of them received a signal."""
        reason = str(getattr(self.trainer, "stop_reason", None))
        if self.number is None and reason.endswith(_RECEIVED):
            self.number = signal.Signals[reason.removesuffix(_RECEIVED)].value

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
            self.trainer.request_stop(name + _RECEIVED)
            when = "stopping after this iteration"
            if not self.trainer.ledger.iterations:  # prefill may still be running
                when = "stopping at the latest after the first iteration"
            _write_line(f"{name}: {when}; a second signal stops the run immediately")
            if number == signal.SIGINT:
                threading.Thread(target=self._interrupt_hanging_step, daemon=True).start()
        elif self.hung:
            raise KeyboardInterrupt

    def _interrupt_hanging_step(self) -> None:
        main = threading.main_thread()
        watch, collector = StepWatch(main.ident), self.trainer.collector
        while not self.hung:
            time.sleep(0.1)
            in_workers = getattr(collector, "seconds_in_step", float)
            self.hung = max(watch.seconds(), in_workers()) > _PATIENCE
        signal.pthread_kill(main.ident or 0, _HANGING)

    def _advice(self, number: int) -> str:
        trainer = self.trainer
        if trainer is None:
            return f"stopped by {signal.Signals(number).name} before the run started"
        axis = trainer.plan.axis
        when = f"after {getattr(trainer.ledger, axis):,} {axis.replace('_', ' ')}"
        if self.hung:
            when += " because environments hang (set env.step_timeout=SECONDS)"
        stopped = f"stopped by {signal.Signals(number).name} {when}"
        if trainer.folder is None:
            return f"{stopped}; nothing was saved (log_dir=null)"
        command = f"{self.recipe.command} resume={from_here(trainer.folder)}"
        return f"{stopped}; resume it with: {command}"


def hold_saving() -> None:
    """Remember a SIGUSR1 received before the trainer is built, so that a checkpoint is saved."""
    signal.signal(_SAVING, lambda *_: setattr(Signals, "save_next", True))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {_SAVING})


@functools.cache
def stop_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends, and again after its run has stopped.

    Linux's ``PR_SET_PDEATHSIG`` is not used, because it sends one signal for each thread of the
    parent. The second signal would stop the run immediately.
    """
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        while True:  # the first signal stops a run, the second ends the process
            time.sleep(0.2)  # a signal to all processes may have stopped the run already
            if not Signals.ending:
                os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _write_line(text: str) -> None:
    """Write a line from a signal handler, where Python's buffered streams are not safe to use."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), f"\n{text}\n".encode())
