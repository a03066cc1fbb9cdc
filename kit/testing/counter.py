"""Test environment whose transitions can be verified from batches alone, without torch.

Available as a single environment and as a native vector environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

COUNTER = "kit/Counter-v0"
"""Gymnasium id, registered when this module is imported."""
LIMIT = 4
"""Policy steps after which an episode is truncated."""
ACTIONS = 3

Observations = NDArray[np.float32]


class Counter(gym.Env[NDArray[np.float32], int]):  # type: ignore[misc, unused-ignore]
    """Environment that counts the steps of its episodes.

    Observation: a random number ``x`` in [0, 1) drawn once per episode, the step count, and the
    last action (initially 0). Episodes terminate after ``1 + floor(6 x)`` steps and are truncated
    after 4 steps. The reward is ``x + step + 10 action``.
    """

    observation_space = gym.spaces.Box(0.0, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(ACTIONS)

    def __init__(self) -> None:
        self.number = np.float32(0.0)
        self.count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed, options=options)
        self.number, self.count = self.np_random.random(dtype=np.float32), 0
        return self._observation(0), {}

    def step(self, action: int) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Count one step."""
        self.count += 1
        reward = float(self.number + np.float32(self.count + 10 * action))
        terminated = self.count >= 1 + int(self.number * np.float32(6))
        return self._observation(action), reward, terminated, False, {}

    def _observation(self, action: int) -> NDArray[np.float32]:
        return np.array([self.number, self.count, action], np.float32)


class VectorCounter(gym.vector.VectorEnv[Any, Any, Any]):  # type: ignore[misc, unused-ignore]
    """Native vector version of :class:`Counter`.

    Each environment produces the same episodes as a single :class:`Counter` with the same seed.

    Args:
        num_envs: number of environments.
        max_episode_steps: steps after which an episode is truncated.
        autoreset_mode: ``SAME_STEP`` resets in the step that ends an episode. ``DISABLED`` requires
            resets with a mask. ``NEXT_STEP`` is not supported.
    """

    def __init__(
        self,
        num_envs: int = 1,
        max_episode_steps: int = LIMIT,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
    ) -> None:
        self.metadata = {"autoreset_mode": autoreset_mode}
        self.num_envs, self.max_episode_steps = num_envs, max_episode_steps
        self.single_observation_space = Counter.observation_space
        self.single_action_space = Counter.action_space
        self.observation_space = batch_space(Counter.observation_space, num_envs)
        self.action_space = batch_space(Counter.action_space, num_envs)
        self.generators = [np.random.default_rng() for _ in range(num_envs)]
        self.observations = np.zeros((num_envs, 3), np.float32)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        """Start episodes in the environments in ``options["reset_mask"]`` (by default all).

        Args:
            seed: a seed per environment, or the first of consecutive seeds.
            options: may contain ``reset_mask``, ``[num_envs]``.
        """
        mask = (options or {}).get("reset_mask")
        if seed is not None:
            seeds = range(seed, seed + self.num_envs) if isinstance(seed, int) else seed
            self.generators = [gym.utils.seeding.np_random(int(number))[0] for number in seeds]
        self._begin(np.ones(self.num_envs, np.bool_) if mask is None else mask)
        return self.observations.copy(), {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observations, Observations, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Count one step in each environment."""
        numbers, counts = self.observations[:, 0], self.observations[:, 1] + 1
        rewards = numbers + (counts + 10 * actions.astype(np.float32))
        terminated = counts >= 1 + (numbers * np.float32(6)).astype(np.int64)
        truncated = counts >= self.max_episode_steps
        self.observations[:, 1], self.observations[:, 2] = counts, actions
        ended, info = terminated | truncated, {}
        if self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP and ended.any():
            info = {"final_obs": _rows(self.observations, ended), "_final_obs": ended}
            self._begin(ended)
        return self.observations.copy(), rewards, terminated, truncated, info

    def _begin(self, mask: NDArray[np.bool_]) -> None:
        for env in np.flatnonzero(mask):
            number = self.generators[env].random(dtype=np.float32)
            self.observations[env] = number, 0, 0


def _rows(observations: Observations, mask: NDArray[np.bool_]) -> NDArray[Any]:
    """Return the masked rows as an object array, Gymnasium's format for final observations."""
    rows = np.full(len(mask), None, dtype=object)
    for env in np.flatnonzero(mask):
        rows[env] = observations[env].copy()
    return rows


if COUNTER not in gym.registry:
    gym.register(
        COUNTER,
        entry_point="kit.testing.counter:Counter",
        vector_entry_point="kit.testing.counter:VectorCounter",
        max_episode_steps=LIMIT,
    )
