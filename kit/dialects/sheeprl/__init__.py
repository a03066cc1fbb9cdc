"""The vocabulary of sheeprl (https://github.com/Eclectic-Sheep/sheeprl)."""

from __future__ import annotations

from kit.dialects.sheeprl import counting, notes, resume
from kit.dialects.sheeprl.settings import SheeprlSettings


class Sheeprl(SheeprlSettings):
    """Settings of sheeprl, and their plan."""

    ratio = counting.ratio
    resumed = resume.resumed
    _plan = counting.to_plan
    _notes = notes.notes
    _algorithms_for = staticmethod(counting.algorithms_for)
    _from = staticmethod(counting.settings_from)
