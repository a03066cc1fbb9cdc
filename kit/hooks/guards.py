"""Hooks that end a run, or an update phase, before its plan does."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal

from kit.hooks.base import HookedTrainer, KitHook
from kit.logging.metrics import numbers
from kit.steps.errors import SettingError, nearest_first, one_of, real_number, whole_number


class NonFiniteError(RuntimeError):
    """A loss, another metric of training or a weight is NaN or infinite."""

    stops_the_run = True


def not_finite(what: str, gradient_steps: int, checkpoint: Path | None) -> NonFiniteError:
    """The error that says what is not finite, and the last checkpoint, if there is one."""
    kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "none was saved yet"
    return NonFiniteError(
        f"after {gradient_steps:,} gradient steps {what}; {kept}. Smaller learning rates or "
        "gradient clipping (max_grad_norm) help most often"
    )


class NaNGuard(KitHook):
    """Ends the run when a metric of training is NaN or infinite.

    It checks each row, and before every checkpoint the metrics of the next row so far: the last
    checkpoint is finite.
    """

    name = "nan_guard"
    operations: ClassVar = {"log_row": "look", "save": "look_at_next"}

    def look_at_next(self) -> None:
        """Check the metrics of the next row so far."""
        metrics = self.trainer.journal.metrics.peek()
        values = numbers(metrics.values())
        row = {f"train/{name}": value for name, value in zip(metrics, values)}
        self.look(row | {"gradient_steps": self.trainer.ledger.gradient_steps})

    def look(self, row: dict[str, Any]) -> None:
        """Check a row.

        Raises:
            NonFiniteError: if a metric is not; the losses are named first.
        """
        bad = [
            name
            for name, value in row.items()
            if name.startswith("train/") and not math.isfinite(value)
        ]
        if not bad:
            return
        losses = [name for name in bad if name.startswith("train/loss")] or bad
        names = ", ".join(f"{name.removeprefix('train/')} is {row[name]}" for name in losses)
        raise not_finite(names, row["gradient_steps"], self.trainer.last_checkpoint)


class TimeLimit(KitHook):
    """Ends the run after so many seconds, once the iteration under way is complete.

    Args:
        seconds: of this process, from the beginning of the run or its resumption.
    """

    kind = "step"
    operations: ClassVar = {"setup": "begin", "post_steps": "look"}

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    def begin(self) -> None:
        """Start the clock."""
        self._began = time.monotonic()

    def look(self) -> None:
        """Ask for the end if the time is over."""
        if time.monotonic() - self._began > self.seconds:
            self.trainer.request_stop(f"the time limit of {self.seconds:g} seconds was reached")


class StopWhen(KitHook):
    """Ends the run when a metric is good enough, or has not become better for long.

    Args:
        metric: name of a column of the rows.
        reached: value at which to stop, after an iteration at least; ``None``: no such value.
        patience: rows with the metric but without a new best value, after which to stop; ``None``:
            never.
        mode: whether more (``max``) or less (``min``) is better.

    Raises:
        SettingError: if neither is given, ``reached`` is no number or ``patience`` less than 1.
    """

    kind = "step"
    operations: ClassVar = {"log_row": "look", "shutdown": "end"}
    saved = ("best", "waited")

    def __init__(
        self,
        metric: str = "evaluation/return",
        *,
        reached: float | None = None,
        patience: int | None = None,
        mode: Literal["max", "min"] = "max",
    ) -> None:
        if reached is None and patience is None:
            raise SettingError("reached", None, "leaves nothing to stop at", "give it or patience")
        self.metric = metric
        self.reached = None if reached is None else real_number("reached", reached)
        self.patience = None if patience is None else whole_number("patience", patience, at_least=1)
        self.sign = 1.0 if one_of("mode", mode, ["max", "min"]) == "max" else -1.0
        self.best: float | None = None
        self.waited = 0
        self._columns: set[str] = set()

    def end(self) -> None:
        """Say that the metric was in no row, if it was in none."""
        plan, ledger = self.trainer.plan, self.trainer.ledger
        complete = getattr(ledger, plan.axis) >= (plan.length or 0)  # else it may have come
        if self.best is None and self._columns and complete:
            near = nearest_first(self.metric, sorted(self._columns))[0]
            what = f"StopWhen never found {self.metric!r}, so nothing stopped the run"
            warnings.warn(f"{what}; the column that is most like it is {near!r}", stacklevel=2)

    def look(self, row: dict[str, Any]) -> None:
        """Check a row."""
        if self.metric not in row:
            self._columns |= row.keys()
            return
        value = row[self.metric] * self.sign
        trained = row.get("iterations", 1) > 0
        if self.reached is not None and trained and value >= self.reached * self.sign:
            self.trainer.request_stop(f"{self.metric} reached {row[self.metric]:g}")
        best = self.best
        if best is None or value > best or (math.isnan(best) and not math.isnan(value)):
            self.best, self.waited = value, 0
            return
        self.waited += 1
        if self.patience is not None and self.waited >= self.patience:
            since = f"for {self.waited} rows"
            self.trainer.request_stop(
                f"{self.metric} has not been better than {best * self.sign:g} {since}"
            )


class TargetKL(KitHook):
    """Ends an update phase when the policy has moved too far from the one that collected.

    After each update epoch the loss's estimate of the divergence is read from the device; beyond
    1.5 times the target, the rest of the epochs is skipped (and counted as skipped).

    Args:
        target: divergence, in nats; ``None`` never ends a phase.
        metric: name under which the loss gives it.
    """

    kind = "step"
    name = "target_kl"

    def __init__(self, target: float | None, metric: str = "kl_approx") -> None:
        self.target, self.metric = target, metric

    def register(self, trainer: HookedTrainer, name: str | None = None) -> None:
        """Register at ``post_epoch``, if there is a target."""
        if self.target is not None:
            super().register(trainer, name)
            trainer.register_op("post_epoch", self.look)

    def look(self) -> None:
        """Check the last gradient step of an epoch."""
        metrics = self.trainer.last_metrics or {}
        assert self.target is not None
        if float(metrics[self.metric]) > 1.5 * self.target:
            self.trainer.skip_rest_of_update()
