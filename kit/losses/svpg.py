"""Stein variational policy gradient: policies that learn from each other and keep apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def rbf_kernel(particles: Tensor) -> tuple[Tensor, Tensor]:
    """The radial basis function kernel and the sum of its derivatives.

    ``k(x, y) = exp(-|x - y|^2 / h)``, where the bandwidth ``h`` is the median of the squared
    distances of all pairs, divided by ``log(n + 1)`` (Liu and Wang 2016, section 5, with the
    ``n + 1`` of pyrado, so that two particles have a bandwidth).

    Args:
        particles: ``[n, parameters]``.

    Returns:
        The kernel ``[n, n]``, and ``[n, parameters]``: for each particle ``i`` the sum over ``j``
        of the derivatives of ``k(x_j, x_i)`` by ``x_j``, which points away from the others.
    """
    count = len(particles)
    away = particles[:, None] - particles[None]
    squares = away.square().sum(-1)
    above = torch.triu_indices(count, count, 1, device=particles.device)
    pairs = squares[tuple(above)].sort().values
    middle = pairs[(len(pairs) - 1) // 2 : len(pairs) // 2 + 1]
    median = middle.mean() if count > 1 else squares.new_ones(())
    bandwidth = (median / math.log(count + 1)).clamp_min(1e-12)
    kernel = (-squares / bandwidth).exp()
    return kernel, (kernel[..., None] * away).sum(1) * (2 / bandwidth)


def svpg_directions(particles: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """In which direction each particle moves (Liu et al. 2017, eq. 9, with a flat prior).

    Args:
        particles: parameters of the policies, ``[n, parameters]``.
        scores: gradient of each policy's objective, ``[n, parameters]``.
        temperature: weight of the entropy of the particles' distribution against the objective.
    """
    kernel, repulsion = rbf_kernel(particles)
    return (kernel @ scores / temperature + repulsion) / len(particles)


class SteinGradients:
    """Turns the gradients of particles' losses into those of SVPG, for ``Update(gradients=...)``.

    Those of critics are left to their particles. All are of the loss's mean over the particles, so
    each is multiplied by their number.

    Args:
        policy: whose parameters ``[particles, ...]`` are coupled, a body that it shares included.
        temperature: as of :func:`svpg_directions`.
    """

    def __init__(self, policy: nn.Module, temperature: float) -> None:
        self.temperature = temperature
        self._coupled = {id(parameter) for parameter in policy.parameters()}

    def __call__(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients that the optimiser follows downhill."""
        changed = [None if g is None else len(p) * g for p, g in zip(parameters, gradients)]
        found = {n: g for n, g in enumerate(changed) if g is not None}
        coupled = [n for n in found if id(parameters[n]) in self._coupled]
        if not coupled:
            return changed
        flat = torch.cat([parameters[n].detach().flatten(1) for n in coupled], 1)
        scores = -torch.cat([found[n].flatten(1) for n in coupled], 1)
        directions = svpg_directions(flat, scores, self.temperature)
        sizes = [parameters[n][0].numel() for n in coupled]
        for n, direction in zip(coupled, directions.split(sizes, 1)):  # type: ignore[no-untyped-call]
            changed[n] = -direction.reshape(parameters[n].shape)
        return changed
