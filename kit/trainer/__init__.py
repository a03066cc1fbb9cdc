"""The loop that collects, updates, logs, evaluates and saves, and the stages that hooks see."""

from __future__ import annotations

from kit.steps.ledger import PlanMismatchError
from kit.trainer.trainer import Trainer

__all__ = ["PlanMismatchError", "Trainer"]
