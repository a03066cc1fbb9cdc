"""Settings: dataclasses of plain values, their limits and their documentation."""

from __future__ import annotations

from kit.config.limits import (
    Atoms,
    ClipRange,
    Count,
    Decay,
    Finite,
    Frames,
    HiddenSizes,
    Limits,
    LogStd,
    Natural,
    Networks,
    NotNegative,
    Outputs,
    Positive,
    ScheduleName,
    Seed,
    UnitInterval,
    Width,
)
from kit.config.settings import (
    ActorCriticConfig,
    EnvConfig,
    FittedCriticConfig,
    NetworkConfig,
    OfflineConfig,
    OffPolicyConfig,
    OnPolicyConfig,
    ReplayConfig,
    RunConfig,
)

__all__ = [
    "ActorCriticConfig", "Atoms", "ClipRange", "Count", "Decay", "EnvConfig", "Finite",
    "FittedCriticConfig", "Frames", "HiddenSizes", "Limits", "LogStd", "Natural", "NetworkConfig",
    "Networks", "NotNegative", "OffPolicyConfig", "OfflineConfig", "OnPolicyConfig", "Outputs",
    "Positive", "ReplayConfig", "RunConfig", "ScheduleName", "Seed", "UnitInterval", "Width",
]  # fmt: skip
