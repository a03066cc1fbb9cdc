"""A maze of rooms whose only reward is far away."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


class Maze(gym.Env):
    """Rooms of 5 x 5 places in a square, joined by doors; the goal is in the corner opposite.

    The observation is the place in [-1, 1] twice; a step into a wall stays. The goal gives 1 and
    ends the episode, which is truncated after ``steps`` otherwise.

    Args:
        rooms: on each side.
        steps: of an episode, at most.
    """

    ROOM = 5
    MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1))

    def __init__(self, rooms: int = 3, steps: int = 100) -> None:
        self.side, self.steps = rooms * (self.ROOM + 1) - 1, steps
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(len(self.MOVES))
        self.place, self.count = (0, 0), 0

    def is_wall(self, x: int, y: int) -> bool:
        """Whether a place is outside, or between rooms and no door."""
        if not (0 <= x < self.side and 0 <= y < self.side):
            return True
        between = [place % (self.ROOM + 1) == self.ROOM for place in (x, y)]
        middle = [place % (self.ROOM + 1) == self.ROOM // 2 for place in (x, y)]
        return all(between) or (between[0] and not middle[1]) or (between[1] and not middle[0])

    def _observe(self) -> NDArray[np.float32]:
        return np.float32(self.place) * 2 / (self.side - 1) - 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.place, self.count = (0, 0), 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        x, y = (here + move for here, move in zip(self.place, self.MOVES[int(action)]))
        if not self.is_wall(x, y):
            self.place = (x, y)
        self.count += 1
        found = self.place == (self.side - 1, self.side - 1)
        return self._observe(), float(found), found, self.count >= self.steps, {}
