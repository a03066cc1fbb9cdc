"""Environments: vector environments, their backends, wrappers and running normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.lazy import lazy

if TYPE_CHECKING:
    from kit.envs.backends.base import EnvBackend as EnvBackend
    from kit.envs.backends.base import StepArrays as StepArrays
    from kit.envs.backends.gymnasium import GymnasiumBackend as GymnasiumBackend
    from kit.envs.backends.serial import SerialBackend as SerialBackend
    from kit.envs.backends.torchrl import TorchRLBackend as TorchRLBackend
    from kit.envs.backends.workers import WorkersBackend as WorkersBackend
    from kit.envs.episodes import Episode as Episode
    from kit.envs.episodes import EpisodeStatistics as EpisodeStatistics
    from kit.envs.errors import EnvError as EnvError
    from kit.envs.make import make_env as make_env
    from kit.envs.normalize import Normalizer as Normalizer
    from kit.envs.single_env import ActionMask as ActionMask
    from kit.envs.single_env import ActionRepeat as ActionRepeat
    from kit.envs.single_env import make_single_env as make_single_env
    from kit.envs.vector_env import VectorEnv as VectorEnv

# Lazy imports keep torch out of worker processes that only step environments.
_HOMES = {
    "backends.base": ["EnvBackend", "StepArrays"],
    "backends.gymnasium": ["GymnasiumBackend"],
    "backends.serial": ["SerialBackend"],
    "backends.torchrl": ["TorchRLBackend"],
    "backends.workers": ["WorkersBackend"],
    "episodes": ["Episode", "EpisodeStatistics"],
    "errors": ["EnvError"],
    "make": ["make_env"],
    "normalize": ["Normalizer"],
    "single_env": ["ActionMask", "ActionRepeat", "make_single_env"],
    "vector_env": ["VectorEnv"],
}

__getattr__, __dir__ = lazy(__name__, _HOMES)
