"""The words of CleanRL (https://github.com/vwxyzjn/cleanrl), whose algorithms are single files."""

from __future__ import annotations

from kit.dialects.cleanrl import counting, notes, reverse
from kit.dialects.cleanrl.settings import CleanRLSettings


class CleanRL(CleanRLSettings):
    """Arguments of CleanRL's files, and the plan that they make."""

    _plan = counting.to_plan
    _notes = notes.notes
    _from = staticmethod(reverse.settings_from)
