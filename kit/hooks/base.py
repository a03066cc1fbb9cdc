"""Hooks, and the side of a trainer that they see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_args

from torch import Tensor
from torchrl.trainers import TrainerHookBase

from kit.logging.journal import Journal
from kit.steps import RunSchedule, SettingError, StepLedger, StepPlan
from kit.steps.errors import one_of

Kind = Literal["step", "observer"]


class HookedTrainer(Protocol):
    """What a hook may read of a trainer, and ask of it."""

    plan: StepPlan
    journal: Journal
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

    @property
    def policy_steps(self) -> int:
        """Policy steps so far."""

    def policy_parts(self) -> dict[str, Any]:
        """Objects with the state that a policy acts by, by name: weights and normalisation."""

    def save_policy(self, folder: Path) -> Path:
        """Write the policy alone."""

    def register_op(self, dest: str, op: Callable[..., Any], **kwargs: Any) -> None:
        """Register a function at a stage."""

    def register_module(self, module_name: str, module: Any) -> None:
        """Make the state of an object part of checkpoints."""

    def request_stop(self, reason: str | None = None) -> None:
        """End the run after this iteration."""

    def request_checkpoint(self) -> None:
        """Write a checkpoint after this iteration."""

    def skip_rest_of_update(self) -> None:
        """End this update phase after this epoch."""


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
    trainer: HookedTrainer

    @property
    def name(self) -> str:
        """Name under which it is registered; two hooks of a trainer differ in it."""
        return snake_case(type(self))

    def register(self, trainer: HookedTrainer, name: str | None = None) -> None:
        """Register the operations of this hook; subclasses may extend it with ``register_op``.

        Raises:
            SettingError: if its kind does not exist, or it is another trainer's, whose best policy,
                counts and trainer it would go on with.
        """
        if getattr(self, "trainer", trainer) is not trainer:
            why = "is a hook of another trainer, and would mix the two"
            raise SettingError("hook", type(self).__name__, why, "make a new one for each trainer")
        one_of(f"{type(self).__name__}.kind", self.kind, get_args(Kind))
        self.trainer = trainer
        trainer.register_module(name or self.name, self)
        for stage, method in self.operations.items():
            trainer.register_op(stage, getattr(self, method))

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs; nothing by default."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""


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
