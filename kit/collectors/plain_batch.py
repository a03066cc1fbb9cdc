"""Batches as plain values, which a checkpoint holds without code."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase


def to_plain(batch: TensorDictBase) -> dict[str, Any]:
    """Return a batch as lists and tensors."""
    keys = list(batch.keys(True, True))
    return {
        "shape": list(batch.batch_size),
        "keys": [list(key) if isinstance(key, tuple) else key for key in keys],
        "values": [batch.get(key) for key in keys],
    }


def from_plain(plain: dict[str, Any]) -> TensorDictBase:
    """Return the batch that :func:`to_plain` took apart."""
    keys = [tuple(key) if isinstance(key, list) else key for key in plain["keys"]]
    batch = TensorDict({}, plain["shape"])
    for key, value in zip(keys, plain["values"]):
        batch.set(key, value)
    return batch
