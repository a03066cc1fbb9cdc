"""An environment that fails; apart, so that a process that steps it imports no torch."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class FallsOver(gym.Env):
    """Truncated after 7 steps; the thirtieth step raises."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    total = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.count += 1
        self.total += 1
        if self.total == 30:
            raise OSError("the simulator fell over")
        return np.full(2, self.count, np.float32), 1.0, False, self.count == 7, {}
