"""Policies on a world model's features, and that of DreamerV3."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kit.modules.networks import one_hot
from kit.modules.world.actions import ActionCode
from kit.modules.world.layers import Perceptron, sample_one_hot
from kit.modules.world.sizes import Size


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
        columns: Tensor = self.network(features)
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
    """The actor of DreamerV3 (Hafner et al. 2025, code).

    Normal distributions have means in [-1, 1] (tanh) and deviations in [0.1, 1].

    Args:
        code: says what actions are.
        features: width of the world model's features.
        size: widths.
    """

    LEAST, MOST = 0.1, 1.0

    def __init__(self, code: ActionCode, features: int, size: Size) -> None:
        super().__init__(code, Perceptron(features, size.units, 3, self.columns(code), 0.01))

    def normal(self, mean: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Means and deviations from the columns of the network."""
        return mean.tanh(), (self.MOST - self.LEAST) * torch.sigmoid(raw + 2) + self.LEAST

    def sample(self, columns: Tensor) -> Tensor:
        """Encoded actions, ``[..., action features]``, without gradients."""
        columns = columns.detach()
        if self.code.discrete:
            return sample_one_hot(
                columns.exp(), torch.rand(columns.shape[:-1], device=columns.device)
            )
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
