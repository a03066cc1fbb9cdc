"""Memory in files, for more transitions than fit in memory."""

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
    """A tensor of zeros in a file that is mapped to memory.

    The file has no name: its space is free again when the process ends, however it ends.

    Raises:
        OSError: if the folder cannot be written to, or its disk has no room.
    """
    size = math.prod(shape) * dtype.itemsize
    with tempfile.TemporaryFile(dir=folder) as file:
        # Taken now: where a mapped page finds the disk full, the process is killed.
        file.truncate(max(size, 1))
        if hasattr(os, "posix_fallocate"):  # not on every system
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
        memory = np.memmap(file, np.uint8, "r+", shape=max(size, 1))
    return torch.from_numpy(memory)[:size].view(dtype).view(torch.Size(shape))


class TransitionStorage(LazyTensorStorage):  # type: ignore[misc, unused-ignore]
    """TorchRL's storage of transitions, whose memory may be on a disk.

    ``LazyMemmapStorage`` is TorchRL's for that: its files stay behind when a process is killed, and
    a full disk kills the process.

    Args:
        max_size: transitions it holds; the oldest are overwritten.
        folder: where its files are; ``None``: it is in memory.
        **settings: of TorchRL's ``LazyTensorStorage``.
    """

    def __init__(self, max_size: int, folder: Path | str | None = None, **settings: Any) -> None:
        super().__init__(max_size, **settings)
        self.folder = None if folder is None else Path(folder).absolute()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros, in memory or on the disk."""
        if self.folder is None:
            return torch.zeros(*shape, dtype=dtype)
        return zeros_on_disk(shape, dtype, self.folder)

    def _init_standard(self, data: TensorDictBase) -> None:
        if self.folder is None:
            before = torchrl_logger.level
            torchrl_logger.setLevel(max(before, logging.WARNING))  # it tells the shape
            super()._init_standard(data)
            torchrl_logger.setLevel(before)
            return
        size = self.max_size
        self._storage = data.to("cpu").apply(
            lambda one: self.zeros((size, *one.shape), one.dtype), batch_size=[size, *data.shape]
        )
        self.initialized = True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore TorchRL's state, on the disk if that is where this storage is."""
        if self.folder is not None and self._storage is None and state_dict["initialized"]:
            rows = TensorDict().load_state_dict(copy(state_dict["_storage"]), strict=False)
            rows.batch_size = [self.max_size]
            self._init_standard(rows[0])
        super().load_state_dict(state_dict)
