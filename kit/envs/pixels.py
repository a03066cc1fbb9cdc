"""Image preprocessing with Gymnasium's wrappers."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym

from kit.envs.single_env import Wrapper


def atari_wrapper(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Apply Atari preprocessing (Mnih et al. 2015; settings from Machado et al. 2018).

    Each episode starts with up to 30 no-op steps. Actions are repeated for 4 frames, and the last
    two are max-pooled into an 84 x 84 greyscale image. Losing a life does not end the episode.
    """
    return gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)


def pixel_wrappers(preprocess: str = "none", frame_stack: int = 1) -> list[Wrapper]:
    """Return wrappers for pixel observations. Observations keep the dtype uint8.

    Args:
        preprocess: ``atari`` (:func:`atari_wrapper`) or ``none``.
        frame_stack: number of stacked images per observation, newest last.
    """
    wrappers: list[Wrapper] = [atari_wrapper] if preprocess == "atari" else []
    if wrappers or frame_stack > 1:  # Atari images need a channel dimension even for one frame
        wrappers.append(partial(gym.wrappers.FrameStackObservation, stack_size=frame_stack))
    return wrappers
