"""Compare saved runs and use their policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.lazy import lazy

if TYPE_CHECKING:
    from kit.runs.comparison import Comparison, Group, SeedCurve, compare
    from kit.runs.saved_policy import SavedPolicy, SavedRun

__all__ = ["Comparison", "Group", "SavedPolicy", "SavedRun", "SeedCurve", "compare"]

# Lazy, because comparing runs does not need torch.
__getattr__, __dir__ = lazy(__name__)
