"""Preprocessing of images, by Gymnasium's own wrappers."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym

from kit.envs.single_env import Wrapper


def atari_wrapper(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """The preprocessing of Mnih et al. (2015), as Machado et al. (2018) recommend it.

    Up to 30 steps without action after a reset, each action held for 4 frames of which the last
    two are merged, 84 x 84 grey values; losing a life ends no episode.
    """
    return gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, screen_size=84)


def pixel_wrappers(preprocess: str = "none", frame_stack: int = 1) -> list[Wrapper]:
    """Wrappers of an environment of images; they stay bytes.

    Args:
        preprocess: ``atari`` (:func:`atari_wrapper`) or ``none``.
        frame_stack: images that make one observation, the newest last.
    """
    wrappers: list[Wrapper] = [atari_wrapper] if preprocess == "atari" else []
    if wrappers or frame_stack > 1:  # one grey image is a stack of one
        wrappers.append(partial(gym.wrappers.FrameStackObservation, stack_size=frame_stack))
    return wrappers
