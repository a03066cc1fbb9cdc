"""Environments that hang; apart, so that a process that steps them imports no torch."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import gymnasium as gym
import numpy as np

FOR_EVER = 3_600.0


class Hangs(gym.Env):
    """Truncated after 5 steps; in step ``hangs_in`` it does not come back.

    Args:
        hangs_in: number of the step, from 1, over all episodes; 0: never.
        interrupts: process that gets a Ctrl-C before: ``self`` or ``parent``.
        once: file that is made by the first hanging step, after which none hangs.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, hangs_in: int = 0, interrupts: str = "", once: str = "") -> None:
        self.hangs_in, self.interrupts, self.once, self.total = hangs_in, interrupts, once, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.count += 1
        self.total += 1
        if self.total == self.hangs_in and not (self.once and os.path.exists(self.once)):
            if self.once:
                open(self.once, "w").close()
            if self.interrupts:
                pid = os.getpid() if self.interrupts == "self" else os.getppid()
                os.kill(pid, signal.SIGINT)
            time.sleep(FOR_EVER)
        return np.full(2, self.count, np.float32), 1.0, False, self.count == 5, {}


gym.register("Hangs-v0", Hangs)
