"""TensorDicts from tensors that are known to fit, and back."""

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
    """Nest tensors by their paths, without the checks of shapes that cost ten times as much.

    Args:
        entries: by path from the root; all of them begin with the batch size.
        size: the batch size.
        device: of all entries; ``None``: not told.
    """
    root: dict[str, Any] = {}
    for path, tensor in entries.items():
        group = root
        for name in path[:-1]:
            group = group.setdefault(name, {})
        group[path[-1]] = tensor
    # It nests dictionaries, too.
    return TensorDict._new_unsafe(root, torch.Size(size), device)  # type: ignore[no-any-return, unused-ignore]


def entry(rows: Any, key: Any) -> Any:
    """An entry of a TensorDict or a dictionary, or ``None``; in a fifth of the time of ``get``."""
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
    """Names of entries."""

    here: set[Any]
    below: dict[str, Names]
    """names of the entries of nested TensorDicts, by the names of these."""


def names_of(rows: Any, others: Names) -> Names:
    """The names of the entries of a TensorDict or a dictionary, and others."""
    below = dict(others.below)
    for name in rows.keys():
        if type(rows) is TensorDict and type(rows._tensordict[name]) is TensorDict:
            below[name] = names_of(rows._tensordict[name], below.get(name, Names(set(), {})))
    return Names(others.here.union(rows.keys()), below)


def has_only(rows: Any, names: Names) -> bool:
    """Whether all entries of a TensorDict or a dictionary have one of these names."""
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
    """Set an entry that begins with the batch size; of the root, without checking that it does."""
    name = key if type(key) is str else key[0] if len(key) == 1 else None
    if name is None or type(rows) is not TensorDict or rows.is_locked:
        rows.set(key, value)
    else:
        rows._tensordict[name] = value


def leaves(rows: TensorDictBase, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Tensor]:
    """Tensors by path; in a tenth of the time of ``keys(True, True)`` and ``get``."""
    found: dict[tuple[str, ...], Tensor] = {}
    entries = rows._tensordict if type(rows) is TensorDict else rows
    for name, value in entries.items():
        path = (*above, name)
        if type(value) is not Tensor and isinstance(value, TensorDictBase):
            found.update(leaves(value, path))
        else:
            found[path] = value
    return found


_OF_NUMPY = frozenset(
    {torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8}
    | {torch.int8, torch.int16, torch.int32, torch.int64}
)


def on_host(tensor: Tensor) -> bool:
    """Whether NumPy can show a tensor, without waiting for a device."""
    return tensor.is_cpu and tensor.dtype in _OF_NUMPY and not tensor.requires_grad
