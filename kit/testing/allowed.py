"""An environment in which most choices are forbidden."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


class Allowed(gym.Env[NDArray[np.float32], np.int64]):
    """Shows a number; of the choices that ``info["action_mask"]`` allows, the nearest one earns 1.

    A forbidden choice ends the episode, which is otherwise 8 steps long.

    Args:
        choices: how many there are; a third of them is allowed in each step.
    """

    STEPS = 8

    def __init__(self, choices: int = 12) -> None:
        self.choices = choices
        self.observation_space = spaces.Box(0.0, 1.0, (choices,), np.float32)
        self.action_space = spaces.Discrete(choices)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        self.count = 0
        return self._asked()

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Choose."""
        forbidden = not self.mask[int(action)]
        self.count += 1
        reward = float(not forbidden and int(action) == self.best)
        seen, info = self._asked()
        return seen, reward, forbidden or self.count == self.STEPS, False, info

    def _asked(self) -> tuple[NDArray[np.float32], dict[str, Any]]:
        number = int(self.np_random.integers(self.choices))
        allowed = self.np_random.permutation(self.choices)[: self.choices // 3]
        self.mask = np.isin(np.arange(self.choices), allowed)
        self.best = int(min(allowed, key=lambda choice: (abs(choice - number), choice)))
        seen = np.zeros(self.choices, np.float32)
        seen[number] = 1.0
        return seen, {"action_mask": self.mask.astype(np.int8)}


gym.register("kit/Allowed-v0", Allowed)
