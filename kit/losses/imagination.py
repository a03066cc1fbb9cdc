"""Trajectories imagined by a world model, and their returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kit.modules.world.actor import LatentActor
from kit.modules.world.model import WorldModel
from kit.modules.world.rssm import Latent


class Imagined(NamedTuple):
    """Trajectories of ``horizon + 1`` latents, time first, without gradients."""

    features: Tensor
    """``[horizon + 1, rows, features]``."""
    action: Tensor
    """encoded actions, ``[horizon + 1, rows, action features]``."""
    reward: Tensor
    """expected rewards that arrive with each latent, ``[horizon + 1, rows]``."""
    continuation: Tensor
    """probability of continuing times the discount, ``[horizon + 1, rows]``."""

    @property
    def weight(self) -> Tensor:
        """Probability of reaching each latent but the last, discounted, ``[horizon, rows]``."""
        return self.continuation.cumprod(0)[:-1]


@torch.no_grad()
def imagine(world_model: WorldModel, actor: LatentActor, start: Latent, horizon: int) -> Imagined:
    """Imagine trajectories in which the actor acts.

    Args:
        world_model: predicts latents, rewards and continuations.
        actor: chooses actions from features.
        start: first latents, ``[rows, ...]``.
        horizon: policy steps.
    """
    rssm, latent = world_model.rssm, Latent(*(part.detach() for part in start))
    rows = len(latent.deter)
    uniform = torch.rand(horizon, rows, rssm.size.stoch, device=latent.deter.device)
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for step in range(horizon + 1):
        features = latent.features
        action = actor.sample(actor(features))
        # Heads within the loop: what one step has written is still in the processor's cache.
        reward, continuation = world_model.reward(features), world_model.continuation(features)
        steps.append((features, action, reward, continuation))
        if step < horizon:
            latent = rssm.imagine(latent, rssm.action(action), uniform[step])
    return Imagined(*(torch.stack(parts) for parts in zip(*steps)))


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
