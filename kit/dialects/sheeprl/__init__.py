"""The words of sheeprl (https://github.com/Eclectic-Sheep/sheeprl)."""

from __future__ import annotations

from kit.dialects.sheeprl.settings import Sheeprl as Sheeprl
