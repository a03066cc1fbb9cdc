"""Trajectories imagined by a world model, and their returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kit.modules.world.actor import Behaviour
from kit.modules.world.model import WorldModel
from kit.modules.world.state_space import Latent


class Imagined(NamedTuple):
    """Trajectories of ``horizon + 1`` latents, time first."""

    features: tuple[Tensor, ...]
    """``[rows, features]`` of each latent: the widest part, which is not copied into one tensor."""
    action: Tensor
    """encoded actions, ``[horizon + 1, rows, action features]``."""
    columns: Tensor
    """of the actor, with gradients to it, ``[horizon + 1, rows, columns]``."""
    reward: Tensor
    """expected rewards that arrive with each latent, ``[horizon + 1, rows]``."""
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
        for step in range(horizon + 1):
            features = latent.features
            with torch.enable_grad():
                columns = actor(features.detach())
            action = actor.sample(columns)
            # Heads within the loop: what a step has written is still in the processor's cache.
            reward, going = world_model.reward(features), world_model.continuation(features)
            steps.append((features, action, columns, reward, going))
            if step < horizon:
                latent = rssm.imagine(latent, rssm.action(action), noise[step])
    all_features, *others = zip(*steps)
    return Imagined(all_features, *(torch.stack(parts) for parts in others))


def lambda_returns(
    reward: Tensor, continuation: Tensor, value: Tensor, lmbda: float | Tensor
) -> Tensor:
    """Lambda-returns of all time steps but the last, ``[time - 1, ...]``.

    ``R_t = r_{t+1} + c_{t+1} ((1 - l_{t+1}) v_{t+1} + l_{t+1} R_{t+1})``, from ``R_T = v_T``
    (Hafner et al. 2025, eq. 7). Rewards and continuations are those that arrive with a state.

    Args:
        reward: ``[time, ...]``.
        continuation: discounted, ``[time, ...]``.
        value: ``[time, ...]``.
        lmbda: one number, or one for each time step, ``[time, ...]``.
    """
    weights = lmbda if isinstance(lmbda, Tensor) else torch.full_like(reward, lmbda)
    bootstrap = reward + continuation * (1 - weights) * value
    decay = continuation * weights
    found = [value[-1]]
    for step in range(len(reward) - 1, 0, -1):
        found.append(torch.addcmul(bootstrap[step], decay[step], found[-1]))
    return torch.stack(found[:0:-1])
