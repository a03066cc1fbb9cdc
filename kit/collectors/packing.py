"""Pack batches into arrays of bytes, and join the packed batches of several workers.

``("next", key)`` is stored only where an episode or the batch ends. Elsewhere, it equals ``key`` of
the next step. This is verified for each batch; an entry that differs is stored completely.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

Path = tuple[str, ...]
Bytes = NDArray[np.uint8]

_IDS, _MASK, _DONE = ("collector", "traj_ids"), ("collector", "mask"), ("next", "done")
_ALIGNMENT = 16
_BITS: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class Entry(NamedTuple):
    """An array in packed data, with the time dimension first."""

    path: Path
    dtype: str
    """Type in NumPy."""
    torch_dtype: str
    shape: tuple[int, ...]
    is_shifted: bool
    """Whether only the rows at which an episode or the batch ends are stored."""


class Layout(NamedTuple):
    """Layout of a packed batch."""

    dims: int
    """Number of batch dimensions: 2, or 1 for concatenated episodes."""
    entries: tuple[Entry, ...]
    """Entries in the order of their data. Shifted entries come last."""


def pack(batch: TensorDictBase) -> tuple[Bytes, Layout]:
    """Return the entries of a batch on the CPU as one array, and their layout."""
    dims = batch.batch_dims
    values = {_path(key): _time_first(value, dims) for key, value in batch.items(True, True)}
    arrays = {path: _numpy(value) for path, value in values.items()}
    last = _last(arrays[_DONE]) if _DONE in arrays else None
    entries, parts = [], []
    for path, array in arrays.items():
        shown = arrays.get(path[1:]) if path[0] == "next" else None
        shifted = last is not None and shown is not None and _is_shifted(array, shown, last)
        kind = str(values[path].dtype).removeprefix("torch.")
        entries.append(Entry(path, array.dtype.str, kind, array.shape, shifted))
        parts.append(array[last] if shifted else array)
    order = sorted(range(len(entries)), key=lambda number: entries[number].is_shifted)
    data = np.zeros(sum(_padded(part.nbytes) for part in parts), np.uint8)
    offset = 0
    for number in order:
        part = parts[number]
        _view(data, offset, part.dtype, part.shape)[...] = part
        offset += _padded(part.nbytes)
    return data, Layout(dims, tuple(entries[number] for number in order))


def join(chunks: Sequence[tuple[Bytes, Layout]], offsets: Sequence[int]) -> TensorDictBase:
    """Return packed batches of several workers as one batch.

    Environments or episodes are concatenated in worker order. Padded episodes are padded to the
    longest episode. Trajectory ids become ``(id + offset) * workers + worker``.

    Args:
        chunks: data and layout of each worker's batch.
        offsets: for each worker, the number that is added to trajectory ids.
    """
    layout = _restored(chunks[0][1])
    parts = [_unpack(*chunk) for chunk in chunks]
    lengths = [entries[_DONE][1].shape[0] for entries in parts]
    joined: dict[Path, Tensor] = {}
    is_padded = any(entry.path == _MASK for entry in layout.entries)
    for entry in layout.entries:
        shapes = [entries[entry.path][0].shape for entries in parts]
        axis = layout.dims - 1
        count = sum(shape[axis] for shape in shapes)
        lead = (count,) if layout.dims == 1 else (max(lengths), count)
        make = np.zeros if is_padded else np.empty
        whole = make((*lead, *entry.shape[layout.dims :]), entry.dtype)
        first = 0
        for worker, entries in enumerate(parts):
            rows = slice(first, first + shapes[worker][axis])
            place = whole[rows] if axis == 0 else whole[: lengths[worker], rows]
            _write(place, entry.path, entries)
            if entry.path == _IDS:
                if is_padded:  # ids are constant in each row, also where it is padded
                    place = whole[:, rows]
                    place[...] = place[:1]
                place += offsets[worker]
                place *= len(parts)
                place += worker
            first = rows.stop
        tensor = torch.from_numpy(whole).view(getattr(torch, entry.torch_dtype))
        tensor = tensor.transpose(0, 1) if layout.dims == 2 else tensor
        joined[entry.path] = tensor.contiguous() if is_padded else tensor
    batch = TensorDict({}, next(iter(joined.values())).shape[: layout.dims])
    for path, tensor in joined.items():
        batch.set(path, tensor)
    return batch


def last_id(chunk: tuple[Bytes, Layout]) -> int:
    """Return the highest trajectory id of a packed batch; -1 if it has no ids."""
    entries = _unpack(*chunk)
    return int(entries[_IDS][1].max()) if _IDS in entries else -1


def _restored(layout: Any) -> Layout:
    """Return a layout that was loaded from a checkpoint as plain tuples."""
    dims, entries = layout
    return Layout(dims, tuple(Entry(*entry) for entry in entries))


_Unpacked = dict[Path, tuple[Entry, NDArray[Any]]]


def _unpack(data: Bytes, layout: Layout) -> _Unpacked:
    """Return views of the entries in packed data."""
    found: _Unpacked = {}
    offset, layout = 0, _restored(layout)
    for entry in layout.entries:
        shape = entry.shape
        if entry.is_shifted:
            shape = (int(_last(found[_DONE][1]).sum()), *shape[layout.dims :])
        array = _view(data, offset, np.dtype(entry.dtype), shape)
        offset += _padded(array.nbytes)
        found[entry.path] = entry, array
    return found


def _write(place: NDArray[Any], path: Path, entries: _Unpacked) -> None:
    """Write an entry to its place in the joined batch."""
    entry, array = entries[path]
    if not entry.is_shifted:
        place[...] = array
        return
    place[:-1] = entries[path[1:]][1][1:]
    place[_last(entries[_DONE][1])] = array


def _last(done: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the steps at which an episode or the batch ends."""
    last = done[..., 0].copy()
    last[-1] = True
    return last


def _is_shifted(following: NDArray[Any], shown: NDArray[Any], last: NDArray[np.bool_]) -> bool:
    """Return whether rows before ``last`` equal the next step's row bit for bit."""
    if (following.shape, following.dtype) != (shown.shape, shown.dtype) or len(last) < 2:
        return False
    if (bits := _BITS.get(following.itemsize)) is None or following.dtype.kind == "c":
        return False
    differs = following[:-1].view(bits) != shown[1:].view(bits)
    rows = differs.reshape(*last[:-1].shape, -1).any(-1)
    return not (rows & ~last[:-1]).any()


def _view(data: Bytes, offset: int, dtype: np.dtype[Any], shape: Iterable[int]) -> NDArray[Any]:
    shape = tuple(shape)
    end = offset + math.prod(shape) * dtype.itemsize
    return data[offset:end].view(dtype).reshape(shape)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _path(key: Any) -> Path:
    return (key,) if isinstance(key, str) else tuple(key)


def _time_first(value: Tensor, dims: int) -> Tensor:
    value = value.detach()
    return value.transpose(0, 1) if dims == 2 else value


def _numpy(value: Tensor) -> NDArray[Any]:
    """Return the tensor as an array; NumPy has no bfloat16."""
    return (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy()
