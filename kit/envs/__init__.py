"""Environments: many copies stepped at once, with tensors in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.envs.lazy import lazy_attributes

if TYPE_CHECKING:
    from kit.envs.copies import Copies, StepArrays
    from kit.envs.episodes import Episode, EpisodeAccounts
    from kit.envs.errors import EnvironmentFault
    from kit.envs.gymnasium_vector import GymnasiumVector
    from kit.envs.in_process import InProcess
    from kit.envs.make import make_env
    from kit.envs.normalize import Normalizer
    from kit.envs.single import make_copy
    from kit.envs.torchrl_env import TorchRLCopies
    from kit.envs.vector_env import VectorEnv
    from kit.envs.workers import Workers
    from kit.envs.wrappers import ActionRepeat

# Lazy, so that a process that only steps a copy does not import torch.
_HOMES = {
    "Copies": "kit.envs.copies",
    "GymnasiumVector": "kit.envs.gymnasium_vector",
    "InProcess": "kit.envs.in_process",
    "StepArrays": "kit.envs.copies",
    "Episode": "kit.envs.episodes",
    "EpisodeAccounts": "kit.envs.episodes",
    "EnvironmentFault": "kit.envs.errors",
    "make_env": "kit.envs.make",
    "make_copy": "kit.envs.single",
    "Normalizer": "kit.envs.normalize",
    "TorchRLCopies": "kit.envs.torchrl_env",
    "VectorEnv": "kit.envs.vector_env",
    "Workers": "kit.envs.workers",
    "ActionRepeat": "kit.envs.wrappers",
}

__getattr__, __dir__ = lazy_attributes(__name__, _HOMES)

__all__ = [
    "ActionRepeat",
    "Copies",
    "EnvironmentFault",
    "Episode",
    "EpisodeAccounts",
    "GymnasiumVector",
    "InProcess",
    "Normalizer",
    "StepArrays",
    "TorchRLCopies",
    "VectorEnv",
    "Workers",
    "make_copy",
    "make_env",
]
