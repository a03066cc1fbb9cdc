"""What a hook is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torchrl.trainers import TrainerHookBase

if TYPE_CHECKING:
    from kit.trainer import Trainer

Kind = Literal["step", "observer"]


class Hook(TrainerHookBase):
    """Something that happens at stages of the loop.

    A TorchRL hook: it registers itself, saves and restores its state. Its ``kind`` says what it may
    do. A ``step`` hook takes part in training (it changes a learning rate, ends an update phase)
    and reads nothing but counters. An ``observer`` logs, draws, saves or shows; without it the
    trained weights are bitwise the same.
    """

    kind: Kind = "observer"
    trainer: Trainer

    @property
    def name(self) -> str:
        """Name under which it is registered; two hooks of a trainer differ in it."""
        return "".join("_" + c.lower() if c.isupper() else c for c in type(self).__name__)[1:]

    def register(self, trainer: Trainer, name: str | None = None) -> None:
        """Register the operations of this hook; subclasses extend it with ``register_op``."""
        self.trainer = trainer
        trainer.register_module(name or self.name, self)

    def state_dict(self) -> dict[str, Any]:
        """Return what is to be found again after a resume; nothing by default."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        del state_dict
