"""Registry of dialects (the config formats of other libraries), imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

from kit.steps.errors import SettingError, nearest_first

DIALECTS: dict[str, str] = {
    "sheeprl": "kit.dialects.sheeprl:Sheeprl",
    "tianshou": "kit.dialects.tianshou:Tianshou",
    "tianshou2": "kit.dialects.tianshou:Tianshou2",
    "pyrado": "kit.dialects.pyrado:Pyrado",
    "nip": "kit.dialects.nip:Nip",
    "dreamer": "kit.dialects.dreamer:Dreamer",
    "dreamer-paper": "kit.dialects.dreamer:DreamerPaper",
    "sb3": "kit.dialects.sb3:SB3",
    "torchrl": "kit.dialects.torchrl:TorchRL",
    "cleanrl": "kit.dialects.cleanrl:CleanRL",
}
"""Module and class of each dialect. Add an entry to register a dialect."""


def dialect(name: Any) -> type[Any]:
    """Return the dialect class named ``name``, a subclass of ``kit.dialects.Dialect``.

    Raises:
        SettingError: if the dialect does not exist. The message suggests the nearest names.
    """
    if name not in DIALECTS:
        raise SettingError("dialect", name, "is not a dialect", nearest_first(name, [*DIALECTS]))
    module, _, class_name = DIALECTS[name].partition(":")
    found: type[Any] = getattr(importlib.import_module(module), class_name)
    return found
