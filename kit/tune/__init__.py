"""Hyperparameter search with Ray Tune."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.lazy import lazy

if TYPE_CHECKING:
    from kit.tune.trials import trainable

__all__ = ["trainable"]

__getattr__, __dir__ = lazy(__name__)
