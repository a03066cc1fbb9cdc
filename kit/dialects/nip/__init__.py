"""The vocabulary of neural-interactive-proofs (https://github.com/SamAdamDay/neural-interactive-proofs)."""

from __future__ import annotations

from kit.dialects.nip import counting, notes
from kit.dialects.nip.settings import LrFactors as LrFactors
from kit.dialects.nip.settings import NipSettings


class Nip(NipSettings):
    """``RlTrainerParameters`` of neural-interactive-proofs, and their plan."""

    _plan = counting.to_plan
    _notes = notes.notes
    _from = staticmethod(counting.settings_from)


RlTrainerParameters = Nip
