"""Settings: dataclasses of plain values, their limits and their documentation."""

from __future__ import annotations

from kit.config.limits import (
    Atoms,
    Decay,
    Finite,
    Frames,
    HiddenSizes,
    LogStd,
    Networks,
    NotNegative,
    Outputs,
    Positive,
    ScheduleName,
    Seed,
    Share,
    UnitInterval,
    Width,
)
from kit.config.settings import (
    ActorCriticConfig,
    CriticNetworkConfig,
    EnvConfig,
    FittedCriticConfig,
    NetworkConfig,
    OfflineConfig,
    OffPolicyConfig,
    OnPolicyConfig,
    ReplayConfig,
    RunConfig,
)
from kit.steps.errors import Limits
from kit.steps.given import GivenFields
from kit.steps.schema import Count, Natural

__all__ = [
    "ActorCriticConfig", "Atoms", "Count", "CriticNetworkConfig", "Decay", "EnvConfig", "Finite",
    "FittedCriticConfig", "Frames", "GivenFields", "HiddenSizes", "Limits", "LogStd", "Natural",
    "NetworkConfig", "Networks", "NotNegative", "OffPolicyConfig", "OfflineConfig",
    "OnPolicyConfig", "Outputs", "Positive", "ReplayConfig", "RunConfig", "ScheduleName", "Seed",
    "Share", "UnitInterval", "Width",
]  # fmt: skip
