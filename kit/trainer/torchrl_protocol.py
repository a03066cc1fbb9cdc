"""Trainer interface that TorchRL's hooks and steppers use."""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.trainers import EarlyStopping, TargetNetUpdaterHook

from kit.buffers import Minibatches
from kit.distributed import Ranks
from kit.hooks.base import snake_case
from kit.logging.loggers import RowLogger
from kit.logging.metrics_recorder import MetricsRecorder, reject_existing_columns
from kit.steps import SettingError, StepLedger, StepPlan
from kit.trainer.meeting import Meeting, Request
from kit.trainer.stages import Stages


class TorchRLProtocol:
    """Attributes and methods of a trainer that TorchRL's hook objects use.

    Args:
        plan: step counts of the run.
        collector: kit or TorchRL collector; ``None`` if the plan is offline.
        update: takes gradient steps; provides the default loss module, optimiser and clipping.
        buffer: source of minibatches.
        logger: logger or loggers that receive rows of metrics.
        loss_module: replaces the update's loss module.
        optimizer: replaces the update's optimiser.
        ranks: processes that train together; ``None``: only this process.

    Attributes:
        requested: values of the requests that this rank has set, keyed by attribute name.
        agreed: values of the requests that are in effect on all ranks.
        advantage: function that adds advantages to each batch before training, or ``None``.
        ledger: step counts so far.
        journal: recorder for metrics.
        stages: registered operations, keyed by stage.
        registered_modules: objects whose state is saved in checkpoints, keyed by name.
        last_metrics: metrics of the last gradient step, on the device.
        skips_rest_of_update: whether the current update phase ends after the current epoch.
        stop_reason: reason why the run stopped early, or ``None``.
        last_checkpoint: checkpoint that was written or loaded last, or ``None``.
        clip_norm: gradient clipping threshold for TorchRL's steppers and optimiser hooks.
        clip_grad_norm: whether gradients are clipped by norm rather than by value.
    """

    advantage: Any = None
    meeting: Meeting
    _stop_training = Request()
    _save_requested = Request()
    skips_rest_of_update = Request()

    def __init__(
        self,
        plan: StepPlan,
        collector: Any,
        update: Any,
        buffer: Minibatches,
        *,
        logger: RowLogger | Sequence[RowLogger],
        loss_module: Any = None,
        optimizer: Any = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.plan = plan
        self.ranks = ranks or Ranks()
        self.requested: dict[str, bool] = {}
        self.agreed: dict[str, bool] = {}
        self.ledger = StepLedger(plan.world_size)
        self._counters = frozenset(self.ledger.counters())
        loggers = logger if isinstance(logger, Sequence) else [logger]
        self.journal = MetricsRecorder(list(loggers), plan.axis, self.ranks)
        self.stages = Stages(updates=plan.trains, collections=not plan.offline)
        self.collector = collector
        self.update: Any = update
        self.optimization_stepper = update
        self.buffer: Any = buffer
        self.replay_buffer = getattr(buffer, "buffer", None)
        self.loss_module: Any = loss_module or getattr(update, "loss_module", None)
        self.optimizer = optimizer or next(iter(getattr(update, "optimizers", {}).values()), None)
        self.clip_norm = getattr(update, "max_grad_norm", None) or getattr(
            update, "clip_value", None
        )
        self.clip_grad_norm = getattr(update, "clip_value", None) is None
        self.logger = self.journal.loggers[0] if self.journal.loggers else None
        self.registered_modules: dict[str, Any] = {}
        self.stop_reason: str | None = None
        self.last_checkpoint: Path | None = None
        self._stop_training = False
        self._save_requested = False
        self.skips_rest_of_update = False
        self.last_metrics: Mapping[str, Tensor] | None = None
        self._log_dict: defaultdict[str, list[Any]] = defaultdict(list)

    # ------------------------------------------------------------------ registration
    def add(self, hook: Any, name: str | None = None) -> Self:
        """Register a hook object under ``name``, or under its default name.

        Raises:
            SettingError: if another hook has the same name, or ``hook`` is not a hook object.
        """
        parameter = inspect.signature(hook.register).parameters.get("name")
        if name is None and (parameter is None or parameter.default is parameter.empty):
            name = snake_case(type(hook))
        hook.register(self, *filter(None, [name]))
        if isinstance(hook, TargetNetUpdaterHook):  # this hook does not register its own state
            self.register_module(name or snake_case(type(hook)), hook.target_params_updater)
        return self

    def register_op(self, dest: str, op: Callable[..., Any], **kwargs: Any) -> None:
        """Register a function at a stage; see ``kit.trainer.stages.STAGES`` and docs/hooks.md.

        Raises:
            KeyError: if the stage does not exist.
            SettingError: if the stage never runs, or the function does not accept the stage's
                arguments.
        """
        stops_early = isinstance(op, EarlyStopping)
        self.stages.register(dest, _once_logged(op, self) if stops_early else op, **kwargs)

    register_hook = register_op

    def register_module(self, module_name: str, module: Any) -> None:
        """Save the state of ``module`` in checkpoints.

        Raises:
            SettingError: if the name is already registered.
        """
        if module_name in self.registered_modules:
            hint = "choose another name with add(hook, name)"
            raise SettingError("hook", module_name, "is already registered", hint)
        self.registered_modules[module_name] = module

    # ------------------------------------------------------------------ requests from hooks
    def request_stop(self, reason: str | None = None) -> None:
        """Stop the run after this iteration."""
        self._stop_training = True
        self.stop_reason = reason or "a hook requested it"

    def request_checkpoint(self) -> None:
        """Request a checkpoint after this iteration."""
        self._save_requested = True

    def skip_rest_of_update(self) -> None:
        """Skip the remaining gradient steps of this update phase after the current epoch."""
        self.skips_rest_of_update = True

    def compute_loss(self, sub_batch: TensorDictBase, method: str | None = None) -> Any:
        """Return the losses of a minibatch, or call another method of the loss module."""
        if method is None:
            return self.loss_module(sub_batch)
        return getattr(self.loss_module, method)(sub_batch)

    # ------------------------------------------------------------------ counts and metrics
    @property
    def policy_steps(self) -> int:
        """Number of policy steps so far, summed over all processes."""
        return self.ledger.policy_steps

    collected_frames = policy_steps
    """TorchRL's name for :attr:`policy_steps`."""

    @property
    def _optim_count(self) -> int:
        """TorchRL's name for the number of gradient steps so far in this process."""
        return self.ledger.local_gradient_steps

    def log(self, stage: str, *arguments: Any) -> None:
        """Record the metrics returned by the hooks of a log stage."""
        if not self.stages[stage]:
            return
        for metrics in self.stages.log(stage, *arguments):
            metrics.pop("log_pbar", None)  # flag for TorchRL's progress bar
            reject_existing_columns(self._counters.intersection(metrics))
            self.journal.note(metrics, of_hooks=True)
            self._publish(metrics)

    def _publish(self, metrics: Mapping[str, Any]) -> None:
        """Publish the newest values to hooks that monitor a metric."""
        for name, value in metrics.items():
            self._log_dict[name] = [value]


def _once_logged(hook: Any, trainer: TorchRLProtocol) -> Callable[[Any], None]:
    """Wrap TorchRL's early stopping hook so that it does not run before its metric is logged."""
    logged, monitor = trainer._log_dict, str(hook.monitor)

    def look(batch: Any) -> None:
        if monitor in logged:
            hook(batch)

    def end() -> None:
        if monitor not in logged:
            what = f"EarlyStopping never found {monitor!r}. Columns are {', '.join(logged)}"
            warnings.warn(what, stacklevel=2)

    look.__qualname__ = type(hook).__name__  # hook name in errors
    trainer.register_op("shutdown", end)
    return look
