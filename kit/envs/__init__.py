"""Vector environments, their backends, wrappers and running normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.lazy import lazy

if TYPE_CHECKING:
    from kit.envs.backends.base import EnvBackend, StepArrays
    from kit.envs.backends.gymnasium import GymnasiumBackend
    from kit.envs.backends.serial import SerialBackend
    from kit.envs.backends.torchrl import TorchRLBackend
    from kit.envs.backends.workers import WorkersBackend
    from kit.envs.episodes import Episode, EpisodeStatistics
    from kit.envs.errors import EnvError
    from kit.envs.make import make_env
    from kit.envs.normalize import Normalizer
    from kit.envs.pixels import pixel_wrappers
    from kit.envs.single_env import ActionMask, ActionRepeat, make_single_env
    from kit.envs.tensor import TENSOR_ENVS, EpisodeState, TensorEnv, TensorStep, make_tensor_env
    from kit.envs.vector_env import VectorEnv

__all__ = [
    "TENSOR_ENVS", "ActionMask", "ActionRepeat", "EnvBackend", "EnvError", "Episode",
    "EpisodeState", "EpisodeStatistics", "GymnasiumBackend", "Normalizer", "SerialBackend",
    "StepArrays", "TensorEnv", "TensorStep", "TorchRLBackend", "VectorEnv", "WorkersBackend",
    "make_env", "make_single_env", "make_tensor_env", "pixel_wrappers",
]  # fmt: skip

# Imports are lazy, so that a process that only steps an env does not import torch.
__getattr__, __dir__ = lazy(__name__)
