"""Collectors: an environment and a policy in, batches out."""

from __future__ import annotations

from kit.collectors.asynchronous import AsyncCollector
from kit.collectors.base import KitCollector, StepsCollector
from kit.collectors.diverged import PolicyFault
from kit.collectors.episode import EpisodeCollector
from kit.collectors.registry import COLLECTORS, make_collector
from kit.collectors.tensor import TensorCollector
from kit.collectors.vector import VectorCollector

__all__ = [
    "COLLECTORS",
    "AsyncCollector",
    "EpisodeCollector",
    "KitCollector",
    "PolicyFault",
    "StepsCollector",
    "TensorCollector",
    "VectorCollector",
    "make_collector",
]
