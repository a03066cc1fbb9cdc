"""The words of TorchRL's own ``Trainer``, its collectors and its replay buffers."""

from __future__ import annotations

from kit.dialects.torchrl.settings import TorchRL as TorchRL
