"""Replay storage on disk, for buffers that do not fit in memory."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl import torchrl_logger
from torchrl.data import LazyTensorStorage


def zeros_on_disk(shape: Sequence[int], dtype: torch.dtype, folder: Path | str) -> Tensor:
    """Return a zero tensor backed by a memory-mapped file.

    The file has no name, so its space is freed even if the process is killed.

    Raises:
        OSError: If the folder is not writable or the disk is full.
    """
    size = math.prod(shape) * dtype.itemsize
    with tempfile.TemporaryFile(dir=folder) as file:
        # Reserve the space now, because writing a mapped page to a full disk kills the process.
        file.truncate(max(size, 1))
        if hasattr(os, "posix_fallocate"):  # missing on macOS and Windows
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
        memory = np.memmap(file, np.uint8, "r+", shape=max(size, 1))
    return torch.from_numpy(memory)[:size].view(dtype).view(torch.Size(shape))


class TransitionStorage(LazyTensorStorage):  # type: ignore[misc, unused-ignore]
    """TorchRL storage for transitions, in memory or on disk.

    Unlike TorchRL's ``LazyMemmapStorage``, it leaves no files behind when the process is killed,
    and a full disk raises an error instead of killing the process.

    Args:
        max_size: Maximum number of transitions; the oldest are overwritten.
        folder: Folder for the files; ``None``: keep transitions in memory.
        **settings: Arguments for TorchRL's ``LazyTensorStorage``.
    """

    def __init__(self, max_size: int, folder: Path | str | None = None, **settings: Any) -> None:
        super().__init__(max_size, **settings)
        self.folder = None if folder is None else Path(folder).absolute()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a zero tensor in memory or on disk."""
        if self.folder is None:
            return torch.zeros(*shape, dtype=dtype)
        return zeros_on_disk(shape, dtype, self.folder)

    def _init_standard(self, data: TensorDictBase) -> None:
        if self.folder is None:
            before = torchrl_logger.level
            torchrl_logger.setLevel(max(before, logging.WARNING))  # TorchRL logs the shape
            super()._init_standard(data)
            torchrl_logger.setLevel(before)
            return
        size = self.max_size
        self._storage = data.to("cpu").apply(
            lambda t: self.zeros((size, *t.shape), t.dtype), batch_size=[size, *data.shape]
        )
        self.initialized = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of TorchRL's storage, in memory or on disk."""
        if self.folder is not None and self._storage is None and state_dict["initialized"]:
            rows = TensorDict().load_state_dict(copy(state_dict["_storage"]), strict=False)
            rows.batch_size = [self.max_size]
            self._init_standard(rows[0])
        super().load_state_dict(state_dict)
