"""Suites that check collectors against their contract, and dialects against observed runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.lazy import lazy

if TYPE_CHECKING:
    from kit.testing.cartpole import CARTPOLE
    from kit.testing.collectors import (
        COLLECTOR_CHECKS,
        TORCHRL_COLLECTOR_CHECKS,
        check_collector,
        counter_env,
        counter_policy,
        recurrent_policy,
    )
    from kit.testing.observed import Expectation, Observation, check_observed, figures_of
    from kit.testing.tensor_counter import COUNTING, REPEATING
    from kit.testing.trial import CollectorCase, ConformanceError, Expected, SuiteEnv

__all__ = [
    "CARTPOLE",
    "COLLECTOR_CHECKS",
    "COUNTING",
    "REPEATING",
    "TORCHRL_COLLECTOR_CHECKS",
    "CollectorCase",
    "ConformanceError",
    "Expectation",
    "Expected",
    "Observation",
    "SuiteEnv",
    "check_collector",
    "check_observed",
    "counter_env",
    "counter_policy",
    "figures_of",
    "recurrent_policy",
]  # fmt: skip

# Imports are lazy, because the collector suites import torch and the dialect suites do not.
__getattr__, __dir__ = lazy(__name__)
