"""Step accounting: plans, ledgers, replay ratios, periodic events and schedules.

This package is pure Python and does not import PyTorch.
"""

from __future__ import annotations

from kit.steps.counting import ReplayRatio
from kit.steps.counts import Counts
from kit.steps.errors import SettingError
from kit.steps.every import Every
from kit.steps.ledger import Difference, StepLedger
from kit.steps.plan import StepPlan
from kit.steps.schedule import Due, RunSchedule
from kit.steps.schedules import (
    Constant,
    Cosine,
    Decay,
    Exponential,
    Linear,
    Piecewise,
    Schedule,
    Warmup,
    make_schedule,
)
from kit.steps.settings import (
    ExplorationSteps,
    OfflineSteps,
    OffPolicySteps,
    OnPolicySteps,
    SequenceSteps,
)

__all__ = [
    "Constant", "Cosine", "Counts", "Decay", "Difference", "Due", "Every", "ExplorationSteps",
    "Exponential", "Linear", "OffPolicySteps", "OfflineSteps", "OnPolicySteps", "Piecewise",
    "ReplayRatio", "RunSchedule", "Schedule", "SequenceSteps", "SettingError", "StepLedger",
    "StepPlan", "Warmup", "make_schedule",
]  # fmt: skip
