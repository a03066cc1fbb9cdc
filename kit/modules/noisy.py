"""Layers that explore by noise on their weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrl.envs.utils import ExplorationType, exploration_type


class NoisyLinear(nn.Module):
    """A linear layer with factorised Gaussian noise on its weights (Fortunato et al. 2018, eq. 9).

    ``y = (mu_w + sigma_w eps_w) x + mu_b + sigma_b eps_b`` with ``eps_w = f(eps_out) f(eps_in)^T``
    and ``f(x) = sign(x) sqrt(abs(x))``. Noise is drawn with each call, for the whole batch, where
    TorchRL's ``NoisyLinear`` keeps it until it is reset: so each action and each of the networks in
    a loss has noise of its own (section 3.1), and there is none to save. Without exploration
    (``set_exploration_type``) the layer is ``mu_w x + mu_b``.

    Args:
        in_features: size of inputs.
        out_features: size of outputs.
        sigma: initial standard deviation of the noise, times ``sqrt(in_features)``.
    """

    def __init__(self, in_features: int, out_features: int, sigma: float = 0.5) -> None:
        super().__init__()
        bound, scale = in_features**-0.5, sigma * in_features**-0.5
        shape = (out_features, in_features)
        self.weight_mu = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
        self.bias_mu = nn.Parameter(torch.empty(out_features).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full(shape, scale))
        self.bias_sigma = nn.Parameter(torch.full((out_features,), scale))

    def forward(self, value: Tensor) -> Tensor:
        """Return ``[..., out_features]``."""
        mean = functional.linear(value, self.weight_mu, self.bias_mu)
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return mean
        out_features, in_features = self.weight_mu.shape
        noise = torch.randn(in_features + out_features, device=value.device)
        noise = noise.sign() * noise.abs().sqrt()
        incoming, outgoing = noise[:in_features], noise[in_features:]
        deviation = functional.linear(value * incoming, self.weight_sigma, self.bias_sigma)
        return torch.addcmul(mean, outgoing, deviation)
