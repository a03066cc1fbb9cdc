"""Transitions to and from TorchRL's storage, past TensorDict where nothing else is asked of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from kit.buffers.disk import TransitionStorage
from kit.buffers.hindsight import HindsightReplayBuffer
from kit.buffers.observations import ObservationStorage
from kit.buffers.priorities import PrioritizedSampler
from kit.buffers.sequences import SequenceSampler
from kit.buffers.writer import SliceWriter
from kit.envs.spaces import path_of
from kit.fast.nested import entry, leaves, nested, on_host
from kit.steps import SettingError

AT_ONCE = 2**20
"""Bytes of minibatches that are drawn at once, about."""

_SAMPLERS = (RandomSampler, PrioritizedSampler, SequenceSampler)


class _Rows:
    """All rows of one entry of the storage, ``[max_size, ...]``."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        # NumPy takes a quarter of PyTorch's time for so few rows.
        self.array = tensor.numpy() if on_host(tensor) else None
        self._shape = tensor.shape[1:]
        self._given: Tensor | None = None  # and NumPy's view of it, in the order of time
        self._in_time: NDArray[Any] | None = None

    def takes(self, value: Tensor | None) -> bool:
        """Whether ``[num_envs, steps, ...]`` can be written without changing what it says."""
        if value is None or value is self._given:
            return value is not None
        fits: bool = torch.can_cast(value.dtype, self.tensor.dtype)
        return fits and value.shape[2:] == self._shape

    def write(self, rows: slice, value: Tensor) -> None:
        """Write ``[num_envs, steps, ...]`` in the order of time."""
        if self.array is None or not on_host(value):
            self.tensor[rows] = value.transpose(0, 1).flatten(0, 1)
        else:
            self.array[rows] = self._ordered(value)

    def _ordered(self, value: Tensor) -> NDArray[Any]:
        """Values ``[num_envs, steps, ...]`` of the host as rows in the order of time."""
        if value is self._given:  # batches that share memory have the same tensors
            assert self._in_time is not None
            return self._in_time
        given: NDArray[Any] = value.numpy()
        in_time: NDArray[Any]
        if len(given) == 1:
            in_time = given[0]
        else:
            in_time = given.swapaxes(0, 1).reshape(value.shape[:2].numel(), *self._shape)
        if len(given) == 1 or np.may_share_memory(in_time, given):
            self._given, self._in_time = value, in_time
        return in_time

    def bytes_of(self, value: Tensor) -> NDArray[np.uint8]:
        """Values ``[num_envs, steps, ...]`` of the host as they are stored, byte by byte."""
        if value.dtype is not self.tensor.dtype:
            value = value.to(self.tensor.dtype)
        return np.ascontiguousarray(self._ordered(value)).reshape(-1).view(np.uint8)

    def bytes_at(self, rows: slice) -> Tensor:
        """Where rows are, byte by byte."""
        size = self._bytes.numel() // len(self.tensor)
        return self._bytes[rows.start * size : rows.stop * size]

    @functools.cached_property
    def _bytes(self) -> Tensor:
        return self.tensor.view(-1).view(torch.uint8)

    def read(self, index: Tensor, places: NDArray[np.int64] | None) -> Tensor:
        """Copy the rows of an index, given as a tensor and, on the host, as an array."""
        if self.array is None or places is None:
            return self.tensor.index_select(0, index)
        return torch.from_numpy(self.array.take(places, 0))


def _parts(rows: Mapping[tuple[str, ...], Tensor], size: int) -> list[dict[Any, Tensor]]:
    """Rows by path as minibatches of ``size`` of them, in the same memory."""
    of_each = zip(*(torch.split(value, size) for value in rows.values()))
    return [dict(zip(rows, values)) for values in of_each]


def _refuse(path: tuple[str, ...], value: Tensor | None, stored: Tensor | None) -> None:
    """Raise an error for an entry of a batch that the stored transitions have in another kind."""
    given = "missing" if value is None else f"{value.dtype} {[*value.shape[2:]]}"
    kept = "missing" if stored is None else f"{stored.dtype} {[*stored.shape[1:]]}"
    why = f"is {given} in a batch, and {kept} in stored transitions"
    raise SettingError("entry", ".".join(path), why, "give all batches the same entries")


class FastStorageIO:
    """Writes and samples rows of a plain replay buffer, entry by entry.

    What is stored, sampled and drawn at random is what TorchRL's ``extend`` and ``sample`` store,
    sample and draw; with less Python in between. Plain is a buffer of one dimension, sampled
    uniformly, by priority or in sequences, without transforms or threads.

    Args:
        buffer: the replay buffer.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self.buffer = buffer
        self.storage, self.writer = buffer.storage, buffer.writer
        self._may_be_plain = (
            type(buffer) in (TensorDictReplayBuffer, HindsightReplayBuffer)
            and type(self.storage) in (LazyTensorStorage, TransitionStorage, ObservationStorage)
            and self.storage.ndim == 1
            and not getattr(buffer, "_prefetch", False)
            and getattr(buffer, "_sample_unit", None) is None
            and getattr(buffer._collate_fn, "__name__", "") == "_collate_id"  # none of its own
            and not self.writer.tracks_generations
        )
        self._once = self.storage if isinstance(self.storage, ObservationStorage) else None
        self._hindsight = buffer if isinstance(buffer, HindsightReplayBuffer) else None
        self._transforms = buffer._transform.transforms
        self._shown: Any = None
        self._rows: dict[tuple[str, ...], _Rows] = {}
        self._read: tuple[Any, dict[tuple[str, ...], _Rows]] = None, {}
        self._prioritized = self._on_gpu = False
        self._row_bytes = 0

    def _look(self) -> bool:
        """Whether the buffer is plain and not empty; looks up its rows again if they are others."""
        kind = type(self.buffer._sampler)
        known = kind in _SAMPLERS and not len(self._transforms)
        if not (self._may_be_plain and known and self.storage.initialized):
            return False
        self._prioritized = kind is PrioritizedSampler
        rows = self.storage._storage
        if rows is not self._shown:
            self._shown, self._read = rows, (None, {})
            self._rows = {path: _Rows(value) for path, value in leaves(rows).items()}
            index = self._rows.pop(("index",), None)
            if index is not None:  # the same whatever is written there
                index.tensor.copy_(torch.arange(len(index.tensor)))
            # A storage whose device is "auto" may not say where it is.
            self._on_gpu = all(row.tensor.is_cuda for row in self._rows.values())
            observed = 0 if self._once is None else self._once.observed_bytes
            self._row_bytes = 8 + observed + sum(r.tensor[0].nbytes for r in self._rows.values())
        return True

    @property
    def filled(self) -> int:
        """Rows that are stored, where the buffer is plain; otherwise 0."""
        return self.storage._len if self._look() else 0

    def extend(self, batch: TensorDictBase) -> bool:
        """Store a batch ``[num_envs, steps]`` in the order of time; return whether that was done.

        It is not where the batch does not fit in one piece, or another writer than the kit's
        decides where it goes.

        Raises:
            SettingError: if an entry of the stored rows is missing, or cannot be stored as these,
                or they lack one of the batch.
        """
        if not self._look():
            return False
        values = leaves(batch)
        values.pop(("index",), None)
        own = values if self._once is None else self._once.without_observations(values)
        for path, stored in self._rows.items():
            if not stored.takes(own.get(path)):
                _refuse(path, own.get(path), stored.tensor)
        for path in own.keys() - self._rows.keys():  # TorchRL fills earlier rows with zeros
            _refuse(path, own[path], None)
        if type(self.writer) is not SliceWriter:
            return False
        count, start = batch.numel(), self.writer._cursor
        end = start + count
        if end > self.storage.max_size:
            return False
        if self._prioritized and entry(batch, self.buffer.priority_key) is not None:
            return False
        if self._once is not None:
            read = [path for path in values if path not in own or path == ("next", "done")]
            self._once.store({p: values[p].transpose(0, 1).flatten(0, 1) for p in read})
        rows = slice(start, end)
        if self._on_gpu and all(map(on_host, own.values())):
            self._bring(rows, own)
        else:
            for path, value in own.items():
                self._rows[path].write(rows, value)
        self._count(end)
        self.storage._len = min(self.storage._len + count, self.storage.max_size)
        self.writer._cursor = end % self.storage.max_size
        self.writer._write_count += count
        self._tell(start, end)
        if self._hindsight is not None:
            self._hindsight.note(batch.get(self._hindsight.end_key).reshape(batch.shape).t())
        return True

    def _bring(self, rows: slice, values: Mapping[tuple[str, ...], Tensor]) -> None:
        """Write entries of the host to rows of a GPU: they go there as one."""
        given = [self._rows[path].bytes_of(value) for path, value in values.items()]
        places = [self._rows[path].bytes_at(rows) for path in values]
        there = torch.from_numpy(np.concatenate(given)).to(places[0].device)
        torch._foreach_copy_(places, torch.split(there, [*map(len, given)]))

    def _count(self, end: int) -> None:
        """Note the last row and the change, in a tenth of the time of the storage's own methods."""
        storage, names = self.storage, ("_last_cursor_index_value", "_mutation_revision_value")
        cursor, revision = (getattr(storage, name, None) for name in names)
        if type(cursor) is type(revision) is Tensor and on_host(cursor) and on_host(revision):
            storage._last_cursor = end - 1
            cursor.numpy()[...] = end - 1
            revision.numpy()[...] += 1
        else:
            storage._set_last_cursor(end - 1)
            storage._bump_mutation_revision()

    def _tell(self, start: int, end: int) -> None:
        """Tell samplers which rows are new, also those of other buffers with the same storage."""
        sampler, told = self.buffer._sampler, self.storage._attached_entities
        if type(sampler) is RandomSampler and len(told) == 1:
            return
        index = torch.arange(start, end, device=self.storage.device)
        for buffer in told:
            buffer.mark_update(index)
        sampler.extend(index)

    def samples(self, size: int, count: int, keys: Sequence[Any] = ()) -> list[TensorDictBase]:
        """Draw minibatches ``[size]``; none where the buffer is empty, or not plain.

        As many as are a mebibyte are drawn at once, but not by priority: priorities follow from the
        gradient step before.

        Args:
            size: rows of a minibatch.
            count: minibatches, at most; the others are for another call.
            keys: of the entries that will be read; empty: all. Others may be left out.
        """
        if not (filled := self.filled):
            return []
        fitting = 1 if self._prioritized else AT_ONCE // (size * self._row_bytes)
        return self._drawn(size, max(min(count, fitting), 1), self._rows_read(keys), filled)

    def _rows_read(self, keys: Sequence[Any]) -> dict[tuple[str, ...], _Rows]:
        """The entries of the storage that will be read."""
        known, found = self._read
        if keys is not known:
            paths = {path_of(key) for key in keys}
            all_of_them = not keys or self._hindsight is not None
            found = {p: one for p, one in self._rows.items() if all_of_them or p in paths}
            self._read = keys, found
        return found

    def _drawn(
        self, size: int, several: int, read: dict[tuple[str, ...], _Rows], filled: int
    ) -> list[TensorDictBase]:
        storage, sampler, rows = self.storage, self.buffer._sampler, several * size
        told: dict[str, Any] = {}
        if type(sampler) is RandomSampler:  # which checks much
            on = {"generator": storage._rng, "device": storage.device}
            index = torch.randint(0, filled, (rows,), **on)
        else:
            index, told = sampler.sample(storage, rows)
        places = index.numpy() if on_host(index) else None
        drawn = {path: of_entry.read(index, places) for path, of_entry in read.items()}
        if self._once is not None:
            drawn |= self._once.read(index.numpy())
        drawn |= {(name,): value for name, value in told.items()}
        drawn["index",] = index
        parts = [drawn] if several == 1 else _parts(drawn, size)
        minibatches = [nested(part, [size]) for part in parts]
        if self._hindsight is not None:
            for minibatch in minibatches:
                self._hindsight.relabel(minibatch, minibatch["index"])
        return minibatches

    def update_priority(self, minibatch: TensorDictBase, errors: Tensor) -> None:
        """Set the priorities of a minibatch ``[size]`` to its errors."""
        index = entry(minibatch, "index")
        if self._may_be_plain and index is not None and index.shape == errors.shape:
            self.buffer._sampler.update_priority(index, errors)
        elif isinstance(self.buffer._sampler, PrioritizedSampler):
            self.buffer.update_tensordict_priority(minibatch)
        else:  # of another class, of which TorchRL's method takes no note
            self.buffer.update_priority(index, errors)
