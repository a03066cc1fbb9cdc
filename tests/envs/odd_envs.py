"""Environments that misbehave, or are unusual; worker processes import them without torch."""

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
            if self.how == "interrupt":
                raise KeyboardInterrupt
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


class Allowed(Steps):
    """Allows one of three actions, another one after each step, and says so in ``info``."""

    action_space = Discrete(3)

    def reset(self, *, seed=None, options=None):
        seen, _ = super().reset(seed=seed, options=options)
        return seen, {"action_mask": self._mask()}

    def step(self, action):
        assert action == self.count % 3, "a forbidden action"
        seen, reward, terminated, truncated, _ = super().step(action)
        # As in many environments, there is nothing to choose after the last step.
        return seen, reward, terminated, truncated, {} if terminated else {
            "action_mask": self._mask()
        }  # fmt: skip

    def _mask(self):
        return np.arange(3) == self.count % 3


class Reports(Steps):
    """Says with its last step whether it was lucky; every second episode is, the first not."""

    episodes = -1

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        return super().reset(seed=seed, options=options)

    def step(self, action):
        seen, reward, terminated, truncated, _ = super().step(action)
        info = {"is_success": self.episodes % 2 == 1, "number": np.int64(self.episodes)}
        info |= {"text": "x", "array": np.zeros(3), "nested": {"a": 1}}
        return seen, reward, terminated, truncated, info


class FourValues(Steps):
    def step(self, action):
        seen, reward, *_ = super().step(action)
        return seen, reward, False, {}


class ArrayReward(Steps):
    def step(self, action):
        seen, reward, *rest = super().step(action)
        return seen, np.array([reward]), *rest


class NoReward(Steps):
    def step(self, action):
        seen, _, *rest = super().step(action)
        return seen, None, *rest


class TextReward(Steps):
    text = "1.5"

    def step(self, action):
        seen, _, *rest = super().step(action)
        return seen, self.text, *rest


class Sampling(gym.Env):
    """Observes what it draws from its own spaces."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(1000)

    def reset(self, *, seed=None, options=None):
        seen = self.observation_space.sample()
        seen[0] = self.action_space.sample() / 1000
        return seen, {}

    def step(self, action):
        return self.reset()[0], 0.0, False, False, {}


class ClosesWhatItNeverOpened(Steps):
    """Has an action mask; raises when it is closed, as one whose viewer was never opened."""

    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": np.array([True, False])}

    def step(self, action):
        *result, info = super().step(action)
        return *result, {**info, "action_mask": np.array([True, False])}

    def close(self):
        raise AttributeError("'NoneType' object has no attribute 'close'")


class Keeps(gym.Env):
    """Observes a number that it draws or counts in a way of its own; episodes of 5 steps."""

    observation_space = Box(-np.inf, np.inf, (1,), np.float64)
    action_space = Discrete(2)

    def __init__(self) -> None:
        self.steps = 0
        self.begin()

    def begin(self) -> None:
        """Make what is kept."""

    def next(self) -> float:
        """The next number."""
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return np.array([self.next()]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.steps += 1
        return np.array([self.next()]), 1.0, False, self.steps >= 5, {}


class Part:
    """An object that is part of a state."""


class Holds(Keeps):
    """Holds an object, or a text in its place, as another release of a simulator might."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held, self.number = held, 0

    def next(self) -> float:
        self.number += 1
        return float(self.number)
