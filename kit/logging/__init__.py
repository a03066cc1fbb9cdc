"""Metrics, loggers and files of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.lazy import lazy

if TYPE_CHECKING:
    from kit.logging.csv_file import read_rows as read_rows
    from kit.logging.loggers import CsvLogger as CsvLogger
    from kit.logging.loggers import LoggerError as LoggerError
    from kit.logging.loggers import RowLogger as RowLogger
    from kit.logging.loggers import TensorBoardLogger as TensorBoardLogger
    from kit.logging.loggers import TorchRLLogger as TorchRLLogger
    from kit.logging.loggers import WandbLogger as WandbLogger
    from kit.logging.loggers import make_loggers as make_loggers

# Lazy imports, so that reading rows does not import torch.
_HOMES = {
    "csv_file": ["read_rows"],
    "loggers": [
        "CsvLogger", "LoggerError", "RowLogger", "TensorBoardLogger", "TorchRLLogger",
        "WandbLogger", "make_loggers",
    ],
}  # fmt: skip

__getattr__, __dir__ = lazy(__name__, _HOMES)
