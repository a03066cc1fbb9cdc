"""Environments: many of them stepped at once, with tensors in and out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.envs.backends.base import EnvBackend as EnvBackend
    from kit.envs.backends.base import StepArrays as StepArrays
    from kit.envs.backends.gymnasium import GymnasiumBackend as GymnasiumBackend
    from kit.envs.backends.serial import SerialBackend as SerialBackend
    from kit.envs.backends.torchrl import TorchRLBackend as TorchRLBackend
    from kit.envs.backends.workers import WorkersBackend as WorkersBackend
    from kit.envs.episodes import Episode as Episode
    from kit.envs.episodes import EpisodeStatistics as EpisodeStatistics
    from kit.envs.errors import EnvironmentFault as EnvironmentFault
    from kit.envs.make import make_env as make_env
    from kit.envs.normalize import Normalizer as Normalizer
    from kit.envs.single_env import ActionMask as ActionMask
    from kit.envs.single_env import ActionRepeat as ActionRepeat
    from kit.envs.single_env import make_single_env as make_single_env
    from kit.envs.vector_env import VectorEnv as VectorEnv

# Lazy, so that a process that only steps an env does not import torch.
_HOMES = {
    "backends.base": ["EnvBackend", "StepArrays"],
    "backends.gymnasium": ["GymnasiumBackend"],
    "backends.serial": ["SerialBackend"],
    "backends.torchrl": ["TorchRLBackend"],
    "backends.workers": ["WorkersBackend"],
    "episodes": ["Episode", "EpisodeStatistics"],
    "errors": ["EnvironmentFault"],
    "make": ["make_env"],
    "normalize": ["Normalizer"],
    "single_env": ["ActionMask", "ActionRepeat", "make_single_env"],
    "vector_env": ["VectorEnv"],
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(name for names in _HOMES.values() for name in names)
