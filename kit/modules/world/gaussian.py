"""World model and actor of the first Dreamer, with Gaussian latents, a GRU and ELU networks."""

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
"""Network sizes: ``published`` (Hafner et al. 2020), and sizes that suit one CPU core."""


def elu_network(
    in_features: int, units: int, layers: int, out_features: int | None = None
) -> nn.Sequential:
    """Create hidden layers with ELU, plus an output layer if ``out_features`` is given."""
    parts: list[nn.Module] = []
    for number in range(layers):
        parts += [nn.Linear(units if number else in_features, units), nn.ELU()]
    if out_features is not None:
        parts.append(nn.Linear(units, out_features))
    return nn.Sequential(*parts)


class GaussianRSSM(StateSpace):
    """State-space model with normally distributed stochastic states (Hafner et al. 2020).

    The distribution parameters are concatenated means and raw values. Standard deviations are
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
        """Draw standard normal noise, ``[*rows, stoch]``."""
        return torch.randn(*rows, self.stoch, device=device)

    def recur(self, latent: Latent, action: Tensor) -> Tensor:
        """Return the next deterministic state; see :meth:`StateSpace.recur`."""
        joined = self.joined(torch.cat([latent.stoch, action], -1))
        return self.cell(joined, latent.deter)  # type: ignore[no-any-return]

    def correct(self, deter: Tensor, embedding: Tensor) -> Tensor:
        """Return the posterior's parameters; see :meth:`StateSpace.correct`."""
        hidden = functional.elu(self.posterior_deter(deter) + embedding)
        return self.posterior_out(hidden)  # type: ignore[no-any-return]

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Return reparametrised samples, ``[..., stoch]``."""
        mean, deviation = self._normal(parameters)
        return torch.addcmul(mean, deviation, noise)

    def _normal(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = parameters.float().chunk(2, -1)
        return mean, functional.softplus(raw) + self.LEAST

    def divergence(self, posterior: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same KL divergence twice, in nats, because there is no KL balancing."""
        (mean, deviation), (other, spread) = self._normal(posterior), self._normal(prior)
        ratio = (deviation / spread).square()
        each = ratio + ((mean - other) / spread).square() - 1 - ratio.log()
        divergence = each.sum(-1) / 2
        return divergence, divergence


class GaussianWorldModel(WorldModel):
    """World model of the first Dreamer (Hafner et al. 2020), with DreamerV3's image convolutions.

    Vectors are encoded and predicted without symlog, and the reward head predicts a scalar.

    Args:
        env: environment that defines observations and actions.
        size: network sizes, or a key of :data:`GAUSSIAN_SIZES`.

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
        """Return the expected reward for the step that led to each latent, ``[...]``."""
        return self.reward_head(features).float().squeeze(-1)  # type: ignore[no-any-return]

    def reward_error(self, features: Tensor, reward: Tensor) -> Tensor:
        """Return half the squared error, the loss for a normal with unit variance, ``[...]``."""
        return (self.reward(features) - reward).square() / 2


class TanhActor(Behaviour):
    """Actor of the first Dreamer with differentiable samples (Hafner et al. 2020, appendix A).

    Continuous actions have a tanh-normal distribution. Discrete actions are one-hot with
    straight-through gradients.
    """

    LEAST, SCALE = 1e-4, 5.0
    RAW = math.log(math.expm1(5.0))
    """Offset added before the softplus; it makes initial standard deviations about 5."""

    def __init__(self, code: ActionCode, features: int, size: Size) -> None:
        super().__init__(code, elu_network(features, size.units, 4, self.columns(code)))

    def normal(self, mean: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations before the tanh, from the network's outputs."""
        deviation = functional.softplus(raw + self.RAW) + self.LEAST
        return self.SCALE * torch.tanh(mean / self.SCALE), deviation

    def sample(self, columns: Tensor) -> Tensor:
        """Return differentiable samples of encoded actions, ``[..., action features]``."""
        if self.code.discrete:
            probabilities = columns.exp()
            uniform = torch.rand(columns.shape[:-1], device=columns.device)
            chosen = sample_one_hot(probabilities.detach(), uniform)
            return chosen + probabilities - probabilities.detach()
        mean, deviation = columns.chunk(2, -1)
        return torch.tanh(torch.addcmul(mean, deviation, torch.randn_like(mean)))

    def mode(self, columns: Tensor) -> Tensor:
        """Return the encoded action: the squashed mean, or the most probable action."""
        mode = super().mode(columns)
        return mode if self.code.discrete else mode.tanh()
