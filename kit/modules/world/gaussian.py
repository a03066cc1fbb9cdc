"""The world model of the first Dreamer: Gaussian latents around a GRU, ELU networks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kit.modules.world.actions import ActionCode, Behaviour
from kit.modules.world.layers import sample_one_hot
from kit.modules.world.model import WorldModel
from kit.modules.world.rssm import Latent, StateSpace
from kit.modules.world.sizes import Size, size_of

GAUSSIAN_SIZES = {
    "nano": Size(64, 64, 1, 64, 4, stoch=16),
    "tiny": Size(128, 128, 1, 128, 8, stoch=24),
    "published": Size(200, 200, 1, 400, 32, stoch=30),
}
"""Widths by name; ``published`` is that of Hafner et al. 2020, the others are for one CPU core."""


def elu_network(
    in_features: int, units: int, layers: int, out_features: int | None = None
) -> nn.Sequential:
    """Linear layers with ELU between them, and at the end where there is no output layer."""
    parts: list[nn.Module] = []
    for number in range(layers):
        parts += [nn.Linear(units if number else in_features, units), nn.ELU()]
    if out_features is not None:
        parts.append(nn.Linear(units, out_features))
    return nn.Sequential(*parts)


class GaussianRSSM(StateSpace):
    """Normal stochastic states with means and deviations from networks (Hafner et al. 2020).

    Parameters of a state are its means and raw deviations side by side; deviations are
    ``softplus(raw) + 0.1``.
    """

    LEAST = 0.1

    def __init__(self, size: Size, action_features: int, embedding: int) -> None:
        super().__init__()
        self.deter, self.stoch, self.action_features = size.deter, size.stoch, action_features
        hidden = size.hidden
        self.joined = nn.Sequential(nn.Linear(size.stoch + action_features, hidden), nn.ELU())
        self.cell = nn.GRUCell(hidden, size.deter)
        self.prior = elu_network(size.deter, hidden, 1, 2 * size.stoch)
        self.posterior_deter = nn.Linear(size.deter, hidden, bias=False)
        self.posterior_embedding = nn.Linear(embedding, hidden)
        self.posterior_out = nn.Linear(hidden, 2 * size.stoch)

    def noise(self, *rows: int, device: torch.device) -> Tensor:
        """Standard normal numbers, ``[*rows, stoch]``."""
        return torch.randn(*rows, self.stoch, device=device)

    def recur(self, latent: Latent, action: Tensor) -> Tensor:
        """The next deterministic state; arguments as for any state-space model."""
        joined = self.joined(torch.cat([latent.stoch, action], -1))
        return self.cell(joined, latent.deter)  # type: ignore[no-any-return]

    def correct(self, deter: Tensor, embedding: Tensor) -> Tensor:
        """Parameters of the posterior."""
        hidden = functional.elu(self.posterior_deter(deter) + embedding)
        return self.posterior_out(hidden)  # type: ignore[no-any-return]

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Reparametrised samples, ``[..., stoch]``."""
        mean, deviation = self._normal(parameters)
        return torch.addcmul(mean, deviation, noise)

    def _normal(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = parameters.float().chunk(2, -1)
        return mean, functional.softplus(raw) + self.LEAST

    def divergence(self, posterior: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """KL divergence of posterior and prior in nats, twice: the first Dreamer balances none."""
        (mean, deviation), (other, spread) = self._normal(posterior), self._normal(prior)
        ratio = (deviation / spread).square()
        each = ratio + ((mean - other) / spread).square() - 1 - ratio.log()
        divergence = each.sum(-1) / 2
        return divergence, divergence


class GaussianWorldModel(WorldModel):
    """The world model of the first Dreamer (Hafner et al. 2020).

    Vectors are read and predicted as they are, rewards are numbers. Images pass DreamerV3's
    convolutions.

    Args:
        env: says what observations and actions are.
        size: widths, or a name of :data:`GAUSSIAN_SIZES`.

    Raises:
        SettingError: if the size is unknown, or observations are neither vectors nor images.
    """

    def __init__(self, env: Any, size: Size | str = "nano") -> None:
        super().__init__(env, size_of(size, GAUSSIAN_SIZES))

    def _network(self, in_features: int, layers: int, out_features: int | None = None) -> nn.Module:
        return elu_network(in_features, self.size.units, layers, out_features)

    def _state_space(self, embedding: int) -> StateSpace:
        return GaussianRSSM(self.size, self.code.features, embedding)

    def _make_heads(self) -> None:
        self.reward_head = self._network(self.features, 2, 1)
        self.continuation_head = self._network(self.features, 3, 1)

    def _scaled(self, vector: Tensor) -> Tensor:
        return vector

    def _vector_error(self, predicted: Tensor, target: Tensor) -> Tensor:
        return (predicted - target).square().sum(-1)

    def reward(self, features: Tensor) -> Tensor:
        """Expected reward that arrives with a latent, ``[...]``."""
        return self.reward_head(features).float().squeeze(-1)  # type: ignore[no-any-return]

    def reward_error(self, features: Tensor, reward: Tensor) -> Tensor:
        """Half the squared error, ``[...]``: the log-likelihood of a unit normal distribution."""
        return (self.reward(features) - reward).square() / 2


class TanhActor(Behaviour):
    """The actor of the first Dreamer: gradients flow through its samples (appendix A).

    Numbers have a normal distribution squashed by tanh; choices are one-hot with gradients straight
    through to their probabilities.
    """

    LEAST, SCALE = 1e-4, 5.0
    RAW = math.log(math.expm1(5.0))
    """added before the softplus, so that deviations are 5 at first."""

    def __init__(self, code: ActionCode, features: int, size: Size) -> None:
        super().__init__(code, elu_network(features, size.units, 4, self.columns(code)))

    def normal(self, mean: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Means and deviations, before the tanh, from the columns of the network."""
        deviation = functional.softplus(raw + self.RAW) + self.LEAST
        return self.SCALE * torch.tanh(mean / self.SCALE), deviation

    def sample(self, columns: Tensor) -> Tensor:
        """Encoded actions with gradients, ``[..., action features]``."""
        if self.code.discrete:
            probabilities = columns.exp()
            uniform = torch.rand(columns.shape[:-1], device=columns.device)
            chosen = sample_one_hot(probabilities.detach(), uniform)
            return chosen + probabilities - probabilities.detach()
        mean, deviation = columns.chunk(2, -1)
        return torch.tanh(torch.addcmul(mean, deviation, torch.randn_like(mean)))

    def mode(self, columns: Tensor) -> Tensor:
        """The action of the mean, or the most probable one, encoded."""
        mode = super().mode(columns)
        return mode if self.code.discrete else mode.tanh()
