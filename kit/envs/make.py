"""Making environments by name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import gymnasium as gym
import torch
from gymnasium.envs.registration import EnvSpec
from torchrl.envs import EnvBase

from kit.envs.backends.base import EnvBackend
from kit.envs.backends.gymnasium import GymnasiumBackend, make_native
from kit.envs.backends.serial import SerialBackend
from kit.envs.backends.workers import WorkersBackend
from kit.envs.normalize import Normalizer
from kit.envs.single_env import MakeEnv, Wrapper, find_spec, make_single_env
from kit.envs.vector_env import VectorEnv, env_seeds
from kit.steps.errors import SettingError, one_of, whole_number

Vectorization = Literal["sync", "async", "native", "envpool", "tensor"]


def make_env(
    id: str | EnvSpec | MakeEnv | gym.vector.VectorEnv[Any, Any, Any] | EnvBase,
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
    restart_on_error: int = 0,
    num_workers: int | None = None,
    **kwargs: Any,
) -> VectorEnv:
    """Make ``num_envs`` copies of an environment.

    Args:
        id: Gymnasium id (or entry), or a function that makes one copy. An environment that steps
            several copies already is taken as it is: one of TorchRL with its transforms, or a
            vector environment of Gymnasium.
        num_envs: number of copies.
        vectorization: ``sync``: in this process, one after the other; ``async``: in worker
            processes; ``native``: the environment's own vector environment; ``envpool``: EnvPool;
            ``tensor``: written in torch, on ``device``.
        action_repeat: env steps one action is held for; an episode can end inside a repeat.
        max_episode_steps: policy steps after which an episode is truncated; ``None``: as the
            environment is registered (in env steps).
        seed: of all copies; each gets its own from it.
        normalize_observation: whether floating observations get running mean 0 and variance 1.
        normalize_reward: whether rewards are divided by the running deviation of their
            discounted sum.
        gamma: the discount of that sum.
        wrappers: applied to each copy, innermost first, below the action repeat.
        device: where TensorDicts are; environments run on the host, but for ``tensor``.
        restart_on_error: faults that are mended (``sync`` and ``async``): a copy that raises, or
            whose process dies, is made anew and its episode truncated; the next fault stops the
            run.
        num_workers: processes of ``async``; ``None``: one for each core, at most one for each copy.
        **kwargs: for the environment.

    Raises:
        SettingError: if the id is unknown, a package is missing, or settings contradict.
    """
    one_of("env.vectorization", vectorization, get_args(Vectorization))
    if isinstance(id, str) and vectorization in ("sync", "async", "native"):
        id = find_spec(id)  # which goes to other processes, where it may not be registered
    arguments = dict(locals())
    arguments |= arguments.pop("kwargs")
    around = _Around(
        action_repeat=whole_number("env.action_repeat", action_repeat, at_least=1),
        max_episode_steps=_optional("env.max_episode_steps", max_episode_steps),
        wrappers=tuple(wrappers),
        restart_on_error=whole_number("env.restart_on_error", restart_on_error),
        num_workers=_optional("env.num_workers", num_workers),
    )
    num_envs = whole_number("env.num_envs", num_envs, at_least=1)
    if isinstance(id, (EnvBase, gym.vector.VectorEnv)):
        copies, make_again = _made_before(id, num_envs, around), None
    else:
        make_again = functools.partial(make_env, **arguments)
        if vectorization in ("sync", "async"):
            copies = _one_by_one(id, num_envs, vectorization, around, kwargs)
        else:
            copies = _together(id, num_envs, vectorization, around, seed, device, kwargs)
    normalizer = None
    if normalize_observation or normalize_reward:
        normalizer = Normalizer(
            copies.observation_leaves,
            copies.num_envs,
            observation=normalize_observation,
            reward=normalize_reward,
            gamma=gamma,
        )
    return VectorEnv(copies, seed=seed, normalizer=normalizer, device=device, make_again=make_again)


def _optional(field: str, value: Any) -> int | None:
    return None if value is None else whole_number(field, value, at_least=1)


@dataclass(frozen=True)
class _Around:
    """What may be put around each copy, or around all of them."""

    action_repeat: int = 1
    max_episode_steps: int | None = None
    wrappers: tuple[Wrapper, ...] = ()
    restart_on_error: int = 0
    num_workers: int | None = None

    def allow(self, what: str, *allowed: str) -> None:
        """Refuse all that is not neutral, but for the fields ``allowed``.

        Raises:
            SettingError: if something else was asked for.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default and field.name not in allowed:
                raise SettingError(
                    f"env.{field.name}",
                    value,
                    f"is not possible with {what}",
                    [field.default],
                    "or an id with vectorization='sync' or 'async'",
                )


def _one_by_one(
    id: EnvSpec | MakeEnv,
    num_envs: int,
    vectorization: str,
    around: _Around,
    kwargs: dict[str, Any],
) -> EnvBackend:
    """Gymnasium environments made copy by copy."""
    name = id.id if isinstance(id, EnvSpec) else _name(id)
    make = functools.partial(
        make_single_env, id, around.action_repeat, around.max_episode_steps, around.wrappers, kwargs
    )
    restarts = around.restart_on_error
    if vectorization == "async":
        return WorkersBackend(
            make, num_envs, name, num_workers=around.num_workers, restarts=restarts
        )
    others = (field.name for field in fields(around) if field.name != "num_workers")
    around.allow("vectorization='sync'", *others)
    return SerialBackend(make, num_envs, name, restarts=restarts)


def _name(make: MakeEnv) -> str:
    function = make.func if isinstance(make, functools.partial) else make
    return getattr(function, "__name__", type(function).__name__)


def _together(
    id: str | EnvSpec | MakeEnv,
    num_envs: int,
    vectorization: str,
    around: _Around,
    seed: int,
    device: torch.device | str | None,
    kwargs: dict[str, Any],
) -> EnvBackend:
    """Environments that step all their copies themselves."""
    if not isinstance(id, (str, EnvSpec)):
        raise SettingError("env.id", id, f"must be a name where vectorization={vectorization!r}")
    repeats = ("action_repeat",) if vectorization == "tensor" else ()
    around.allow(f"vectorization={vectorization!r}", "max_episode_steps", *repeats)
    limit = around.max_episode_steps
    if vectorization == "native":
        assert isinstance(id, EnvSpec)
        return make_native(id, num_envs, limit, **kwargs)
    id = id.id if isinstance(id, EnvSpec) else id
    if vectorization == "envpool":
        from kit.envs.backends.envpool import EnvPoolBackend

        return EnvPoolBackend(id, num_envs, env_seeds(seed, num_envs)[0], limit, **kwargs)
    from kit.envs.tensor import TensorBackend, make_tensor_env

    kwargs = {"device": device, "max_episode_steps": limit, "seed": seed, **kwargs}
    try:
        env = make_tensor_env(id, num_envs, action_repeat=around.action_repeat, **kwargs)
    except TypeError as error:
        raise SettingError("env.kwargs", kwargs, f"are refused by {id}: {error}") from None
    return TensorBackend(env, id)


def _made_before(
    env: EnvBase | gym.vector.VectorEnv[Any, Any, Any], num_envs: int, around: _Around
) -> EnvBackend:
    """An environment of TorchRL or Gymnasium that steps several copies already."""
    around.allow(f"a {type(env).__name__} that was made before")
    if isinstance(env, EnvBase):
        from kit.envs.backends.torchrl import TorchRLBackend

        copies: EnvBackend = TorchRLBackend(env)
    else:
        name = env.spec.id if env.spec is not None else type(env).__name__
        copies = GymnasiumBackend(env, name)
    if num_envs not in (1, copies.num_envs):
        raise SettingError(
            "env.num_envs", num_envs, "is not the number of copies it steps", [copies.num_envs]
        )
    return copies
