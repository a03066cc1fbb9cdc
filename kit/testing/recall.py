"""An environment that no policy without memory can solve."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


class Recall(gym.Env[NDArray[np.float32], np.int64]):
    """Shows a cue in the first observation, and asks for it ``delay`` steps later.

    An observation is the cue, one-hot, and whether the answer is due; after the first one the cue
    is zero. The last action earns 1 if it is the cue. All cues are equally likely, and the last
    observation is the same for each, so a policy of the present observation alone has an expected
    return of at most ``1 / choices``.

    Args:
        delay: steps between cue and question; an episode has one more.
        choices: how many cues there are.
    """

    def __init__(self, delay: int = 8, choices: int = 4) -> None:
        self.delay, self.choices = delay, choices
        self.observation_space = spaces.Box(0.0, 1.0, (choices + 1,), np.float32)
        self.action_space = spaces.Discrete(choices)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Draw and show a cue."""
        super().reset(seed=seed, options=options)
        self.cue, self.count = int(self.np_random.integers(self.choices)), 0
        return self._seen(self.cue), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Answer, if asked."""
        asked = self.count == self.delay
        self.count += 1
        reward = float(asked and int(action) == self.cue)
        return self._seen(None), reward, asked, False, {}

    def _seen(self, cue: int | None) -> NDArray[np.float32]:
        seen = np.zeros(self.choices + 1, np.float32)
        if cue is not None:
            seen[cue] = 1.0
        seen[-1] = float(self.count == self.delay)
        return seen


gym.register("kit/Recall-v0", Recall)
