"""Fast access to TorchRL's replay storage without TensorDict operations."""

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
"""Approximate size in bytes of the minibatches that are drawn in one call."""

_SAMPLERS = (RandomSampler, PrioritizedSampler, SequenceSampler)


class _Rows:
    """All stored rows for one entry, ``[max_size, ...]``."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        # NumPy indexes a few rows in a quarter of the time that PyTorch needs.
        self.array = tensor.numpy() if on_host(tensor) else None
        self._shape = tensor.shape[1:]
        self._last_value: Tensor | None = None  # source of _time_ordered
        self._time_ordered: NDArray[Any] | None = None

    def takes(self, value: Tensor | None) -> bool:
        """Return whether the entry can store values ``[num_envs, steps, ...]`` without loss."""
        if value is None or value is self._last_value:
            return value is not None
        fits: bool = torch.can_cast(value.dtype, self.tensor.dtype)
        return fits and value.shape[2:] == self._shape

    def write(self, rows: slice, value: Tensor) -> None:
        """Write values ``[num_envs, steps, ...]`` in time order."""
        if self.array is None or not on_host(value):
            self.tensor[rows] = value.transpose(0, 1).flatten(0, 1)
        else:
            self.array[rows] = self._ordered(value)

    def _ordered(self, value: Tensor) -> NDArray[Any]:
        """Return host values ``[num_envs, steps, ...]`` as rows in time order."""
        if value is self._last_value:  # the same tensor as before, so the cached view is valid
            assert self._time_ordered is not None
            return self._time_ordered
        array: NDArray[Any] = value.numpy()
        rows: NDArray[Any]
        if len(array) == 1:
            rows = array[0]
        else:
            rows = array.swapaxes(0, 1).reshape(value.shape[:2].numel(), *self._shape)
        if len(array) == 1 or np.may_share_memory(rows, array):
            self._last_value, self._time_ordered = value, rows
        return rows

    def bytes_of(self, value: Tensor) -> NDArray[np.uint8]:
        """Convert host values ``[num_envs, steps, ...]`` to bytes in the storage's dtype."""
        if value.dtype is not self.tensor.dtype:
            value = value.to(self.tensor.dtype)
        return np.ascontiguousarray(self._ordered(value)).reshape(-1).view(np.uint8)

    def bytes_at(self, rows: slice) -> Tensor:
        size = self._bytes.numel() // len(self.tensor)
        return self._bytes[rows.start * size : rows.stop * size]

    @functools.cached_property
    def _bytes(self) -> Tensor:
        return self.tensor.view(-1).view(torch.uint8)

    def read(self, index: Tensor, places: NDArray[np.int64] | None) -> Tensor:
        """Copy the rows at ``index``. ``places``: the same index as a NumPy array, or ``None``."""
        if self.array is None or places is None:
            return self.tensor.index_select(0, index)
        return torch.from_numpy(self.array.take(places, 0))


def _parts(rows: Mapping[tuple[str, ...], Tensor], size: int) -> list[dict[Any, Tensor]]:
    """Split rows into minibatches of ``size`` rows without copying them."""
    chunks = zip(*(torch.split(value, size) for value in rows.values()))
    return [dict(zip(rows, values)) for values in chunks]


def _raise_entry_error(path: tuple[str, ...], value: Tensor | None, stored: Tensor | None) -> None:
    new = "missing" if value is None else f"{value.dtype} {[*value.shape[2:]]}"
    old = "missing" if stored is None else f"{stored.dtype} {[*stored.shape[1:]]}"
    reason = f"The entry is {new} in the batch but {old} in the stored transitions"
    raise SettingError(
        "entry", ".".join(path), reason, "Use the same entries, dtypes and shapes in all batches"
    )


class FastStorageIO:
    """Writes and samples rows of a plain replay buffer, entry by entry.

    Stored values, samples and RNG use are identical to TorchRL's ``extend`` and ``sample``, with
    less Python overhead. A buffer is plain if it has one dimension, no transforms or threads, and
    is sampled uniformly, by priority or in sequences.

    Args:
        buffer: Replay buffer.
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
            and getattr(buffer._collate_fn, "__name__", "") == "_collate_id"  # default collation
            and not self.writer.tracks_generations
        )
        self._once = self.storage if isinstance(self.storage, ObservationStorage) else None
        self._hindsight = buffer if isinstance(buffer, HindsightReplayBuffer) else None
        self._transforms = buffer._transform.transforms
        self._cached_storage: Any = None
        self._rows: dict[tuple[str, ...], _Rows] = {}
        self._read: tuple[Any, dict[tuple[str, ...], _Rows]] = None, {}
        self._prioritized = self._on_gpu = False
        self._row_bytes = 0

    def _is_plain(self) -> bool:
        """Return whether the buffer is plain and not empty; refresh the cached rows."""
        kind = type(self.buffer._sampler)
        is_supported = kind in _SAMPLERS and not len(self._transforms)
        if not (self._may_be_plain and is_supported and self.storage.initialized):
            return False
        self._prioritized = kind is PrioritizedSampler
        rows = self.storage._storage
        if rows is not self._cached_storage:
            self._cached_storage, self._read = rows, (None, {})
            self._rows = {path: _Rows(value) for path, value in leaves(rows).items()}
            index = self._rows.pop(("index",), None)
            if index is not None:  # the "index" entry of row i is i
                index.tensor.copy_(torch.arange(len(index.tensor)))
            # storage.device may be "auto", so check the tensors.
            self._on_gpu = all(row.tensor.is_cuda for row in self._rows.values())
            observed = 0 if self._once is None else self._once.observed_bytes
            self._row_bytes = 8 + observed + sum(r.tensor[0].nbytes for r in self._rows.values())
        return True

    @property
    def filled(self) -> int:
        """Number of stored rows if the buffer is plain; otherwise 0."""
        return self.storage._len if self._is_plain() else 0

    def extend(self, batch: TensorDictBase) -> bool:
        """Store a batch ``[num_envs, steps]`` in time order. Return whether it was stored.

        Nothing is stored if the buffer is not plain, its writer is not kit's, the batch would wrap
        around the end of the storage, or the batch contains priorities.

        Raises:
            SettingError: If the batch and the stored rows have different entries, dtypes or shapes.
        """
        if not self._is_plain():
            return False
        values = leaves(batch)
        values.pop(("index",), None)
        entries = values if self._once is None else self._once.without_observations(values)
        for path, stored in self._rows.items():
            if not stored.takes(entries.get(path)):
                _raise_entry_error(path, entries.get(path), stored.tensor)
        for path in entries.keys() - self._rows.keys():  # TorchRL would zero earlier rows
            _raise_entry_error(path, entries[path], None)
        if type(self.writer) is not SliceWriter:
            return False
        count, start = batch.numel(), self.writer._cursor
        end = start + count
        if end > self.storage.max_size:
            return False
        if self._prioritized and entry(batch, self.buffer.priority_key) is not None:
            return False
        if self._once is not None:
            read = [path for path in values if path not in entries or path == ("next", "done")]
            self._once.store({p: values[p].transpose(0, 1).flatten(0, 1) for p in read})
        rows = slice(start, end)
        if self._on_gpu and all(map(on_host, entries.values())):
            self._copy_to_gpu(rows, entries)
        else:
            for path, value in entries.items():
                self._rows[path].write(rows, value)
        self._advance_cursor(end)
        self.storage._len = min(self.storage._len + count, self.storage.max_size)
        self.writer._cursor = end % self.storage.max_size
        self.writer._write_count += count
        self._notify_samplers(start, end)
        if self._hindsight is not None:
            self._hindsight.note(batch.get(self._hindsight.end_key).reshape(batch.shape).t())
        return True

    def _copy_to_gpu(self, rows: slice, values: Mapping[tuple[str, ...], Tensor]) -> None:
        """Copy host values for all entries to rows on the GPU in a single transfer."""
        sources = [self._rows[path].bytes_of(value) for path, value in values.items()]
        targets = [self._rows[path].bytes_at(rows) for path in values]
        moved = torch.from_numpy(np.concatenate(sources)).to(targets[0].device)
        torch._foreach_copy_(targets, torch.split(moved, [*map(len, sources)]))

    def _advance_cursor(self, end: int) -> None:
        """Update the storage's cursor and revision. The storage's methods are ten times slower."""
        storage, names = self.storage, ("_last_cursor_index_value", "_mutation_revision_value")
        cursor, revision = (getattr(storage, name, None) for name in names)
        if type(cursor) is type(revision) is Tensor and on_host(cursor) and on_host(revision):
            storage._last_cursor = end - 1
            cursor.numpy()[...] = end - 1
            revision.numpy()[...] += 1
        else:
            storage._set_last_cursor(end - 1)
            storage._bump_mutation_revision()

    def _notify_samplers(self, start: int, end: int) -> None:
        """Tell the samplers of all buffers that share the storage which rows are new."""
        sampler, attached = self.buffer._sampler, self.storage._attached_entities
        if type(sampler) is RandomSampler and len(attached) == 1:
            return
        index = torch.arange(start, end, device=self.storage.device)
        for buffer in attached:
            buffer.mark_update(index)
        sampler.extend(index)

    def samples(self, size: int, count: int, keys: Sequence[Any] = ()) -> list[TensorDictBase]:
        """Draw minibatches ``[size]``. Return an empty list if the buffer is empty or not plain.

        Uniform samples are drawn in chunks of about one mebibyte. Prioritized samples are drawn one
        minibatch at a time, because priorities depend on the previous gradient step.

        Args:
            size: Rows per minibatch.
            count: Maximum number of minibatches to draw in this call.
            keys: Keys that will be read; other entries may be omitted. Empty: all keys.
        """
        if not (filled := self.filled):
            return []
        fitting = 1 if self._prioritized else AT_ONCE // (size * self._row_bytes)
        return self._drawn(size, max(min(count, fitting), 1), self._rows_for(keys), filled)

    def _rows_for(self, keys: Sequence[Any]) -> dict[tuple[str, ...], _Rows]:
        cached_keys, found = self._read
        if keys is not cached_keys:
            paths = {path_of(key) for key in keys}
            read_all = not keys or self._hindsight is not None
            found = {p: rows for p, rows in self._rows.items() if read_all or p in paths}
            self._read = keys, found
        return found

    def _drawn(
        self, size: int, several: int, read: dict[tuple[str, ...], _Rows], filled: int
    ) -> list[TensorDictBase]:
        storage, sampler, rows = self.storage, self.buffer._sampler, several * size
        info: dict[str, Any] = {}
        if type(sampler) is RandomSampler:  # faster than RandomSampler.sample
            options = {"generator": storage._rng, "device": storage.device}
            index = torch.randint(0, filled, (rows,), **options)
        else:
            index, info = sampler.sample(storage, rows)
        places = index.numpy() if on_host(index) else None
        drawn = {path: stored.read(index, places) for path, stored in read.items()}
        if self._once is not None:
            drawn |= self._once.read(index.numpy())
        drawn |= {(name,): value for name, value in info.items()}
        drawn["index",] = index
        parts = [drawn] if several == 1 else _parts(drawn, size)
        minibatches = [nested(part, [size]) for part in parts]
        if self._hindsight is not None:
            for minibatch in minibatches:
                self._hindsight.relabel(minibatch, minibatch["index"])
        return minibatches

    def update_priority(self, minibatch: TensorDictBase, errors: Tensor) -> None:
        """Set the priorities of a minibatch ``[size]`` to its TD errors."""
        index = entry(minibatch, "index")
        if self._may_be_plain and index is not None and index.shape == errors.shape:
            self.buffer._sampler.update_priority(index, errors)
        elif isinstance(self.buffer._sampler, PrioritizedSampler):
            self.buffer.update_tensordict_priority(minibatch)
        else:  # TorchRL's method only updates its own prioritized samplers
            self.buffer.update_priority(index, errors)
