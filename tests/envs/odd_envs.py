"""Environments that misbehave, or have unusual spaces."""

from __future__ import annotations

import os
import random
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete


class Steps(gym.Env):
    """Observes the steps of its episode, which has ``length`` of them."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, length: int = 3) -> None:
        self.length, self.count = length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.count = 0
        return self._seen(), {}

    def step(self, action):
        self.count += 1
        return self._seen(), 1.0, self.count >= self.length, False, {}

    def _seen(self) -> Any:
        return np.array([self.count], np.float32)


class CountsFromStart(Steps):
    """Observes its steps as a member of a space that begins elsewhere than at 0."""

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self.observation_space = space

    def _seen(self) -> Any:
        return self.observation_space.start + self.count  # type: ignore[attr-defined]


class DrawsFromTheProcess(Steps):
    """Observes numbers from the generators of its process, Python's and NumPy's."""

    def _seen(self) -> Any:
        return np.array([np.random.random() + random.random()], np.float32)


class Raises(Steps):
    """Raises in the given calls of step, counted over all environments through a file.

    A file, because an environment that is made again begins to count again.
    """

    def __init__(self, at: tuple[int, ...], path: str, length: int = 3, how: str = "raise") -> None:
        super().__init__(length)
        self.at, self.path, self.how = at, path, how

    def step(self, action):
        with open(self.path, "ab", buffering=0) as file:
            file.write(b".")
            call = file.tell()  # after this byte, whoever else writes meanwhile
        if call in self.at:
            if self.how == "die":
                os._exit(3)
            raise OSError("the simulator fell over")
        return super().step(action)


class Returns(Steps):
    """Returns something impossible in the second step."""

    def __init__(self, observation=None, reward=1.0) -> None:
        super().__init__()
        self.observation, self.reward = observation, reward

    def step(self, action):
        seen, reward, *rest = super().step(action)
        if self.count == 2:
            seen, reward = seen if self.observation is None else self.observation, self.reward
        return seen, reward, *rest


class BadReset(Steps):
    """Cannot be reset."""

    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no power")


class ManySpaces(gym.Env):
    """Dict observations and Dict actions of all kinds; remembers the action it was given."""

    observation_space = Dict(
        {
            "camera": Box(0, 255, (2, 2), np.uint8),
            "body": Dict({"position": Box(-1, 1, (3,), np.float64), "gear": Discrete(4, start=1)}),
            "flags": gym.spaces.MultiBinary(2),
            "modes": MultiDiscrete([2, 3]),
        }
    )
    action_space = Dict(
        {
            "force": Box(-1, 1, (2,), np.float32),
            "gear": Discrete(4, start=1),
            "modes": MultiDiscrete([2, 3]),
        }
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.count += 1
        return self.observation_space.sample(), float(action["gear"]), self.count >= 4, False, {}


class Masked(gym.Env):
    """Only one of three actions is allowed, another one after each step."""

    observation_space = Dict(
        {"observation": Box(0, 10, (1,), np.float32), "action_mask": gym.spaces.MultiBinary(3)}
    )
    action_space = Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.count = 0
        return self._seen(), {}

    def step(self, action):
        assert action == self.count % 3, "a forbidden action"
        self.count += 1
        return self._seen(), 1.0, False, self.count >= 5, {}

    def _seen(self):
        mask = np.zeros(3, np.int8)
        mask[self.count % 3] = 1
        return {"observation": np.array([self.count], np.float32), "action_mask": mask}
