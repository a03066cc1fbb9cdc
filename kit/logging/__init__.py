"""What a run says about itself: rows, loggers, files."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.logging.csv_file import read_rows as read_rows
    from kit.logging.loggers import CsvLogger as CsvLogger
    from kit.logging.loggers import RowLogger as RowLogger
    from kit.logging.loggers import TorchRLLogger as TorchRLLogger
    from kit.logging.loggers import WandbLogger as WandbLogger
    from kit.logging.loggers import make_loggers as make_loggers

# Lazy, so that whoever only reads rows does not import torch.
_HOMES = {
    "csv_file": ["read_rows"],
    "loggers": ["CsvLogger", "RowLogger", "TorchRLLogger", "WandbLogger", "make_loggers"],
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(name for names in _HOMES.values() for name in names)
