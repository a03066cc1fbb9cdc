"""Environments: many of them stepped at once, with tensors in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.envs.lazy import lazy_attributes

if TYPE_CHECKING:
    from kit.envs.backends.base import EnvBackend, StepArrays
    from kit.envs.backends.gymnasium import GymnasiumBackend
    from kit.envs.backends.serial import SerialBackend
    from kit.envs.backends.torchrl import TorchRLBackend
    from kit.envs.backends.workers import WorkersBackend
    from kit.envs.episodes import Episode, EpisodeStatistics
    from kit.envs.errors import EnvironmentFault
    from kit.envs.make import make_env
    from kit.envs.normalize import Normalizer
    from kit.envs.single_env import ActionMask, ActionRepeat, make_single_env
    from kit.envs.vector_env import VectorEnv

# Lazy, so that a process that only steps an env does not import torch.
_HOMES = {
    "EnvBackend": "kit.envs.backends.base",
    "GymnasiumBackend": "kit.envs.backends.gymnasium",
    "SerialBackend": "kit.envs.backends.serial",
    "StepArrays": "kit.envs.backends.base",
    "Episode": "kit.envs.episodes",
    "EpisodeStatistics": "kit.envs.episodes",
    "EnvironmentFault": "kit.envs.errors",
    "make_env": "kit.envs.make",
    "make_single_env": "kit.envs.single_env",
    "Normalizer": "kit.envs.normalize",
    "TorchRLBackend": "kit.envs.backends.torchrl",
    "VectorEnv": "kit.envs.vector_env",
    "WorkersBackend": "kit.envs.backends.workers",
    "ActionMask": "kit.envs.single_env",
    "ActionRepeat": "kit.envs.single_env",
}

__getattr__, __dir__ = lazy_attributes(__name__, _HOMES)

__all__ = [
    "ActionMask",
    "ActionRepeat",
    "EnvBackend",
    "EnvironmentFault",
    "Episode",
    "EpisodeStatistics",
    "GymnasiumBackend",
    "Normalizer",
    "SerialBackend",
    "StepArrays",
    "TorchRLBackend",
    "VectorEnv",
    "WorkersBackend",
    "make_env",
    "make_single_env",
]
