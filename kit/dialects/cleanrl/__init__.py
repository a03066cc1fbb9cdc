"""CleanRL (https://github.com/vwxyzjn/cleanrl): each algorithm is a single file."""

from __future__ import annotations

from kit.dialects.cleanrl import counting, notes
from kit.dialects.cleanrl.settings import CleanRLSettings


class CleanRL(CleanRLSettings):
    """Arguments of CleanRL's files, and their plan."""

    _plan = counting.to_plan
    _notes = notes.notes
    _from = staticmethod(counting.settings_from)
