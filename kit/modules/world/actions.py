"""Action encoding (one-hot, or scaled to [-1, 1]) and actors for world models."""

from __future__ import annotations

import math
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from kit.modules.heads import action_masks
from kit.modules.networks import one_hot
from kit.modules.world.layers import Perceptron, sample_one_hot
from kit.modules.world.sizes import Size
from kit.steps import SettingError


def bounded(code: Tensor) -> Tensor:
    """Scale entries of encoded actions down to [-1, 1] if they exceed this range."""
    return code / code.detach().abs().clamp(min=1.0)


class ActionCode(nn.Module):
    """Converts an environment's actions to vectors and back.

    Discrete actions are one-hot. Bounded continuous actions are scaled to [-1, 1]. Unbounded
    actions, and actions whose range overflows float32, are not scaled.

    Attributes:
        key: key of the action.
        features: size of the vector.
        discrete: whether actions are discrete.
        masks: list with the key of the action mask; empty if actions are not masked.

    Raises:
        SettingError: if the action space is neither Discrete nor a one-dimensional float Box, or
            the shape of the action mask does not match.
    """

    low: Tensor
    high: Tensor
    bounded: Tensor
    width: Tensor

    def __init__(self, env: Any) -> None:
        super().__init__()
        leaves = env.action_leaves
        space: Any = leaves[0].space if len(leaves) == 1 else None
        self.discrete = isinstance(space, spaces.Discrete)
        real = isinstance(space, spaces.Box) and leaves[0].dtype.kind == "f"
        vector = real and len(leaves[0].shape) == 1
        if not (self.discrete or vector):
            kinds = ", ".join(str(leaf.space or leaf.dtype) for leaf in leaves)
            reason = f"World models do not support the environment's action space: {kinds}"
            hint = "Use a Discrete action space, or a one-dimensional Box of floating-point numbers"
            raise SettingError("env.id", env.name, reason, hint)
        self.key = leaves[0].key
        low, high = torch.zeros(0), torch.zeros(0)
        if self.discrete:
            self.features = int(space.n)
        else:
            self.features = leaves[0].shape[0]
            low, high = torch.as_tensor(space.low).float(), torch.as_tensor(space.high).float()
            bounded = (high - low).isfinite()  # the range overflows for the largest floats
            low, high = (torch.where(bounded, b, s) for b, s in ((low, -1.0), (high, 1.0)))
            self.register_buffer("bounded", bounded, persistent=False)
        self.masks = action_masks(env, self.features if self.discrete else 0)
        # Not persistent, so that loading weights from another run does not change the bounds.
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        # Equal bounds allow only one value, so there is nothing to scale.
        width = torch.where(high > low, high - low, 1.0)
        self.register_buffer("width", width, persistent=False)

    def encode(self, action: Tensor) -> Tensor:
        """Return encoded actions ``[..., features]`` for the environment's actions."""
        if self.discrete:
            return one_hot(action, self.features)
        return (action - self.low) / self.width * 2 - 1

    def decode(self, code: Tensor) -> Tensor:
        """Return environment actions, clipped to their bounds, for encoded ``[..., features]``."""
        if self.discrete:
            return code.argmax(-1)
        inside = torch.where(self.bounded, code.clamp(-1.0, 1.0), code)
        return self.low + (inside + 1) / 2 * (self.high - self.low)


class Behaviour(nn.Module):
    """Base class for actors, which map a world model's features to action distributions.

    Discrete actions are categorical; continuous actions have a mean and a standard deviation.

    Args:
        code: action encoder.
        network: network that maps features to logits, or to concatenated means and raw standard
            deviations.
    """

    def __init__(self, code: ActionCode, network: nn.Module) -> None:
        super().__init__()
        self.code, self.network = code, network

    @staticmethod
    def columns(code: ActionCode) -> int:
        """Return the number of network outputs."""
        return code.features if code.discrete else 2 * code.features

    def forward(self, features: Tensor) -> Tensor:
        """Return log-probabilities, or concatenated means and standard deviations."""
        columns: Tensor = self.network(features).float()
        if self.code.discrete:
            return columns.log_softmax(-1)
        return torch.cat(self.normal(*columns.chunk(2, -1)), -1)

    def normal(self, mean: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations, computed from the network's outputs."""
        raise NotImplementedError

    def sample(self, columns: Tensor) -> Tensor:
        """Return sampled encoded actions, ``[..., action features]``."""
        raise NotImplementedError

    def mode(self, columns: Tensor) -> Tensor:
        """Return the encoded action: the mean, or the most probable action."""
        if not self.code.discrete:
            return columns.chunk(2, -1)[0]
        return one_hot(columns.argmax(-1), columns.shape[-1])


class LatentActor(Behaviour):
    """DreamerV3's actor, as in the code of Hafner et al. (2025).

    For continuous actions, means are in [-1, 1] (tanh) and standard deviations in [0.1, 1].
    """

    LEAST, MOST = 0.1, 1.0

    def __init__(self, code: ActionCode, features: int, size: Size) -> None:
        super().__init__(code, Perceptron(features, size.units, 3, self.columns(code), 0.01))

    def normal(self, mean: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations, computed from the network's outputs."""
        return mean.tanh(), (self.MOST - self.LEAST) * torch.sigmoid(raw + 2) + self.LEAST

    def sample(self, columns: Tensor) -> Tensor:
        """Return sampled encoded actions; only continuous actions are differentiable."""
        if self.code.discrete:
            uniform = torch.rand(columns.shape[:-1], device=columns.device)
            return sample_one_hot(columns.detach().exp(), uniform)
        mean, deviation = columns.chunk(2, -1)
        return torch.addcmul(mean, deviation, torch.randn_like(mean))

    def log_prob(self, columns: Tensor, action: Tensor) -> Tensor:
        """Return the log-probability of encoded actions, ``[...]``."""
        if self.code.discrete:
            return (columns * action).sum(-1)
        mean, deviation = columns.chunk(2, -1)
        each = ((action - mean) / deviation).square() / 2 + deviation.log()
        return -(each + math.log(2 * math.pi) / 2).sum(-1)

    def entropy(self, columns: Tensor) -> Tensor:
        """Return the entropy in nats, ``[...]``."""
        if self.code.discrete:
            return -(columns.exp() * columns).sum(-1)
        deviation = columns.chunk(2, -1)[1]
        return (deviation.log() + math.log(2 * math.pi * math.e) / 2).sum(-1)
