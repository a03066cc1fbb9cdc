"""The words of neural-interactive-proofs."""

from __future__ import annotations

from kit.dialects.nip.settings import LrFactors as LrFactors
from kit.dialects.nip.settings import Nip as Nip
from kit.dialects.nip.settings import RlTrainerParameters as RlTrainerParameters
