"""Conformance suites for collectors, and checks of dialects against observed runs."""

from __future__ import annotations

from kit.lazy import lazy

_HOMES = {
    "cartpole": ["CARTPOLE"],
    "collectors": [
        "COLLECTOR_CHECKS", "TORCHRL_COLLECTOR_CHECKS", "check_collector", "counter_env",
        "counter_policy", "recurrent_policy",
    ],
    "observed": ["Expectation", "Observation", "check_observed", "figures_of"],
    "tensor_counter": ["COUNTING", "REPEATING"],
    "trial": ["ConformanceError", "CollectorCase", "Expected", "SuiteEnv"],
}  # fmt: skip
"""Public names of each module. Imports are lazy, because some modules import torch."""

__getattr__, __dir__ = lazy(__name__, _HOMES)
__all__ = __dir__()
