"""Collectors, which step environments with a policy and return batches of transitions."""

from __future__ import annotations

from kit.collectors.asynchronous import AsyncCollector
from kit.collectors.base import KitCollector, PolicyError, StepsCollector
from kit.collectors.episode import EpisodeCollector
from kit.collectors.ray import RayCollector
from kit.collectors.registry import COLLECTORS, make_collector
from kit.collectors.rollout import VectorCollector
from kit.collectors.tensor import TensorCollector

__all__ = [
    "COLLECTORS", "AsyncCollector", "EpisodeCollector", "KitCollector", "PolicyError",
    "RayCollector", "StepsCollector", "TensorCollector", "VectorCollector", "make_collector",
]  # fmt: skip
