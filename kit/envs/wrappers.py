"""Gymnasium wrappers for one environment copy."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from kit.steps.errors import whole_number


class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):  # type: ignore[misc, unused-ignore]
    """Holds each action for several env steps, and reports how many were really made.

    Rewards are summed. An episode that ends inside a repeat ends it: the remaining env steps are
    not made.

    Args:
        env: the environment.
        repeat: env steps one action is held for, at least 1.
    """

    def __init__(self, env: gym.Env[Any, Any], repeat: int) -> None:
        super().__init__(env)
        self.repeat = whole_number("action_repeat", repeat, at_least=1)
        self.env_steps = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make up to ``repeat`` env steps; ``info["env_steps"]`` says how many."""
        total, made = 0.0, 0
        while made < self.repeat:
            made += 1
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        self.env_steps = made
        info["env_steps"] = made
        return observation, total, terminated, truncated, info
