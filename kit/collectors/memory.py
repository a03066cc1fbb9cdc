"""The memory of one batch: environments write into arrays that become its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from kit.collectors.policy import Tensors
from kit.envs.backends.base import StepArrays
from kit.envs.episodes import EpisodeStatistics
from kit.envs.errors import EnvironmentFault
from kit.envs.spaces import Key
from kit.envs.vector_env import VectorEnv


class BatchMemory:
    """Arrays of one batch, time first; rows are handed to the environments step by step.

    Args:
        env: whose observations and rewards they hold.
        steps: of each copy.
    """

    def __init__(self, env: VectorEnv, steps: int) -> None:
        n = env.num_envs
        self.steps = steps
        self.observation: dict[Key, NDArray[Any]] = {}
        self.next_observation: dict[Key, NDArray[Any]] = {}
        for leaf in env.observation_leaves:
            self.observation[leaf.key] = np.empty((steps + 1, n, *leaf.shape), leaf.dtype)
            self.next_observation[leaf.key] = np.empty((steps, n, *leaf.shape), leaf.dtype)
        self.reward = np.empty((steps, n), np.float32)
        self.raw_reward = np.empty((steps, n), np.float32) if env.needs_raw_reward else None
        self.terminated = np.zeros((steps, n), np.bool_)
        self.truncated = np.zeros((steps, n), np.bool_)
        self.env_steps = np.ones((steps, n), np.int32)

    def clear(self) -> None:
        """Make ready for another batch in the same memory."""
        self.terminated[...] = False
        self.truncated[...] = False
        self.env_steps[...] = 1

    def begin(self, present: Mapping[Key, NDArray[Any]]) -> None:
        """Put the observation to act on first in its place."""
        for key, array in present.items():
            self.observation[key][0] = array

    def results(self, start: int, steps: int) -> StepArrays:
        """Return where some steps are written, ``[steps, num_envs, ...]``."""
        whole = StepArrays(
            self.next_observation,
            {key: array[1:] for key, array in self.observation.items()},
            self.reward,
            self.terminated,
            self.truncated,
            self.env_steps,
            self.raw_reward,
        )
        return whole.at(slice(start, start + steps))

    def acted_on(self, start: int, steps: int) -> dict[Key, NDArray[Any]]:
        """Return the observations of some steps, ``[steps, num_envs, ...]``."""
        return {key: array[start : start + steps] for key, array in self.observation.items()}

    def seen(self) -> Tensors:
        """Return what was acted on, ``[num_envs, steps, ...]``."""
        return {key: _rows(array[:-1]) for key, array in self.observation.items()}

    @property
    def ended(self) -> NDArray[np.bool_]:
        """Whether each step ended an episode, ``[steps, num_envs]``."""
        return self.terminated | self.truncated

    def episode_rewards(self) -> NDArray[np.float32]:
        """Rewards before normalisation, ``[steps, num_envs]``."""
        return self.reward if self.raw_reward is None else self.raw_reward

    def tensordict(self, written: Tensors, trajectories: NDArray[np.int64]) -> TensorDictBase:
        """Return the batch, ``[num_envs, steps]``.

        Args:
            written: by the policy, ``[num_envs, steps, ...]``; entries under ``next`` go there.
            trajectories: number of each step's episode, ``[steps, num_envs]``.
        """
        shape = [self.reward.shape[1], self.steps]
        root: dict[Any, Tensor] = self.seen()
        following: dict[Any, Tensor] = {key: _rows(a) for key, a in self.next_observation.items()}
        for key, value in written.items():
            if isinstance(key, tuple) and key[0] == "next":
                following[key[1] if len(key) == 2 else key[1:]] = value
            else:
                root[key] = value
        following["reward"] = _rows(self.reward).unsqueeze(-1)
        following["done"] = _rows(self.ended).unsqueeze(-1)
        following["terminated"] = _rows(self.terminated).unsqueeze(-1)
        following["truncated"] = _rows(self.truncated).unsqueeze(-1)
        root[("collector", "traj_ids")] = _rows(trajectories)
        return TensorDict({**root, "next": TensorDict(following, shape)}, shape)

    def check_finite(self, name: str, accounts: EpisodeStatistics, taken: int) -> None:
        """Refuse NaN, naming the copy and the step.

        Args:
            name: of the environment.
            accounts: open episodes before this batch.
            taken: policy steps of each copy before this batch.

        Raises:
            EnvironmentFault: if an observation or reward is NaN.
        """
        for what, values in [("reward", self.reward), *self.next_observation.items()]:
            if values.dtype.kind != "f" or not np.isnan(values.sum()):
                continue
            found = np.argwhere(np.isnan(values))
            if len(found):
                step, copy = int(found[0][0]), int(found[0][1])
                ends = np.flatnonzero(self.ended[:step, copy])
                length = int(accounts.lengths[copy]) + step
                length = step - int(ends[-1]) - 1 if len(ends) else length
                what = f"returned NaN as {what}, {length} policy steps into its episode"
                raise EnvironmentFault(name, copy, what, taken + step)


class EpisodeIds:
    """Numbers for episodes through the whole run: a new one for each that begins.

    Args:
        num_envs: number of copies.
    """

    def __init__(self, num_envs: int) -> None:
        self.present = np.arange(num_envs)

    def number(self, ended: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the number of each step's episode, ``[steps, num_envs]``.

        Args:
            ended: whether each step ended an episode, ``[steps, num_envs]``.
        """
        ids = np.empty(ended.shape, np.int64)
        ids[...] = self.present
        following = int(self.present.max()) + 1
        for copy in np.flatnonzero(ended.any(axis=0)):
            ends = np.flatnonzero(ended[:, copy])
            for end in ends:
                ids[end + 1 :, copy] = following
                self.present[copy] = following
                following += 1
        return ids

    def restart(self) -> None:
        """Begin new episodes in all copies."""
        self.present += int(self.present.max()) + 1 - int(self.present.min())


def _rows(array: NDArray[Any]) -> Tensor:
    """Return a time-first array as a tensor with copies first, sharing its memory."""
    return torch.from_numpy(array).transpose(0, 1)
