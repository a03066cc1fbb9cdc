"""The end of exploration."""

from __future__ import annotations

from typing import Any, ClassVar

from kit.hooks.base import Hook, Kind


class EndOfExploration(Hook):
    """Sets ``loss_module.exploring``: true during the plan's ``exploration_steps``.

    Args:
        loss_module: has the attribute.
    """

    kind: Kind = "step"
    operations: ClassVar = {"pre_optim_steps": "look"}

    def __init__(self, loss_module: Any) -> None:
        self.loss_module = loss_module

    def look(self) -> None:
        """Set the attribute before an update."""
        trainer = self.trainer
        self.loss_module.exploring = trainer.policy_steps <= trainer.plan.exploration_steps
