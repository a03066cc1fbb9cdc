"""Gymnasium spaces as TorchRL specs."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, Unbounded

from kit.envs.spaces import Leaf


def to_spec(leaf: Leaf, num_envs: int, device: torch.device | None) -> Any:
    """Return TorchRL's spec of one array, with ``num_envs`` in front."""
    space = leaf.space
    assert space is not None
    dtype = torch.from_numpy(np.zeros(0, leaf.dtype)).dtype
    shape = (num_envs, *leaf.shape)
    if isinstance(space, gym.spaces.Discrete):
        return Categorical(int(space.n), shape=(num_envs,), dtype=dtype, device=device)
    if isinstance(space, gym.spaces.MultiDiscrete):
        choices = torch.as_tensor(np.asarray(space.nvec))
        return MultiCategorical(choices, dtype=dtype, device=device).expand(shape)
    if isinstance(space, gym.spaces.MultiBinary):
        return Binary(n=leaf.shape[-1], shape=shape, dtype=dtype, device=device)
    low = torch.as_tensor(np.asarray(space.low, leaf.dtype)).expand(shape).clone()
    high = torch.as_tensor(np.asarray(space.high, leaf.dtype)).expand(shape).clone()
    if leaf.dtype.kind == "f" and not (np.isfinite(space.low) & np.isfinite(space.high)).all():
        return Unbounded(shape, dtype=dtype, device=device)
    return Bounded(low, high, shape, dtype=dtype, device=device)


def to_composite(found: list[Leaf], num_envs: int, device: torch.device | None) -> Any:
    """Return the specs of several arrays as one composite of batch size ``[num_envs]``."""
    composite = Composite(shape=(num_envs,), device=device)
    for leaf in found:
        composite[leaf.key] = to_spec(leaf, num_envs, device)
    return composite
