"""Settings: dataclasses of plain values, their limits and their documentation."""

from __future__ import annotations

from kit.config.actor_critic import ActorCriticConfig
from kit.config.limits import Count, Limits, Natural, NotNegative, Positive, UnitInterval
from kit.config.settings import EnvConfig, OffPolicyConfig, OnPolicyConfig, RunConfig

__all__ = [
    "ActorCriticConfig",
    "Count",
    "EnvConfig",
    "Limits",
    "Natural",
    "NotNegative",
    "OffPolicyConfig",
    "OnPolicyConfig",
    "Positive",
    "RunConfig",
    "UnitInterval",
]
