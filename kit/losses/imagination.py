"""Trajectories imagined by a world model, and their returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kit.modules.world.actions import Behaviour
from kit.modules.world.model import WorldModel
from kit.modules.world.rssm import Latent


class Imagined(NamedTuple):
    """Trajectories of ``horizon + 1`` latents, time first."""

    features: tuple[Tensor, ...]
    """``[rows, features]`` of each latent: the widest part, which is not copied into one tensor."""
    action: Tensor
    """encoded actions, ``[horizon, rows, action features]``."""
    columns: Tensor
    """of the actor, with gradients to it, ``[horizon, rows, columns]``."""
    reward: Tensor
    """expected rewards that arrive with each latent but the first, ``[horizon, rows]``."""
    continuation: Tensor
    """probability of continuing times the discount, ``[horizon + 1, rows]``."""

    @property
    def weight(self) -> Tensor:
        """Probability of reaching each latent but the last, discounted, ``[horizon, rows]``."""
        return self.continuation.cumprod(0)[:-1]


def imagine(
    world_model: WorldModel,
    actor: Behaviour,
    start: Latent,
    horizon: int,
    *,
    gradients: bool = False,
) -> Imagined:
    """Imagine trajectories in which the actor acts.

    Args:
        world_model: predicts latents, rewards and continuations.
        actor: chooses actions from features.
        start: first latents, ``[rows, ...]``; no gradient reaches them.
        horizon: policy steps.
        gradients: whether gradients flow through the dynamics to the actions.
    """
    rssm, latent = world_model.rssm, Latent(*(part.detach() for part in start))
    noise = rssm.noise(horizon, len(latent.deter), device=latent.deter.device)
    steps: list[tuple[Tensor, ...]] = []
    with torch.set_grad_enabled(gradients):
        features, going = [latent.features], [world_model.continuation(latent.features)]
        for random in noise:
            with torch.enable_grad():
                columns = actor(features[-1].detach())
            action = actor.sample(columns)
            latent = rssm.imagine(latent, rssm.action(action), random)
            features.append(latent.features)
            # Heads within the loop: what a step has written is still in the processor's cache.
            steps.append((action, columns, world_model.reward(features[-1])))
            going.append(world_model.continuation(features[-1]))
    action, columns, reward = (torch.stack(parts) for parts in zip(*steps))
    return Imagined(tuple(features), action, columns, reward, torch.stack(going))


def lambda_returns(
    reward: Tensor, continuation: Tensor, value: Tensor, lmbda: float | Tensor
) -> Tensor:
    """Lambda-returns of time steps, from what follows each of them, ``[time, ...]``.

    ``R_t = r_{t+1} + c_{t+1} ((1 - l_{t+1}) v_{t+1} + l_{t+1} R_{t+1})``, from ``R_T = v_T``
    (Hafner et al. 2025, eq. 7), where ``t + 1`` is the time step that follows.

    Args:
        reward: that arrives with the next state, ``[time, ...]``.
        continuation: of the next state, discounted, ``[time, ...]``.
        value: of the next state, ``[time, ...]``.
        lmbda: one number, or one for each next state, ``[time, ...]``.
    """
    weights = lmbda if isinstance(lmbda, Tensor) else torch.full_like(reward, lmbda)
    bootstrap = reward + continuation * (1 - weights) * value
    decay = continuation * weights
    found = [value[-1]]
    for step in range(len(reward) - 1, -1, -1):
        found.append(torch.addcmul(bootstrap[step], decay[step], found[-1]))
    return torch.stack(found[:0:-1])
