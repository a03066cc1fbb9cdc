"""Suites that check parts against their contracts, and dialects against observed runs."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "CARTPOLE": "cartpole",
    "COUNTING": "tensor_counter",
    "PROMISES": "collectors",
    "TORCHRL_PROMISES": "collectors",
    "BrokenPromise": "trial",
    "CollectorCase": "world",
    "Outcome": "world",
    "World": "world",
    "check_collector": "collectors",
    "check_observed": "observed",
    "counter_env": "collectors",
    "counter_policy": "collectors",
}
"""Which module has which suite; each is imported when it is asked for, as some import torch."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"kit.testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
