"""Tensor functions that are traced once and replayed without Python overhead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.lazy import lazy

if TYPE_CHECKING:
    from kit.fast.optimizers import RMSprop

__all__ = ["RMSprop"]

# Lazy, because the modules in this package import each other.
__getattr__, __dir__ = lazy(__name__)
