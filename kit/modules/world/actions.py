"""Actions as a world model reads them, one-hot or numbers in [-1, 1], and who chooses them."""

from __future__ import annotations

import math
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from kit.modules.networks import one_hot
from kit.modules.world.layers import Perceptron, sample_one_hot
from kit.modules.world.sizes import Size
from kit.steps import SettingError


def bounded(code: Tensor) -> Tensor:
    """Encoded actions scaled into [-1, 1] where they are beyond, which has no further effect."""
    return code / code.detach().abs().clamp(min=1.0)


class ActionCode(nn.Module):
    """Turns an environment's actions into vectors and back.

    Choices are one-hot; numbers between bounds are scaled to [-1, 1], unbounded ones stay as they
    are, also those between bounds whose distance float32 cannot hold.

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
    width: Tensor

    def __init__(self, env: Any) -> None:
        super().__init__()
        leaves = env.action_leaves
        if any(leaf.is_action_mask for leaf in env.observation_leaves):
            why = "masks actions, and no world model here forbids any"
            works = "use env.kwargs.action_mask=false, or another recipe"
            raise SettingError("env.id", env.name, why, works)
        space: Any = leaves[0].space if len(leaves) == 1 else None
        self.discrete = isinstance(space, spaces.Discrete)
        real = isinstance(space, spaces.Box) and leaves[0].dtype.kind == "f"
        vector = real and len(leaves[0].shape) == 1
        if not (self.discrete or vector):
            kinds = ", ".join(str(leaf.space or leaf.dtype) for leaf in leaves)
            why = f"has actions no world model reads: {kinds}"
            works = "use a Discrete action space, or a Box of real numbers and one dimension"
            raise SettingError("env.id", env.name, why, works)
        self.key = leaves[0].key
        low, high = torch.zeros(0), torch.zeros(0)
        if self.discrete:
            self.features = int(space.n)
        else:
            self.features = leaves[0].shape[0]
            low, high = torch.as_tensor(space.low).float(), torch.as_tensor(space.high).float()
            bounded = (high - low).isfinite()  # the largest floats are no bounds to scale by
            low, high = (torch.where(bounded, b, s) for b, s in ((low, -1.0), (high, 1.0)))
            self.register_buffer("bounded", bounded, persistent=False)
        # The environment's, also where weights are those of a run in another one.
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)
        # Between equal bounds there is one number alone: nothing to scale by.
        width = torch.where(high > low, high - low, 1.0)
        self.register_buffer("width", width, persistent=False)

    def encode(self, action: Tensor) -> Tensor:
        """Vectors ``[..., features]`` of the environment's actions."""
        if self.discrete:
            return one_hot(action, self.features)
        return (action - self.low) / self.width * 2 - 1

    def decode(self, code: Tensor) -> Tensor:
        """The environment's actions of vectors ``[..., features]``; beyond bounds, the bounds."""
        if self.discrete:
            return code.argmax(-1)
        inside = torch.where(self.bounded, code.clamp(-1.0, 1.0), code)
        return self.low + (inside + 1) / 2 * (self.high - self.low)


class Behaviour(nn.Module):
    """A distribution of encoded actions for each feature vector of a world model.

    Choices have a categorical distribution, numbers one that a mean and a deviation describe.

    Args:
        code: says what actions are.
        network: from features to columns: logits, or means and raw deviations side by side.
    """

    def __init__(self, code: ActionCode, network: nn.Module) -> None:
        super().__init__()
        self.code, self.network = code, network

    @staticmethod
    def columns(code: ActionCode) -> int:
        """Number of columns."""
        return code.features if code.discrete else 2 * code.features

    def forward(self, features: Tensor) -> Tensor:
        """Columns of features ``[..., features]``: log-probabilities, or means and deviations."""
        columns: Tensor = self.network(features).float()
        if self.code.discrete:
            return columns.log_softmax(-1)
        return torch.cat(self.normal(*columns.chunk(2, -1)), -1)

    def normal(self, mean: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Means and deviations from the columns of the network."""
        raise NotImplementedError

    def sample(self, columns: Tensor) -> Tensor:
        """Encoded actions, ``[..., action features]``."""
        raise NotImplementedError

    def mode(self, columns: Tensor) -> Tensor:
        """The action of the mean, or the most probable one, encoded."""
        if not self.code.discrete:
            return columns.chunk(2, -1)[0]
        return one_hot(columns.argmax(-1), columns.shape[-1])


class LatentActor(Behaviour):
    """The actor of DreamerV3 (Hafner et al. 2025, code), on a world model's features.

    Normal distributions have means in [-1, 1] (tanh) and deviations in [0.1, 1].
    """

    LEAST, MOST = 0.1, 1.0

    def __init__(self, code: ActionCode, features: int, size: Size) -> None:
        super().__init__(code, Perceptron(features, size.units, 3, self.columns(code), 0.01))

    def normal(self, mean: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Means and deviations from the columns of the network."""
        return mean.tanh(), (self.MOST - self.LEAST) * torch.sigmoid(raw + 2) + self.LEAST

    def sample(self, columns: Tensor) -> Tensor:
        """Encoded actions, ``[..., action features]``; gradients flow through numbers alone."""
        if self.code.discrete:
            uniform = torch.rand(columns.shape[:-1], device=columns.device)
            return sample_one_hot(columns.detach().exp(), uniform)
        mean, deviation = columns.chunk(2, -1)
        return torch.addcmul(mean, deviation, torch.randn_like(mean))

    def log_prob(self, columns: Tensor, action: Tensor) -> Tensor:
        """Log-probability of encoded actions, ``[...]``."""
        if self.code.discrete:
            return (columns * action).sum(-1)
        mean, deviation = columns.chunk(2, -1)
        each = ((action - mean) / deviation).square() / 2 + deviation.log()
        return -(each + math.log(2 * math.pi) / 2).sum(-1)

    def entropy(self, columns: Tensor) -> Tensor:
        """Entropy in nats, ``[...]``."""
        if self.code.discrete:
            return -(columns.exp() * columns).sum(-1)
        deviation = columns.chunk(2, -1)[1]
        return (deviation.log() + math.log(2 * math.pi * math.e) / 2).sum(-1)
