"""Fast conversion between TensorDicts and dictionaries of tensors keyed by path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor


def nested(
    entries: Mapping[tuple[str, ...], Tensor],
    size: Sequence[int],
    device: torch.device | None = None,
) -> TensorDictBase:
    """Create a TensorDict from tensors keyed by path, skipping shape checks (ten times faster).

    Args:
        entries: Tensors keyed by path, each with the batch size as its leading dimensions.
        size: Batch size.
        device: Device of all entries; ``None`` if unspecified.
    """
    root: dict[str, Any] = {}
    for path, tensor in entries.items():
        group = root
        for name in path[:-1]:
            group = group.setdefault(name, {})
        group[path[-1]] = tensor
    # _new_unsafe also converts nested dictionaries to TensorDicts.
    return TensorDict._new_unsafe(root, torch.Size(size), device)  # type: ignore[no-any-return, unused-ignore]


def entry(rows: Any, key: Any) -> Any:
    """Return an entry of a TensorDict or dictionary, or ``None``. Faster than calling ``get``."""
    if type(rows) is not TensorDict:
        return rows.get(key)
    value: Any = rows
    for name in (key,) if type(key) is str else key:
        if type(value) is not TensorDict:
            return rows.get(key)
        value = value._tensordict.get(name)
        if value is None:
            return None
    return value if type(value) is Tensor else rows.get(key)


class Names(NamedTuple):
    """Names of the entries in a TensorDict."""

    here: set[Any]
    below: dict[str, Names]
    """Names of the entries in each nested TensorDict, keyed by that TensorDict's name."""


def names_of(rows: Any, others: Names) -> Names:
    """Return the entry names of a TensorDict or dictionary, merged with ``others``."""
    below = dict(others.below)
    for name in rows.keys():
        if type(rows) is TensorDict and type(rows._tensordict[name]) is TensorDict:
            below[name] = names_of(rows._tensordict[name], below.get(name, Names(set(), {})))
    return Names(others.here.union(rows.keys()), below)


def has_only(rows: Any, names: Names) -> bool:
    """Return whether ``names`` contains the names of all entries of a TensorDict or dictionary."""
    if type(rows) is not TensorDict:
        return names.here.issuperset(rows.keys())
    entries = rows._tensordict
    if not names.here.issuperset(entries):
        return False
    for name, below in names.below.items():
        nested = entries.get(name)
        if type(nested) is TensorDict and not has_only(nested, below):
            return False
    return True


def put(rows: TensorDictBase, key: Any, value: Tensor) -> None:
    """Set an entry. The batch size of a top-level entry is not checked."""
    name = key if type(key) is str else key[0] if len(key) == 1 else None
    if name is None or type(rows) is not TensorDict or rows.is_locked:
        rows.set(key, value)
    else:
        rows._tensordict[name] = value


def leaves(rows: TensorDictBase, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Tensor]:
    """Return all tensors keyed by path, ten times as fast as with ``keys`` and ``get``."""
    found: dict[tuple[str, ...], Tensor] = {}
    entries = rows._tensordict if type(rows) is TensorDict else rows
    for name, value in entries.items():
        path = (*above, name)
        if type(value) is not Tensor and isinstance(value, TensorDictBase):
            found.update(leaves(value, path))
        else:
            found[path] = value
    return found


_NUMPY_DTYPES = frozenset(
    {torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8}
    | {torch.int8, torch.int16, torch.int32, torch.int64}
)


def on_host(tensor: Tensor) -> bool:
    """Return whether a tensor can share its memory with a NumPy array."""
    return tensor.is_cpu and tensor.dtype in _NUMPY_DTYPES and not tensor.requires_grad
