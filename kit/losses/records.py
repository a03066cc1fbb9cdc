"""Sequences of records, as losses of world models read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from kit.modules.world.model import WorldModel
from kit.modules.world.state_space import Latent


class Records(NamedTuple):
    """What a minibatch of sequences says, time first: ``[time, sequences]``."""

    observations: TensorDictBase
    action: Tensor
    """encoded, the one that followed."""
    reward: Tensor
    """that arrived with the observation."""
    is_init: Tensor
    last: Tensor
    continuation: Tensor
    """discount, 0 where the episode terminated."""

    @staticmethod
    def keys(world_model: WorldModel) -> list[Any]:
        """Keys that are read of a minibatch."""
        own = [world_model.code.key, "reward", "is_init", "terminated", "done"]
        return [*world_model.observation_keys, *own]

    @classmethod
    def of(cls, tensordict: TensorDictBase, world_model: WorldModel, discount: float) -> Records:
        """The records of a minibatch ``[sequences, time]``."""
        rows = tensordict.select(*cls.keys(world_model)).transpose(0, 1)
        reward, is_init, terminated, last = (
            rows.get(key).squeeze(-1) for key in ("reward", "is_init", "terminated", "done")
        )
        action = world_model.code.encode(rows.get(world_model.code.key))
        continuation = (~terminated).float() * discount
        return cls(rows, action, reward, is_init, last, continuation)

    @property
    def previous_action(self) -> Tensor:
        """Encoded actions before each observation; zeros before the first."""
        return torch.cat([torch.zeros_like(self.action[:1]), self.action[:-1]])

    def filtered(self, model: WorldModel) -> tuple[list[Tensor], Latent, Tensor]:
        """Filter the observations.

        Args:
            model: encodes and filters.

        Returns:
            The observations as the model predicts them, latents ``[time, sequences, ...]``, and the
            parameters of their posteriors.
        """
        targets = model.targets(self.observations)
        start = model.rssm.initial(self.reward.shape[1], device=self.reward.device)
        encoded = model.encode(targets)
        observed = model.rssm.observe(start, self.previous_action, encoded, self.is_init)
        return targets, *observed

    def newest(self, time_steps: int) -> Records:
        """The last time steps; 0: all."""
        first = -time_steps
        return Records(self.observations[first:], *(part[first:] for part in self[1:]))
