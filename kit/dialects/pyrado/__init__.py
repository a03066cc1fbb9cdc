"""The words of pyrado, the Python side of SimuRLacra (https://github.com/famura/SimuRLacra)."""

from __future__ import annotations

from kit.dialects.pyrado.settings import GAE as GAE
from kit.dialects.pyrado.settings import Pyrado as Pyrado
