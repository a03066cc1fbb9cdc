"""Recipe settings: dataclasses, bounded types and checks."""

from __future__ import annotations

from kit.config.checks import reject_unused
from kit.config.limits import (
    DecayRate,
    FiniteFloat,
    HiddenSizes,
    LayerWidth,
    LogStd,
    NonNegativeFloat,
    NumAtoms,
    NumFrames,
    NumNetworks,
    NumQuantiles,
    PositiveFloat,
    PositiveFraction,
    ScheduleName,
    Seed,
    UnitInterval,
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
    SquashedNoiseConfig,
    StateDependentNoiseConfig,
)
from kit.steps.errors import Limits
from kit.steps.given import GivenFields
from kit.steps.schema import NonNegativeInt, PositiveInt

__all__ = [
    "ActorCriticConfig",
    "CriticNetworkConfig",
    "DecayRate",
    "EnvConfig",
    "FiniteFloat",
    "FittedCriticConfig",
    "GivenFields",
    "HiddenSizes",
    "LayerWidth",
    "Limits",
    "LogStd",
    "NetworkConfig",
    "NonNegativeFloat",
    "NonNegativeInt",
    "NumAtoms",
    "NumFrames",
    "NumNetworks",
    "NumQuantiles",
    "OffPolicyConfig",
    "OfflineConfig",
    "OnPolicyConfig",
    "PositiveFloat",
    "PositiveFraction",
    "PositiveInt",
    "ReplayConfig",
    "RunConfig",
    "ScheduleName",
    "Seed",
    "SquashedNoiseConfig",
    "StateDependentNoiseConfig",
    "UnitInterval",
    "reject_unused",
]  # fmt: skip
