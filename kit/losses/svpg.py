"""Stein variational policy gradient: several policies that learn jointly and repel each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def rbf_kernel(particles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the radial basis function kernel and the sum of its derivatives.

    ``k(x, y) = exp(-|x - y|^2 / h)``. The bandwidth ``h`` is the median squared distance over all
    pairs, divided by ``log(n + 1)`` (Liu and Wang 2016, section 5, but with ``n + 1`` instead of
    ``n``, as in pyrado).

    Args:
        particles: Parameters of the particles, ``[n, parameters]``.

    Returns:
        The kernel ``[n, n]`` and the sums of derivatives ``[n, parameters]``. For particle ``i``,
        the derivatives of ``k(x_j, x_i)`` with respect to ``x_j`` are summed over ``j``.
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
    """Return the update direction of each particle (Liu et al. 2017, eq. 9, with a flat prior).

    Args:
        particles: Policy parameters, ``[n, parameters]``.
        scores: Gradients of the policies' objectives, ``[n, parameters]``.
        temperature: Weight of the entropy of the particle distribution relative to the objective.
    """
    kernel, repulsion = rbf_kernel(particles)
    return (kernel @ scores / temperature + repulsion) / len(particles)


class SteinGradients:
    """Function for ``Update(gradients=...)`` that converts particle gradients to SVPG gradients.

    Critic gradients are not coupled between particles. The loss is a mean over the particles, so
    each gradient is multiplied by the number of particles.

    Args:
        policy: Policy with parameters ``[particles, ...]``, including a shared backbone.
        temperature: As in :func:`svpg_directions`.
    """

    def __init__(self, policy: nn.Module, temperature: float) -> None:
        self.temperature = temperature
        self._coupled = {id(parameter) for parameter in policy.parameters()}

    def __call__(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients for an optimiser that minimises the loss."""
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
