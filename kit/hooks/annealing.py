"""Values that change during a run, by a schedule of a counter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kit.hooks.base import Hook
from kit.steps import Schedule, SettingError

if TYPE_CHECKING:
    from kit.trainer import Trainer


class Anneal(Hook):
    """Sets an attribute of an object to a schedule's value, once per iteration.

    In each iteration the value is the schedule's at the counter's value before it: the first
    iteration has the start value, and when the run has ended the value is exactly the end value.

    Args:
        target: the object: a loss, a module, an optimiser, one of its parameter groups.
        attribute: what is set: a number, a tensor (filled in place), or ``lr`` of an optimiser
            (of all its groups).
        schedule: value by counter.
        counter: which counter of the ledger: ``policy_steps``, ``gradient_steps``, ``iterations``.
        name: under which the value is logged.

    Raises:
        SettingError: if the object has no such attribute or the ledger no such counter.
    """

    kind = "step"

    def __init__(
        self,
        target: Any,
        attribute: str,
        schedule: Schedule,
        *,
        counter: str = "policy_steps",
        name: str | None = None,
    ) -> None:
        self.target, self.attribute, self.schedule = target, attribute, schedule
        self.counter = counter
        self.label = name or attribute
        self.value = self.used = 0.0
        if not isinstance(target, (Optimizer, dict)) and not hasattr(target, attribute):
            raise SettingError(
                "attribute", attribute, f"is not an attribute of {type(target).__name__}"
            )

    @property
    def name(self) -> str:
        """``anneal`` and what is annealed."""
        return f"anneal_{self.label}"

    def register(self, trainer: Trainer, name: str | None = None) -> None:
        """Register at ``setup``, ``post_steps`` and ``post_steps_log``."""
        super().register(trainer, name)
        counters = trainer.ledger.counters()
        if self.counter not in counters:
            raise SettingError("counter", self.counter, "is not a counter", list(counters))
        trainer.register_op("setup", self.set)
        trainer.register_op("post_steps_log", self.tell)
        trainer.register_op("post_steps", self.set)

    def set(self) -> None:
        """Set the value that the counter asks for."""
        self.used = self.value
        count = self.trainer.ledger.counters()[self.counter]
        self.value = self.schedule(count)
        set_value(self.target, self.attribute, self.value)

    def tell(self, batch: Any) -> dict[str, Any]:
        """Return the value that this iteration has used."""
        del batch
        return {f"schedule/{self.label}": self.used}


class AnnealLearningRate(Anneal):
    """Sets the learning rate of an optimiser to a schedule's value, once per iteration.

    Args:
        optimizer: whose groups all get the value.
        schedule: learning rate by counter.
        counter: see :class:`Anneal`.
        name: see :class:`Anneal`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: Schedule,
        *,
        counter: str = "policy_steps",
        name: str = "learning_rate",
    ) -> None:
        super().__init__(optimizer, "lr", schedule, counter=counter, name=name)


def set_value(target: Any, attribute: str, value: float) -> None:
    """Set a number where it lives: in an optimiser's groups, a tensor, or a plain attribute."""
    if isinstance(target, Optimizer):
        for group in target.param_groups:
            set_value(group, attribute, value)
        return
    present = target[attribute] if isinstance(target, dict) else getattr(target, attribute)
    if isinstance(present, Tensor):
        with torch.no_grad():
            present.fill_(value)
    elif isinstance(target, dict):
        target[attribute] = value
    else:
        setattr(target, attribute, value)
