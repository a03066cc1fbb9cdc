"""The vocabulary of Stable-Baselines3 (https://github.com/DLR-RM/stable-baselines3)."""

from __future__ import annotations

from kit.dialects.sb3 import counting, notes
from kit.dialects.sb3.settings import SB3Settings


class SB3(SB3Settings):
    """Settings of Stable-Baselines3, and their plan."""

    _plan = counting.to_plan
    _notes = notes.notes
    _algorithms_for = staticmethod(counting.algorithms_for)
    _from = staticmethod(counting.settings_from)
