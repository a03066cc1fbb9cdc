"""Actions as a world model reads them: one-hot, or numbers in [-1, 1]."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from kit.modules.networks import one_hot
from kit.steps import SettingError


def bounded(code: Tensor) -> Tensor:
    """Encoded actions scaled into [-1, 1] where they are beyond, which has no further effect."""
    return code / code.detach().abs().clamp(min=1.0)


class ActionCode(nn.Module):
    """Turns an environment's actions into vectors and back.

    Choices are one-hot; numbers between bounds are scaled to [-1, 1], unbounded ones stay as they
    are.

    Args:
        env: the environment.

    Attributes:
        key: of the action.
        features: width of the vector.
        discrete: whether actions are choices.

    Raises:
        SettingError: if the action is neither one choice nor one vector of numbers.
    """

    low: Tensor
    high: Tensor
    bounded: Tensor

    def __init__(self, env: Any) -> None:
        super().__init__()
        leaves = env.action_leaves
        if any("action_mask" in (leaf.key, leaf.key[-1]) for leaf in env.observation_leaves):
            why = "masks actions, and no world model here forbids any"
            works = "use env.kwargs.action_mask=false, or another recipe"
            raise SettingError("env.id", env.name, why, works)
        space: Any = leaves[0].space if len(leaves) == 1 else None
        self.discrete = isinstance(space, spaces.Discrete)
        vector = isinstance(space, spaces.Box) and len(leaves[0].shape) == 1
        if not (self.discrete or vector):
            kinds = ", ".join(str(leaf.space or leaf.dtype) for leaf in leaves)
            why = f"has actions no world model reads: {kinds}"
            works = "use an environment with a Discrete action space, or a Box of one dimension"
            raise SettingError("env.id", env.name, why, works)
        self.key = leaves[0].key
        low, high = torch.zeros(0), torch.zeros(0)
        if self.discrete:
            self.features = int(space.n)
        else:
            self.features = leaves[0].shape[0]
            low, high = torch.as_tensor(space.low).float(), torch.as_tensor(space.high).float()
            bounded = low.isfinite() & high.isfinite()
            low, high = (torch.where(bounded, b, s) for b, s in ((low, -1.0), (high, 1.0)))
            self.register_buffer("bounded", bounded)
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def encode(self, action: Tensor) -> Tensor:
        """Vectors ``[..., features]`` of the environment's actions."""
        if self.discrete:
            return one_hot(action, self.features)
        return (action - self.low) / (self.high - self.low) * 2 - 1

    def decode(self, code: Tensor) -> Tensor:
        """The environment's actions of vectors ``[..., features]``; beyond bounds, the bounds."""
        if self.discrete:
            return code.argmax(-1)
        inside = torch.where(self.bounded, code.clamp(-1.0, 1.0), code)
        return self.low + (inside + 1) / 2 * (self.high - self.low)
