"""TensorDicts from tensors that are known to fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor


def nested(entries: Mapping[tuple[str, ...], Tensor], size: Sequence[int]) -> TensorDictBase:
    """Nest tensors by their paths, without the checks of shapes that cost ten times as much.

    Args:
        entries: by path from the root; all of them begin with the batch size.
        size: the batch size.
    """
    root: dict[str, Any] = {}
    for path, tensor in entries.items():
        group = root
        for name in path[:-1]:
            group = group.setdefault(name, {})
        group[path[-1]] = tensor
    return _tensordict(root, torch.Size(size))


def _tensordict(entries: dict[str, Any], size: torch.Size) -> TensorDictBase:
    inner = {k: _tensordict(v, size) if isinstance(v, dict) else v for k, v in entries.items()}
    return TensorDict._new_unsafe(inner, size)  # type: ignore[no-any-return, unused-ignore]
