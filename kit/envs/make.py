"""Making environments by name."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import gymnasium as gym
import torch

from kit.envs.copies import Copies, GymnasiumVector, InProcess
from kit.envs.errors import EnvironmentFault
from kit.envs.normalize import Normalizer
from kit.envs.single import MakeEnv, Wrapper, find_spec, make_copy, make_resumable
from kit.envs.vector_env import VectorEnv
from kit.steps import SettingError
from kit.steps.errors import whole_number

Vectorization = Literal["sync", "async", "native", "envpool"]


def make_env(
    id: str | MakeEnv,
    num_envs: int = 1,
    *,
    vectorization: Vectorization = "sync",
    action_repeat: int = 1,
    max_episode_steps: int | None = None,
    seed: int = 0,
    normalize_observation: bool = False,
    normalize_reward: bool = False,
    gamma: float = 0.99,
    wrappers: Sequence[Wrapper] = (),
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> VectorEnv:
    """Make ``num_envs`` copies of a Gymnasium environment.

    Args:
        id: Gymnasium id, or a function that makes one copy.
        num_envs: number of copies.
        vectorization: ``sync``: in this process, one after the other; ``async``: each in its own
            process; ``native``: the environment's own vector environment; ``envpool``: EnvPool.
        action_repeat: env steps one action is held for; an episode can end inside a repeat.
        max_episode_steps: policy steps after which an episode is truncated; ``None``: as the
            environment is registered (in env steps).
        seed: of all copies; each gets its own from it.
        normalize_observation: whether floating observations get running mean 0 and variance 1.
        normalize_reward: whether rewards are divided by the running deviation of their
            discounted sum.
        gamma: the discount of that sum.
        wrappers: applied to each copy, innermost first, below the action repeat.
        device: where TensorDicts are; the environments run on the host.
        **kwargs: for the environment.

    Raises:
        SettingError: if the id is unknown, a package is missing, or settings contradict.
    """
    num_envs = whole_number("env.num_envs", num_envs, at_least=1)
    action_repeat = whole_number("env.action_repeat", action_repeat, at_least=1)
    if max_episode_steps is not None:
        max_episode_steps = whole_number("env.max_episode_steps", max_episode_steps, at_least=1)
    name = id if isinstance(id, str) else getattr(id, "__name__", type(id).__name__)
    if vectorization in ("native", "envpool"):
        copies = _made_elsewhere(
            id, num_envs, vectorization, action_repeat, max_episode_steps, seed, wrappers, kwargs
        )
    elif vectorization in ("sync", "async"):
        found = find_spec(id) if isinstance(id, str) else id
        how = (found, action_repeat, max_episode_steps, tuple(wrappers), kwargs)
        if vectorization == "async":
            copies = _in_processes(how, num_envs, name)
        else:
            copies = InProcess(functools.partial(make_copy, *how), num_envs, name)
    else:
        raise SettingError(
            "env.vectorization", vectorization, "is unknown", ["sync", "async", "native", "envpool"]
        )
    normalizer = None
    if normalize_observation or normalize_reward:
        normalizer = Normalizer(
            copies.observation_leaves,
            num_envs,
            observation=normalize_observation,
            reward=normalize_reward,
            gamma=gamma,
        )
    return VectorEnv(copies, seed=seed, normalizer=normalizer, device=device)


def _in_processes(how: tuple[Any, ...], num_envs: int, name: str) -> Copies:
    make_copy(*how).close()  # what cannot be made is refused here, not in a process
    try:
        with _without_main():
            vector = gym.vector.AsyncVectorEnv(
                [functools.partial(make_resumable, *how)] * num_envs,
                autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
                context="spawn",
            )
    except Exception as error:
        raise EnvironmentFault(name, None, f"its processes did not start: {error}") from error
    return GymnasiumVector(vector, name)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module while processes are spawned.

    Each would import it again, and with it torch: seconds and half a gigabyte for every copy. The
    processes do not need it: what they make is sent by value.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _made_elsewhere(
    id: str | MakeEnv,
    num_envs: int,
    vectorization: str,
    action_repeat: int,
    max_episode_steps: int | None,
    seed: int,
    wrappers: Sequence[Any],
    kwargs: dict[str, Any],
) -> Copies:
    """Copies that are not made one by one, so nothing can be put around each."""
    for field, value, neutral in (
        ("env.action_repeat", action_repeat, 1),
        ("env.wrappers", tuple(wrappers), ()),
    ):
        if value != neutral:
            raise SettingError(
                field,
                value,
                f"cannot be put around copies of {vectorization} environments",
                f"{neutral}, or vectorization='sync'",
            )
    if not isinstance(id, str):
        raise SettingError("env.id", id, f"must be a name for {vectorization} environments")
    if vectorization == "native":
        from kit.envs.native import make_native

        find_spec(id)
        return make_native(id, num_envs, max_episode_steps, **kwargs)
    from kit.envs.pool import PoolCopies

    return PoolCopies(id, num_envs, seed, max_episode_steps, **kwargs)
