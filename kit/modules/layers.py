"""Variants of TorchRL's noisy linear layers and batch renormalisation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrl.envs.utils import ExplorationType, exploration_type


class NoisyLinear(nn.Module):
    """A linear layer with factorised Gaussian noise on its weights (Fortunato et al. 2018, eq. 9).

    ``y = (mu_w + sigma_w eps_w) x + mu_b + sigma_b eps_b`` with ``eps_w = f(eps_out) f(eps_in)^T``
    and ``f(x) = sign(x) sqrt(abs(x))``. Each call draws new noise, shared by the whole batch, so
    each action and each network in a loss has independent noise (section 3.1). In contrast,
    TorchRL's ``NoisyLinear`` uses the same noise until ``reset_noise`` is called. If exploration is
    disabled by ``set_exploration_type``, the layer computes ``mu_w x + mu_b``.

    Args:
        in_features: input size.
        out_features: output size.
        sigma: noise scale; the initial entries of ``sigma_w`` are ``sigma / sqrt(in_features)``.
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
        """Return the noisy linear transformation, ``[..., out_features]``."""
        mean = functional.linear(value, self.weight_mu, self.bias_mu)
        if exploration_type() not in (ExplorationType.RANDOM, None):
            return mean
        out_features, in_features = self.weight_mu.shape
        noise = torch.randn(in_features + out_features, device=value.device)
        noise = noise.sign() * noise.abs().sqrt()
        incoming, outgoing = noise[:in_features], noise[in_features:]
        deviation = functional.linear(value * incoming, self.weight_sigma, self.bias_sigma)
        return torch.addcmul(mean, outgoing, deviation)


class BatchRenorm(nn.Module):
    """Batch renormalisation (Ioffe 2017, algorithm 1) for the last dimension.

    In training mode, the output is ``weight ((x - mean) / std r + d) + bias`` with the batch's mean
    and standard deviation. ``r = clip(std / running_std)`` and ``d = clip((mean - running_mean) /
    running_std)`` have no gradients. In evaluation mode, the running statistics are used. During
    the first ``warmup_steps`` batches, r is 1 and d is 0, as in ordinary batch normalisation.

    In TorchRL's ``BatchRenorm1d``, the corrections keep growing after the warm-up: they are doubled
    after ``2 * warmup_steps`` batches and tripled after ``3 * warmup_steps``. This class does not
    scale them. Running statistics and the number of batches are buffers, so checkpoints include
    them.

    Args:
        features: size of the last dimension.
        momentum: weight of the newest batch in the running statistics.
        eps: constant added to variances.
        max_r: upper bound of r; the lower bound is its reciprocal.
        max_d: upper bound of the absolute value of d.
        warmup_steps: number of initial batches that are normalised only by their own statistics.
    """

    averaged_over_ranks: ClassVar = ("running_mean", "running_var")
    """Buffers that several ranks replace by their mean once per iteration."""
    running_mean: Tensor
    running_var: Tensor
    batches: Tensor

    def __init__(
        self,
        features: int,
        *,
        momentum: float = 0.01,
        eps: float = 1e-3,
        max_r: float = 3.0,
        max_d: float = 5.0,
        warmup_steps: int = 100_000,
    ) -> None:
        super().__init__()
        self.momentum, self.eps, self.warmup_steps = momentum, eps, warmup_steps
        self.max_r, self.max_d = max_r, max_d
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, value: Tensor) -> Tensor:
        """Normalise ``[..., features]`` and, in training mode, update the running statistics."""
        running_std = (self.running_var + self.eps).sqrt()
        if not self.training:
            scale = self.weight / running_std
            return torch.addcmul(self.bias, value - self.running_mean, scale)
        batch = tuple(range(value.ndim - 1))
        mean = value.mean(batch)
        centred = value - mean
        var = centred.square().mean(batch)  # this is 25 times faster than torch.var
        std = (var + self.eps).sqrt()
        with torch.no_grad():
            warm = self.batches < self.warmup_steps
            r = (std / running_std).clamp(1 / self.max_r, self.max_r)
            d = ((mean - self.running_mean) / running_std).clamp(-self.max_d, self.max_d)
            r, d = torch.where(warm, 1.0, r), torch.where(warm, 0.0, d)
            self.running_mean += self.momentum * (mean - self.running_mean)
            self.running_var += self.momentum * (var - self.running_var)
            self.batches += 1
        return torch.addcmul(d * self.weight + self.bias, centred, r / std * self.weight)


@contextlib.contextmanager
def in_training(network: object, mode: bool) -> Iterator[None]:
    """Set a module's training mode temporarily, and restore each submodule's mode afterwards."""
    if not isinstance(network, nn.Module):
        yield
        return
    before = [(part, part.training) for part in network.modules()]
    network.train(mode)
    try:
        yield
    finally:
        for part, training in before:  # some submodules may be frozen in evaluation mode
            part.training = training
