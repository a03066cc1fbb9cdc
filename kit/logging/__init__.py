"""Loggers for rows of metrics, and functions that write a run's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.lazy import lazy

if TYPE_CHECKING:
    from kit.logging.csv_file import read_rows
    from kit.logging.files import WriteError
    from kit.logging.loggers import (
        CsvLogger,
        LoggerError,
        RowLogger,
        TensorBoardLogger,
        TorchRLLogger,
        WandbLogger,
        make_loggers,
    )

__all__ = [
    "CsvLogger",
    "LoggerError",
    "RowLogger",
    "TensorBoardLogger",
    "TorchRLLogger",
    "WandbLogger",
    "WriteError",
    "make_loggers",
    "read_rows",
]  # fmt: skip

# Lazy, so that code that only reads rows does not import torch.
__getattr__, __dir__ = lazy(__name__)
