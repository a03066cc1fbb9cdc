"""A small environment of images, for tests of convolutional policies."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


class Glimpse(gym.Env[NDArray[np.uint8], np.int64]):
    """Shows a bright square at a random place; the action says in which quarter it is.

    Images are bytes ``[size, size, 1]``; each right answer earns 1, an episode is 8 steps long.

    Args:
        size: of an image, in pixels.
    """

    STEPS = 8

    def __init__(self, size: int = 12) -> None:
        self.size = size
        self.observation_space = spaces.Box(0, 255, (size, size, 1), np.uint8)
        self.action_space = spaces.Discrete(4)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        self.count = 0
        return self._shown(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Answer."""
        reward = float(int(action) == self.quarter)
        self.count += 1
        return self._shown(), reward, self.count == self.STEPS, False, {}

    def _shown(self) -> NDArray[np.uint8]:
        half = self.size // 2
        row, column = (int(place) for place in self.np_random.integers(half - 1, size=2))
        self.quarter = int(self.np_random.integers(4))
        row, column = row + half * (self.quarter // 2), column + half * (self.quarter % 2)
        image = np.zeros((self.size, self.size, 1), np.uint8)
        image[row : row + 2, column : column + 2] = 255
        return image


gym.register("kit/Glimpse-v0", Glimpse)
