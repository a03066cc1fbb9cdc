"""Trajectories imagined by a world model, and their returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kit.modules.world.actions import Behaviour
from kit.modules.world.model import WorldModel
from kit.modules.world.rssm import Latent


class Imagined(NamedTuple):
    """Imagined trajectories of ``horizon + 1`` latents, with time as the first dimension."""

    features: tuple[Tensor, ...]
    """Features ``[rows, features]``, one tensor per latent to avoid a large copy."""
    action: Tensor
    """Encoded actions, ``[horizon, rows, action features]``."""
    columns: Tensor
    """Actor outputs, differentiable in the actor's weights, ``[horizon, rows, columns]``."""
    reward: Tensor
    """Predicted reward for entering each latent state after the first, ``[horizon, rows]``."""
    continuation: Tensor
    """Discounted continuation probabilities, ``[horizon + 1, rows]``."""

    @property
    def weight(self) -> Tensor:
        """Discounted probability of reaching each latent except the last, ``[horizon, rows]``."""
        return self.continuation.cumprod(0)[:-1]


def imagine(
    world_model: WorldModel,
    actor: Behaviour,
    start: Latent,
    horizon: int,
    *,
    gradients: bool = False,
) -> Imagined:
    """Imagine trajectories in which the actor selects the actions.

    Args:
        world_model: Predicts latents, rewards and continuations.
        actor: Selects actions from features.
        start: Initial latents, ``[rows, ...]``; no gradients flow to them.
        horizon: Number of policy steps.
        gradients: Whether gradients flow through the dynamics to the actions.
    """
    rssm, latent = world_model.rssm, Latent(*(part.detach() for part in start))
    noise = rssm.noise(horizon, len(latent.deter), device=latent.deter.device)
    steps: list[tuple[Tensor, ...]] = []
    with torch.set_grad_enabled(gradients):
        features, continuation = [latent.features], [world_model.continuation(latent.features)]
        for random in noise:
            with torch.enable_grad():
                columns = actor(features[-1].detach())
            action = actor.sample(columns)
            latent = rssm.imagine(latent, rssm.action(action), random)
            features.append(latent.features)
            # Prediction heads run in the loop, while the features are in the CPU cache.
            steps.append((action, columns, world_model.reward(features[-1])))
            continuation.append(world_model.continuation(features[-1]))
    action, columns, reward = (torch.stack(parts) for parts in zip(*steps))
    return Imagined(tuple(features), action, columns, reward, torch.stack(continuation))


def lambda_returns(
    reward: Tensor, continuation: Tensor, value: Tensor, lmbda: float | Tensor
) -> Tensor:
    """Compute lambda-returns ``[time, ...]`` from the rewards and values of the next states.

    ``R_t = r_{t+1} + c_{t+1} ((1 - l_{t+1}) v_{t+1} + l_{t+1} R_{t+1})``, with ``R_T = v_T``
    (Hafner et al. 2025, eq. 7), where ``t + 1`` is the next time step.

    Args:
        reward: Reward that arrives with the next state, ``[time, ...]``.
        continuation: Discounted continuation probability of the next state, ``[time, ...]``.
        value: Value of the next state, ``[time, ...]``.
        lmbda: Scalar, or a value for each next state, ``[time, ...]``.
    """
    weights = lmbda if isinstance(lmbda, Tensor) else torch.full_like(reward, lmbda)
    bootstrap = reward + continuation * (1 - weights) * value
    decay = continuation * weights
    found = [value[-1]]
    for step in range(len(reward) - 1, -1, -1):
        found.append(torch.addcmul(bootstrap[step], decay[step], found[-1]))
    return torch.stack(found[:0:-1])
