"""Settings: dataclasses of plain values, their limits and their documentation."""

from __future__ import annotations

from kit.config.limits import Count, Limits, NotNegative, Positive, UnitInterval
from kit.config.settings import EnvConfig, OffPolicyConfig, OnPolicyConfig, RunConfig

__all__ = [
    "Count",
    "EnvConfig",
    "Limits",
    "NotNegative",
    "OffPolicyConfig",
    "OnPolicyConfig",
    "Positive",
    "RunConfig",
    "UnitInterval",
]
