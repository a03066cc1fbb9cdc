"""Base classes for hooks, and the trainer interface that hooks use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor
from torchrl.trainers import TrainerHookBase

from kit.distributed import Ranks
from kit.logging.metrics_recorder import MetricsRecorder
from kit.steps import RunSchedule, SettingError, StepLedger, StepPlan

Kind = Literal["step", "observer"]


class HookedTrainer(Protocol):
    """Attributes and methods of a trainer that hooks may use."""

    plan: StepPlan
    ranks: Ranks
    journal: MetricsRecorder
    ledger: StepLedger
    batches: Any
    config: dict[str, Any]
    folder: Path | None
    stop_reason: str | None
    last_checkpoint: Path | None
    last_metrics: Mapping[str, Tensor] | None
    update: Any
    registered_modules: dict[str, Any]
    evaluate: Any
    schedule: RunSchedule

    policy_steps: int
    policy_parts: Callable[[], dict[str, Any]]
    save_policy: Callable[[Path], Path]
    register_op: Callable[..., None]
    register_module: Callable[[str, Any], None]
    request_stop: Callable[[str], None]
    request_checkpoint: Callable[[], None]
    skip_rest_of_update: Callable[[], None]


def snake_case(cls: type) -> str:
    """Return a class name in snake case: ``time_limit`` for ``TimeLimit``."""
    return "".join("_" + c.lower() if c.isupper() else c for c in cls.__name__)[1:]


class Hook(TrainerHookBase):
    """Base class for hooks, which run at stages of the training loop.

    A TorchRL hook that registers itself and saves its state. ``kind`` declares how it affects the
    run:

    - A ``step`` hook takes part in training. It may set a learning rate, fit a critic to the batch
      or end an update phase.
    - An ``observer`` hook only logs, plots, saves or displays. Removing it leaves the trained
      weights bitwise unchanged. With several ranks, it runs on rank 0 only.
    """

    kind: Kind = "observer"
    operations: ClassVar[Mapping[str, str]] = {}
    """Names of the methods to register, keyed by stage."""
    saved: ClassVar[Sequence[str]] = ()
    """Names of the attributes to save in checkpoints, which must be tensors or plain values."""
    trainer: HookedTrainer

    @property
    def name(self) -> str:
        """Name under which the hook is registered, unique within a trainer."""
        return snake_case(type(self))

    def register(self, trainer: HookedTrainer, name: str | None = None) -> None:
        """Register the hook's operations. Subclasses may add calls to ``trainer.register_op``.

        Raises:
            SettingError: if the hook is already registered with another trainer.
        """
        if getattr(self, "trainer", trainer) is not trainer:
            reason = "is already registered with another trainer, whose state it stores"
            raise SettingError("hook", type(self).__name__, reason, "create one hook per trainer")
        self.trainer = trainer
        trainer.register_module(name or self.name, self)
        for stage, method in self.operations.items():
            trainer.register_op(stage, getattr(self, method))

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes listed in ``saved``, which a resumed run restores."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        for name in self.saved:
            setattr(self, name, state_dict[name])


class KitHook(Hook):
    """Base class for kit's own hooks, which declare how they use batches and training state.

    Custom hooks derive from :class:`Hook`. If a custom hook does not set an attribute below, kit
    assumes that the attribute is ``True``.
    """

    keeps_batches = False
    """Whether the hook may read batches after the call that received them."""
    reads_minibatches = False
    """Whether the hook reads or changes minibatches."""
    changes_training = False
    """Whether the hook may change networks, loss or optimiser in ways that kit does not track."""
