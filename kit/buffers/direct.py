"""Transitions to and from TorchRL's storage, past TensorDict where nothing else is asked of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from kit.buffers.observations import ObservationStorage
from kit.buffers.writer import SliceWriter
from kit.fast.nested import leaves, nested


def on_host(tensor: Tensor) -> bool:
    """Whether NumPy can show a tensor, without waiting for a device."""
    return tensor.is_cpu and tensor.dtype in _OF_NUMPY and not tensor.requires_grad


_OF_NUMPY = frozenset(
    {torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8}
    | {torch.int8, torch.int16, torch.int32, torch.int64}
)


class _Rows:
    """All rows of one entry of the storage.

    Args:
        tensor: ``[max_size, ...]``.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        # NumPy takes a quarter of PyTorch's time for so few rows.
        self.array = tensor.numpy() if on_host(tensor) else None
        self._shape = (-1, *tensor.shape[1:])

    def write(self, rows: slice, value: Tensor) -> None:
        """Write ``[num_envs, steps, ...]`` in the order of time."""
        if self.array is not None:
            try:
                given = value.numpy()
                in_time = given.swapaxes(0, 1).reshape(self._shape) if len(given) > 1 else given[0]
                self.array[rows] = in_time
                return
            except (TypeError, RuntimeError):  # on a device, or of a type that NumPy lacks
                pass
        self.tensor[rows] = value.transpose(0, 1).flatten(0, 1)

    def read(self, index: Tensor, places: NDArray[np.int64] | None) -> Tensor:
        """Copy the rows of an index, given as a tensor and, on the host, as an array."""
        if self.array is None or places is None:
            return self.tensor[index]
        return torch.from_numpy(self.array.take(places, 0))


class DirectRows:
    """Writes and samples rows of a plain replay buffer, entry by entry.

    What is stored, sampled and drawn at random is what TorchRL's ``extend`` and ``sample`` store,
    sample and draw; with less Python in between. Plain is a buffer of one dimension in memory,
    written in turn, sampled uniformly, without transforms or threads.

    Args:
        buffer: the replay buffer.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.storage, self.writer = buffer.storage, buffer.writer
        self._may_be_plain = (
            type(buffer) is TensorDictReplayBuffer
            and type(self.storage) in (LazyTensorStorage, ObservationStorage)
            and type(self.writer) is SliceWriter
            and self.storage.ndim == 1
            and not getattr(buffer, "_prefetch", False)
            and not self.writer.tracks_generations
        )
        self._once = self.storage if isinstance(self.storage, ObservationStorage) else None
        self._transforms = buffer._transform.transforms
        self._shown: Any = None
        self._rows: dict[tuple[str, ...], _Rows] = {}

    def _look(self) -> bool:
        """Whether there are rows and nothing else is asked of the buffer.

        Transforms and samplers may come later; rows are looked up again where the storage has
        others.
        """
        uniform = type(self.buffer._sampler) is RandomSampler and not len(self._transforms)
        if not (self._may_be_plain and uniform and self.storage.initialized):
            return False
        rows = self.storage._storage
        if rows is not self._shown:
            self._shown = rows
            self._rows = {path: _Rows(value) for path, value in leaves(rows).items()}
            index = self._rows.pop(("index",), None)
            if index is not None:  # the same whatever is written there
                index.tensor.copy_(torch.arange(len(index.tensor)))
        return True

    @property
    def filled(self) -> int:
        """Rows that are stored, where the buffer is plain; otherwise 0."""
        return self.storage._len if self._look() else 0

    def extend(self, batch: TensorDictBase) -> bool:
        """Store a batch ``[num_envs, steps]`` in the order of time; return whether that was done.

        It is not where the batch does not fit in one piece or has other entries.
        """
        if not self._look():
            return False
        count, start = batch.numel(), self.writer._cursor
        end = start + count
        values = leaves(batch)
        values.pop(("index",), None)
        own = values if self._once is None else self._once.without_observations(values)
        if end > self.storage.max_size or own.keys() != self._rows.keys():
            return False
        if self._once is not None:
            read = [path for path in values if path not in own or path == ("next", "done")]
            self._once.store({p: values[p].transpose(0, 1).flatten(0, 1) for p in read})
        rows = slice(start, end)
        for path, value in own.items():
            self._rows[path].write(rows, value)
        self.storage._set_last_cursor(end - 1)
        self.storage._len = min(self.storage._len + count, self.storage.max_size)
        self.storage._bump_mutation_revision()
        self.writer._cursor = end % self.storage.max_size
        self.writer._write_count += count
        return True

    def sample(self, size: int) -> TensorDictBase | None:
        """Draw a minibatch ``[size]``; ``None`` where the buffer is empty, or not plain."""
        storage = self.storage
        filled = self.filled
        if not filled:
            return None
        index = torch.randint(  # as RandomSampler draws
            0, filled, (size,), generator=storage._rng, device=storage.device
        )
        places = index.numpy() if on_host(index) else None
        drawn = {path: rows.read(index, places) for path, rows in self._rows.items()}
        if self._once is not None:
            drawn |= self._once.read(index.numpy())
        return nested({("index",): index, **drawn}, [size])
