"""What a run says about itself: rows, loggers, files."""

from __future__ import annotations

from kit.logging.loggers import (
    CsvLogger,
    RowLogger,
    TorchRLLogger,
    WandbLogger,
    make_loggers,
    read_rows,
)

__all__ = [
    "CsvLogger",
    "RowLogger",
    "TorchRLLogger",
    "WandbLogger",
    "make_loggers",
    "read_rows",
]
