"""Sequences of records for world-model losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from kit.modules.world.model import WorldModel
from kit.modules.world.rssm import Latent


class Records(NamedTuple):
    """Entries of a sequence minibatch, with time as the first dimension: ``[time, sequences]``."""

    observations: TensorDictBase
    previous_action: Tensor
    """Encoded previous action; zeros if unknown."""
    action: Tensor
    """Encoded action that followed the observation."""
    reward: Tensor
    """Reward that arrived with the observation."""
    is_init: Tensor
    terminated: Tensor
    last: Tensor
    continuation: Tensor
    """Discount factor; 0 if the episode terminated."""
    start: Latent
    """Latent before the first time step, ``[sequences, ...]``."""

    @staticmethod
    def keys(world_model: WorldModel) -> list[Any]:
        """Return the minibatch keys that :meth:`of` reads for the world model."""
        others = [world_model.code.key, "reward", "is_init", "terminated", "done"]
        return [*world_model.observation_keys, *others]

    @classmethod
    def of(
        cls,
        tensordict: TensorDictBase,
        world_model: WorldModel,
        discount: float,
        stored_latents: bool = False,
    ) -> Records:
        """Create records from a minibatch ``[sequences, time]``.

        Args:
            tensordict: Minibatch.
            world_model: World model that determines the keys.
            discount: Discount factor for non-terminal steps.
            stored_latents: Whether the first latent and action are read from the preceding record,
                which is stored under ``"before"``; otherwise, they are zeros.
        """
        rows = tensordict.select(*cls.keys(world_model)).transpose(0, 1)
        reward, is_init, terminated, last = (
            rows.get(key).squeeze(-1) for key in ("reward", "is_init", "terminated", "done")
        )
        rssm, code = world_model.rssm, world_model.code
        action = code.encode(rows.get(code.key))
        start, first = rssm.initial(reward.shape[1], device=reward.device), action[0] * 0
        if stored_latents:
            before = tensordict.get("before")
            names = Latent._fields
            start = rssm.unpacked({name: before["latent", name][:, 0] for name in names})
            first = code.encode(before.get(code.key)[:, 0])
        previous = torch.cat([first.unsqueeze(0), action[:-1]])
        continuation = (~terminated).float() * discount
        ends = (is_init, terminated, last, continuation)
        return cls(rows, previous, action, reward, *ends, start)

    def filtered(self, model: WorldModel) -> tuple[list[Tensor], Latent, Tensor]:
        """Encode and filter the observations.

        Returns:
            Prediction targets, latents ``[time, sequences, ...]`` and posterior parameters.
        """
        targets = model.targets(self.observations)
        encoded = model.encode(targets)
        observed = model.rssm.observe(self.start, self.previous_action, encoded, self.is_init)
        return targets, *observed

    def newest(self, time_steps: int) -> Records:
        """Return the last ``time_steps`` time steps of all sequences; 0: all time steps."""
        series = zip(self._fields[:-1], self)
        return self._replace(**{name: part[-time_steps:] for name, part in series})
