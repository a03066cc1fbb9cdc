"""An environment whose every transition can be checked from the data alone. Imports no torch."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

COUNTER = "kit/Counter-v0"
"""Its id for Gymnasium, once this module is imported."""
LIMIT = 4
"""Policy steps after which an episode is truncated."""
ACTIONS = 3


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


if COUNTER not in gym.registry:
    gym.register(COUNTER, entry_point="kit.testing.counter:Counter", max_episode_steps=LIMIT)
