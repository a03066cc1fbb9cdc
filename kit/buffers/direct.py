"""Transitions to and from TorchRL's storage, past TensorDict where nothing else is asked of it."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from kit.buffers.writer import SliceWriter


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
        self._rows: list[tuple[Any, Tensor]] = []

    def _look(self) -> bool:
        """Whether there are rows, which are looked up again where the storage has others."""
        if not self.is_plain or not self.storage.initialized:
            return False
        rows = self.storage._storage
        if rows is not self._shown:
            self._shown = rows
            self._rows = [(key, rows.get(key)) for key in rows.keys(True, True)]
        return True

    def extend(self, batch: TensorDictBase) -> bool:
        """Store a batch ``[num_envs, steps]`` in the order of time; return whether that was done.

        It is not where the batch does not fit in one piece or has other entries.
        """
        if not self._look():
            return False
        count, start = batch.numel(), self.writer._cursor
        end = start + count
        values = [batch.get(key, None) for key, _ in self._rows if key != "index"]
        entries = sum(1 for _ in batch.keys(True, True)) - ("index" in batch.keys())
        if end > self.storage.max_size or entries != len(values) or any(v is None for v in values):
            return False
        taken = iter(values)
        for key, rows in self._rows:
            if key == "index":
                torch.arange(start, end, out=rows[start:end])
            else:
                rows[start:end] = next(taken).transpose(0, 1).flatten(0, 1)
        self.storage._set_last_cursor(slice(start, end))
        self.storage._len = min(self.storage._len + count, self.storage.max_size)
        self.storage._bump_mutation_revision()
        self.writer._cursor = end % self.storage.max_size
        self.writer._write_count += count
        return True

    def sample(self, size: int) -> TensorDictBase | None:
        """Return a minibatch ``[size]``; ``None`` where the buffer is not plain."""
        if not self._look():
            return None
        index, _ = self.buffer.sampler.sample(self.storage, size)
        root: dict[str, Any] = {}
        for key, rows in self._rows:
            place = root
            if isinstance(key, tuple):
                for name in key[:-1]:
                    place = place.setdefault(name, {})
                key = key[-1]
            place[key] = rows[index]
        root["index"] = index
        return TensorDict(root, [size])
