"""Hooks that stop a run or an update phase early."""

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
    """Raised when a loss, another training metric or a weight is NaN or infinite."""

    stops_the_run = True


def not_finite(what: str, gradient_steps: int, checkpoint: Path | None) -> NonFiniteError:
    """Create the error that reports non-finite values and the last checkpoint."""
    last = f"The last good checkpoint is {checkpoint}" if checkpoint else "No checkpoint was saved"
    return NonFiniteError(
        f"after {gradient_steps:,} gradient steps {what}. {last}. Try a smaller learning rate "
        "or gradient clipping (max_grad_norm)."
    )


class NaNGuard(KitHook):
    """Stops the run when a training metric is NaN or infinite.

    Every metrics row is checked. The metrics since the last row are also checked before each
    checkpoint, so a checkpoint is saved only if all metrics are finite.
    """

    name = "nan_guard"
    operations: ClassVar = {"log_row": "look", "save": "look_at_next"}

    def look_at_next(self) -> None:
        """Check the metrics collected since the last row."""
        metrics = self.trainer.journal.metrics.peek()
        values = numbers(metrics.values())
        row = {f"train/{name}": value for name, value in zip(metrics, values)}
        self.look(row | {"gradient_steps": self.trainer.ledger.gradient_steps})

    def look(self, row: dict[str, Any]) -> None:
        """Check the training metrics of a row.

        Raises:
            NonFiniteError: if a metric is not finite. If any losses are not finite, only these
                losses are named.
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
    """Stops the run after a number of seconds, once the current iteration is complete.

    Args:
        seconds: time limit in seconds. When a run is resumed, the clock starts again. With several
            ranks, the clock of rank 0 decides.
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
        """Ask the trainer to stop the run if the time limit is exceeded."""
        too_long = time.monotonic() - self._began > self.seconds
        if too_long and self.trainer.ranks.is_first:
            self.trainer.request_stop(f"the time limit of {self.seconds:g} seconds was reached")


class StopWhen(KitHook):
    """Stops the run when a metric reaches a value or stops improving.

    Args:
        metric: name of a metrics column.
        reached: value at which the run stops, after at least one iteration; ``None`` disables this
            condition.
        patience: number of consecutive rows with the metric but no new best value, after which the
            run stops; ``None`` disables this condition.
        mode: whether larger (``max``) or smaller (``min``) values are better.

    Raises:
        SettingError: if ``reached`` and ``patience`` are both ``None``, if ``reached`` is not a
            number, or if ``patience`` is less than 1.
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
            raise SettingError(
                "reached",
                None,
                "cannot be combined with patience=None, because nothing would stop the run",
                "set reached or patience",
            )
        self.metric = metric
        self.reached = None if reached is None else real_number("reached", reached)
        self.patience = None if patience is None else whole_number("patience", patience, at_least=1)
        self.sign = 1.0 if one_of("mode", mode, ["max", "min"]) == "max" else -1.0
        self.best: float | None = None
        self.waited = 0
        self._columns: set[str] = set()

    def end(self) -> None:
        """Warn if no row of a complete run contained the metric."""
        plan, ledger = self.trainer.plan, self.trainer.ledger
        # If this run is incomplete, a resumed run may still log the metric.
        complete = getattr(ledger, plan.axis) >= (plan.length or 0)
        if self.best is None and self._columns and complete:
            near = nearest_first(self.metric, sorted(self._columns))[0]
            what = f"StopWhen never found the metric {self.metric!r}, so it could not stop the run"
            warnings.warn(f"{what}. The most similar column is {near!r}.", stacklevel=2)

    def look(self, row: dict[str, Any]) -> None:
        """Check a row and ask the trainer to stop the run if a stop condition is met."""
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
    """Ends an update phase when the policy diverges too far from the data-collecting policy.

    With several ranks, the mean of their estimates decides.

    If the loss's estimate of the KL divergence exceeds 1.5 times the target after an epoch, the
    remaining epochs are skipped and recorded as skipped.

    Args:
        target: target KL divergence in nats; ``None`` disables the hook.
        metric: name of the loss output with the KL estimate.
    """

    kind = "step"
    name = "target_kl"

    def __init__(self, target: float | None, metric: str = "kl_approx") -> None:
        self.target, self.metric = target, metric

    def register(self, trainer: HookedTrainer, name: str | None = None) -> None:
        """Register the hook for the ``post_epoch`` stage if a target is set."""
        if self.target is not None:
            super().register(trainer, name)
            trainer.register_op("post_epoch", self.look)

    def look(self) -> None:
        """Skip the rest of the update if the last KL estimate exceeds the limit."""
        metrics = self.trainer.last_metrics or {}
        assert self.target is not None
        divergence = metrics[self.metric].double().clone()  # metrics are read-only
        if float(self.trainer.ranks.mean(divergence, "kl")) > 1.5 * self.target:
            self.trainer.skip_rest_of_update()
