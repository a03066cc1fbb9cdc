"""What a step is: plans, ledgers, ratios, cadences and schedules.

Pure Python. Importing this imports no torch.
"""

from __future__ import annotations

from kit.steps.clock import UpdateClock
from kit.steps.errors import SettingError
from kit.steps.every import Every
from kit.steps.ledger import Difference, StepLedger
from kit.steps.plan import Counts, StepPlan
from kit.steps.ratio import ReplayRatio
from kit.steps.schedules import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    Piecewise,
    Schedule,
    make_schedule,
)

__all__ = [
    "Constant",
    "Cosine",
    "Counts",
    "Difference",
    "Every",
    "Exponential",
    "Linear",
    "Piecewise",
    "ReplayRatio",
    "Schedule",
    "SettingError",
    "StepLedger",
    "StepPlan",
    "UpdateClock",
    "make_schedule",
]
