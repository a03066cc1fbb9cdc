"""Collectors: an environment and a policy in, batches out."""

from __future__ import annotations

from kit.collectors.base import KitCollector
from kit.collectors.episode import EpisodeCollector
from kit.collectors.tensor import TensorCollector
from kit.collectors.vector import VectorCollector

__all__ = ["EpisodeCollector", "KitCollector", "TensorCollector", "VectorCollector"]
