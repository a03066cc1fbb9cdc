"""Transitions to and from TorchRL's storage, past TensorDict where nothing else is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from kit.buffers.writer import SliceWriter


class _Rows:
    """All rows of one entry of the storage.

    Args:
        key: of the entry.
        tensor: ``[max_size, ...]``.
    """

    def __init__(self, key: Any, tensor: Tensor) -> None:
        self.key, self.tensor = key, tensor
        # NumPy takes a quarter of PyTorch's time for so few rows.
        self.array = tensor.numpy() if tensor.device.type == "cpu" else None

    def write(self, rows: slice, value: Tensor) -> None:
        """Write ``[num_envs, steps, ...]`` in the order of time."""
        if self.array is None or value.device.type != "cpu":
            self.tensor[rows] = value.transpose(0, 1).flatten(0, 1)
        elif value.numel() == self.array[rows].size == value.shape[0] * value.shape[1]:
            self.array[rows].reshape(-1)[...] = value.numpy().swapaxes(0, 1).reshape(-1)
        else:
            array = value.numpy().swapaxes(0, 1)
            self.array[rows] = array.reshape(-1, *array.shape[2:])

    def read(self, index: Tensor, places: NDArray[np.int64]) -> Tensor:
        """Copy the rows of an index, given as a tensor and as an array."""
        if self.array is None:
            return self.tensor[index]
        return torch.from_numpy(self.array.take(places, 0))


class DirectRows:
    """Writes and samples rows of a plain replay buffer, entry by entry.

    What is stored, sampled and drawn at random is what TorchRL's ``extend`` and ``sample`` store,
    sample and draw; one transition costs a tenth. Plain is a buffer of one dimension in memory,
    written in turn, sampled uniformly, without transforms or threads.

    Args:
        buffer: the replay buffer.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.storage, self.writer = buffer.storage, buffer.writer
        self.is_plain = (
            type(buffer) is TensorDictReplayBuffer
            and type(self.storage) is LazyTensorStorage
            and type(self.writer) is SliceWriter
            and type(buffer.sampler) is RandomSampler
            and self.storage.ndim == 1
            and not len(buffer.transform)
            and not getattr(buffer, "_prefetch", False)
            and not self.writer.tracks_generations
        )
        self._shown: Any = None
        self._rows: list[_Rows] = []
        self._sizes: dict[Any, int] = {}

    def _look(self) -> bool:
        """Whether there are rows, which are looked up again where the storage has others."""
        if not self.is_plain or not self.storage.initialized:
            return False
        rows = self.storage._storage
        if rows is not self._shown:
            self._shown = rows
            self._rows = [_Rows(key, rows.get(key)) for key in rows.keys(True, True)]
            nested = {row.key[:-1]: rows.get(row.key[:-1]) for row in self._rows if _nested(row)}
            self._sizes = {key: len(group.keys()) for key, group in nested.items()}
            self._size = len(rows.keys()) - ("index" in rows.keys())
        return True

    def _has_entries_of(self, batch: TensorDictBase) -> bool:
        """Whether a batch has the entries that are stored, and no others."""
        return len(batch.keys()) - ("index" in batch.keys()) == self._size and all(
            len(batch.get(key).keys()) == size for key, size in self._sizes.items()
        )

    def extend(self, batch: TensorDictBase) -> bool:
        """Store a batch ``[num_envs, steps]`` in the order of time; return whether that was done.

        It is not where the batch does not fit in one piece or has other entries.
        """
        if not self._look():
            return False
        count, start = batch.numel(), self.writer._cursor
        rows = slice(start, start + count)
        if rows.stop > self.storage.max_size:
            return False
        try:
            values = [batch.get(row.key) for row in self._rows if row.key != "index"]
            same = self._has_entries_of(batch)
        except (KeyError, AttributeError):
            return False
        if not same:
            return False
        taken = iter(values)
        for row in self._rows:
            if row.key == "index":
                torch.arange(rows.start, rows.stop, out=row.tensor[rows])
            else:
                row.write(rows, next(taken))
        self.storage._set_last_cursor(rows.stop - 1)
        self.storage._len = min(self.storage._len + count, self.storage.max_size)
        self.storage._bump_mutation_revision()
        self.writer._cursor = rows.stop % self.storage.max_size
        self.writer._write_count += count
        return True

    def sample(self, size: int, keys: Sequence[Any] = ()) -> TensorDictBase | None:
        """Draw a minibatch ``[size]``; ``None`` where the buffer is not plain.

        Args:
            size: transitions.
            keys: the only ones that will be read; empty: any may be.
        """
        if not self._look():
            return None
        index, _ = self.buffer.sampler.sample(self.storage, size)
        places = index.numpy() if index.device.type == "cpu" else None
        wanted = [row for row in self._rows if not keys or row.key in keys]
        root: dict[str, Any] = {"index": index}
        for row in wanted:
            group, name = root, row.key
            if isinstance(name, tuple):
                for part in name[:-1]:
                    group = group.setdefault(part, {})
                name = name[-1]
            if name != "index":
                group[name] = row.read(index, places)
        return TensorDict(root, [size])


def _nested(row: _Rows) -> bool:
    return isinstance(row.key, tuple)
