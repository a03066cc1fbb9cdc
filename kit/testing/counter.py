"""An environment whose every transition can be checked from the data alone. Imports no torch.

It is there as a single environment, and as a vector environment that steps all its envs itself.
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
"""Its id for Gymnasium, once this module is imported."""
LIMIT = 4
"""Policy steps after which an episode is truncated."""
ACTIONS = 3

Observations = NDArray[np.float32]


class Counter(gym.Env[NDArray[np.float32], int]):  # type: ignore[misc, unused-ignore]
    """Counts the steps of its episodes.

    Observation: a number drawn uniformly from [0, 1) for each episode, steps since it began, last
    action (0 at first). The episode terminates after ``1 + floor(6 x)`` steps, where ``x`` is the
    number, and is truncated after 4. The reward is ``x + step + 10 action``.
    """

    observation_space = gym.spaces.Box(0.0, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(ACTIONS)

    def __init__(self) -> None:
        self.number = np.float32(0.0)
        self.count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
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
    """Environments of :class:`Counter`, the vector entry point of its id.

    An env that is seeded like a single environment counts the same episodes.

    Args:
        num_envs: number of envs.
        max_episode_steps: steps after which an episode is truncated.
        autoreset_mode: ``SAME_STEP`` begins another episode in the step that ends one; with
            ``DISABLED`` envs are reset by mask. ``NEXT_STEP`` is not offered: it spends a step.
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
        """Begin an episode in all envs, or in those of ``options["reset_mask"]``.

        Args:
            seed: of each env; of a single number the following envs have the following ones.
            options: ``reset_mask``, ``[num_envs]``.
        """
        mask = (options or {}).get("reset_mask")
        if seed is not None:
            seeds = range(seed, seed + self.num_envs) if isinstance(seed, int) else seed
            self.generators = [gym.utils.seeding.np_random(int(one))[0] for one in seeds]
        self._begin(np.ones(self.num_envs, np.bool_) if mask is None else mask)
        return self.observations.copy(), {}

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observations, Observations, NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Count one step of every env."""
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
    """Return an array of arrays, those of ``mask``, as Gymnasium gives last observations."""
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
