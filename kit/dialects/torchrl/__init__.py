"""The vocabulary of TorchRL's own ``Trainer``, its collectors and its replay buffers."""

from __future__ import annotations

from kit.dialects.torchrl import counting, notes
from kit.dialects.torchrl.settings import TorchRLSettings


class TorchRL(TorchRLSettings):
    """Settings of TorchRL's collector, replay buffer and ``Trainer``, and their plan."""

    _plan = counting.to_plan
    _notes = notes.notes
    _from = staticmethod(counting.settings_from)
