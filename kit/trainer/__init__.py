"""Training loop, checkpoints, and the stages at which hooks run."""

from __future__ import annotations

from kit.steps.ledger import PlanMismatchError
from kit.trainer.checkpoint import Checkpoints, CorruptCheckpointError
from kit.trainer.stages import HookError
from kit.trainer.trainer import Trainer

__all__ = ["Checkpoints", "CorruptCheckpointError", "HookError", "PlanMismatchError", "Trainer"]
