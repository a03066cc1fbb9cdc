"""The former place of :mod:`kit.runs.comparison`, which documents of version 0.1.0 name."""

from __future__ import annotations

from kit.runs.comparison import compare

__all__ = ["compare"]
