"""Environments implemented in torch, which step thousands of copies at once on any device."""

from __future__ import annotations

from typing import Any

from kit.envs.backends.tensor import TensorBackend
from kit.envs.tensor.acrobot import Acrobot
from kit.envs.tensor.base import EpisodeState, TensorEnv, TensorStep
from kit.envs.tensor.cartpole import CartPole, CartPoleV0
from kit.envs.tensor.mountain_car import MountainCar, MountainCarContinuous
from kit.envs.tensor.pendulum import Pendulum
from kit.steps.errors import one_of

TENSOR_ENVS: dict[str, tuple[type[TensorEnv], dict[str, Any]]] = {
    "CartPole-v0": (CartPoleV0, {}),
    "CartPole-v1": (CartPole, {}),
    "Pendulum-v1": (Pendulum, {}),
    "MountainCar-v0": (MountainCar, {}),
    "MountainCarContinuous-v0": (MountainCarContinuous, {}),
    "Acrobot-v1": (Acrobot, {}),
}
"""Maps each Gymnasium id to a class and its default arguments; custom entries can be added."""


def make_tensor_env(id: str, num_envs: int, **kwargs: Any) -> TensorEnv:
    """Create a torch implementation of the Gymnasium environment ``id``.

    Args:
        id: a key of :data:`TENSOR_ENVS`.
        num_envs: number of environments.
        kwargs: arguments for :class:`TensorEnv`; ``None`` values select the defaults.

    Raises:
        SettingError: if there is no torch implementation; the message suggests similar ids.
    """
    environment, defaults = TENSOR_ENVS[one_of("id", id, [*TENSOR_ENVS])]
    arguments = {key: value for key, value in kwargs.items() if value is not None}
    return environment(num_envs, **{**defaults, **arguments})


__all__ = [
    "TENSOR_ENVS",
    "Acrobot",
    "CartPole",
    "CartPoleV0",
    "EpisodeState",
    "MountainCar",
    "MountainCarContinuous",
    "Pendulum",
    "TensorBackend",
    "TensorEnv",
    "TensorStep",
    "make_tensor_env",
]
