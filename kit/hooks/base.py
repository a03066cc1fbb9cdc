"""Hooks, and the side of a trainer that they see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor
from torchrl.trainers import TrainerHookBase

from kit.logging.metrics_recorder import MetricsRecorder
from kit.steps import RunSchedule, SettingError, StepLedger, StepPlan

Kind = Literal["step", "observer"]


class HookedTrainer(Protocol):
    """What a hook may read of a trainer, and ask of it."""

    plan: StepPlan
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
    """The name of a class in small letters: ``TimeLimit`` is ``time_limit``."""
    return "".join("_" + c.lower() if c.isupper() else c for c in cls.__name__)[1:]


class Hook(TrainerHookBase):
    """Something that happens at stages of the loop.

    A TorchRL hook: it registers itself, saves and restores its state. Its ``kind`` says what it may
    do. A ``step`` hook takes part in training: it changes a learning rate by a counter, fits a
    critic to the batch, ends an update phase. An ``observer`` logs, draws, saves or shows; without
    it the trained weights are bitwise the same.
    """

    kind: Kind = "observer"
    operations: ClassVar[Mapping[str, str]] = {}
    """Names of its methods by the stage at which each is registered."""
    saved: ClassVar[Sequence[str]] = ()
    """Names of the attributes that are its state in checkpoints: tensors and plain values."""
    trainer: HookedTrainer

    @property
    def name(self) -> str:
        """Name under which it is registered; two hooks of a trainer differ in it."""
        return snake_case(type(self))

    def register(self, trainer: HookedTrainer, name: str | None = None) -> None:
        """Register the operations of this hook; subclasses may extend it with ``register_op``.

        Raises:
            SettingError: if it is another trainer's, whose state it has.
        """
        if getattr(self, "trainer", trainer) is not trainer:
            why = "is a hook of another trainer, and would mix the two"
            raise SettingError("hook", type(self).__name__, why, "make a new one for each trainer")
        self.trainer = trainer
        trainer.register_module(name or self.name, self)
        for stage, method in self.operations.items():
            trainer.register_op(stage, getattr(self, method))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: the attributes in ``saved``."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        for name in self.saved:
            setattr(self, name, state_dict[name])


class KitHook(Hook):
    """Base of the kit's own hooks, which declare that they do not keep what they receive.

    Their effects on training are known to the trainer. Your own hooks derive from :class:`Hook`,
    and declare these attributes one by one where they hold.
    """

    keeps_batches = False
    """Whether batches may be read after the call that received them."""
    reads_minibatches = False
    """Whether minibatches are read or changed."""
    changes_training = False
    """Whether networks, loss or optimizer may change in ways that the kit does not track."""
