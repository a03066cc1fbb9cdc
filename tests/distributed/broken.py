"""Environments that fail on rank 1 only."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym


class Raises(gym.Wrapper[Any, Any, Any, Any]):
    """Raises an error on rank 1 after 20 steps."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self.left = 20

    def step(self, action: Any) -> Any:
        self.left -= os.environ.get("RANK") == "1"
        if self.left < 0:
            self.fail()
        return super().step(action)

    def fail(self) -> None:
        raise OSError("the simulator is gone")


class Hangs(Raises):
    """Hangs on rank 1 after 20 steps."""

    def fail(self) -> None:
        time.sleep(3_600)
