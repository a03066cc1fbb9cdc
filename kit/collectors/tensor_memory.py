"""The memory of one batch of a torch environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from kit.envs.spaces import Key
from kit.envs.tensor import TensorStep


class TensorMemory:
    """Tensors of one batch, time first, on the environment's device.

    Observations are kept entry by entry, ``[steps, observation_size, num_envs]``, as torch
    environments compute them; the batch shows them the usual way round.

    Args:
        steps: of each copy.
        observation: of all copies, ``[num_envs, observation_size]``.
        written: one value of everything that the policy writes, by key.
        repeats: whether a policy step may make several env steps.
    """

    def __init__(
        self, steps: int, observation: Tensor, written: dict[Key, Tensor], repeats: bool
    ) -> None:
        num_envs, size = observation.shape
        self.steps, self.num_envs = steps, num_envs

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((steps, *shape), dtype=dtype, device=observation.device)

        kind = observation.dtype
        self.observation = make(kind, size, num_envs)
        self.next_observation = make(kind, size, num_envs)
        self.reward, self.episode_return = make(kind, num_envs), make(kind, num_envs)
        self.terminated, self.truncated = make(torch.bool, num_envs), make(torch.bool, num_envs)
        self.length = make(torch.int64, num_envs)
        self.env_steps = make(torch.int64, num_envs) if repeats else None
        self.written = {
            key: torch.zeros((steps, *value.shape), dtype=value.dtype, device=value.device)
            for key, value in written.items()
        }

    def part(self, start: int, count: int) -> list[Tensor]:
        """Return the memory of ``count`` steps from ``start``, in the order of :func:`write`."""
        tensors = [
            self.observation,
            self.next_observation,
            self.reward,
            self.terminated,
            self.truncated,
            self.episode_return,
            self.length,
            *([] if self.env_steps is None else [self.env_steps]),
            *self.written.values(),
        ]
        return [tensor[start : start + count] for tensor in tensors]

    def tensordict(self, trajectories: Tensor) -> TensorDictBase:
        """Return the batch, ``[num_envs, steps]``.

        Args:
            trajectories: number of each step's episode, ``[steps, num_envs]``.
        """
        shape = [self.num_envs, self.steps]
        root: dict[Any, Tensor] = {"observation": self.observation.permute(2, 0, 1)}
        following: dict[Any, Tensor] = {"observation": self.next_observation.permute(2, 0, 1)}
        for key, value in self.written.items():
            value = value.transpose(0, 1)
            if isinstance(key, tuple) and key[0] == "next":
                following[key[1] if len(key) == 2 else key[1:]] = value
            else:
                root[key] = value
        root[("collector", "traj_ids")] = trajectories.T
        for name in ("reward", "terminated", "truncated"):
            following[name] = getattr(self, name).T.unsqueeze(-1)
        following["done"] = following["terminated"] | following["truncated"]
        return TensorDict({**root, "next": TensorDict(following, shape)}, shape)


def write(
    part: Sequence[Tensor],
    time_step: int,
    observation: Tensor,
    step: TensorStep,
    written: Sequence[Tensor | None],
) -> None:
    """Write one step to the memory of some steps, in place.

    Args:
        part: see :meth:`TensorMemory.part`.
        time_step: number of the step in it.
        observation: what was acted on.
        step: what it led to.
        written: by the policy; ``None`` where this step wrote nothing.
    """
    values = [
        observation.T,
        step.next_observation.T,
        step.reward,
        step.terminated,
        step.truncated,
        step.episode_return,
        step.episode_length,
    ]
    if len(part) > len(values) + len(written):
        values.append(step.env_steps)
    for memory, value in zip(part, [*values, *written]):
        if value is not None:
            memory[time_step].copy_(value)
