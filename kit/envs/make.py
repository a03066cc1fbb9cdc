"""Making environments by name."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import gymnasium as gym
import torch
from gymnasium.envs.registration import EnvSpec
from torchrl.envs import EnvBase

from kit.envs.backends.base import EnvBackend
from kit.envs.backends.gymnasium import GymnasiumBackend, make_native
from kit.envs.backends.serial import SerialBackend
from kit.envs.backends.workers import WorkersBackend
from kit.envs.normalize import Normalizer
from kit.envs.single_env import MakeEnv, Wrapper, find_spec, gives_action_mask, make_single_env
from kit.envs.vector_env import VectorEnv, env_seeds
from kit.steps.errors import SettingError, one_of, whole_number, yes_or_no

Vectorization = Literal["sync", "async", "native", "envpool", "tensor"]
MadeFrom: TypeAlias = str | EnvSpec | MakeEnv | gym.vector.VectorEnv[Any, Any, Any] | EnvBase
"""What environments are made from: a name, a function, or a vector environment."""


def make_env(
    id: MadeFrom,
    num_envs: int = 1,
    *,
    vectorization: Vectorization = "sync",
    action_repeat: int = 1,
    max_episode_steps: int | None = None,
    seed: int = 0,
    normalize_observation: bool = False,
    normalize_reward: bool = False,
    gamma: float = 0.99,
    normalization_steps: int | None = None,
    wrappers: Sequence[Wrapper] = (),
    action_mask: bool | None = None,
    device: torch.device | str | None = None,
    restart_on_error: int = 0,
    num_workers: int | None = None,
    step_timeout: float | None = None,
    **kwargs: Any,
) -> VectorEnv:
    """Make a vector environment of ``num_envs`` environments.

    Numbers in the last ``info`` of an episode (``is_success``, ...) become
    :attr:`Episode.info <kit.envs.Episode>`. The rest of ``info`` is not used, but for an action
    mask.

    Args:
        id: Gymnasium id (or entry), or a function that makes one environment. A vector environment
            is taken as it is: one of TorchRL with its transforms, or one of Gymnasium.
        num_envs: number of environments.
        vectorization: ``sync``: in this process, one after the other; ``async``: in worker
            processes; ``native``: the environment's own vector environment; ``envpool``: EnvPool;
            ``tensor``: written in torch, on ``device``.
        action_repeat: env steps one action is held for; an episode can end inside a repeat.
        max_episode_steps: policy steps after which an episode is truncated; ``None``: as the
            environment is registered (in env steps).
        seed: of the vector environment; each environment gets its own from it.
        normalize_observation: whether floating observations get running mean 0 and variance 1.
        normalize_reward: whether rewards are divided by the running deviation of their
            discounted sum.
        gamma: the discount of that sum.
        normalization_steps: policy steps after which the statistics of observations stay as they
            are; ``None``: they never do.
        wrappers: applied to each environment, innermost first, below the action repeat.
        action_mask: whether ``info["action_mask"]`` becomes the observation ``action_mask``, the
            rest of the observation keeping its keys (``observation`` where it is no ``Dict``), as
            by :class:`~kit.envs.ActionMask`. ``None``: where there is one (``sync`` and ``async``
            with discrete actions; one more environment is made and reset to find out).
        device: where TensorDicts are; environments run on the host, but for ``tensor``.
        restart_on_error: faults to recover from (``sync`` and ``async``): an environment that
            raises, or whose process dies, is made again and its episode truncated; the next fault
            stops the run.
        num_workers: processes of ``async``; ``None``: one for each core, at most one for each
            environment.
        step_timeout: seconds that one ``step`` or ``reset`` of one environment of ``async`` may
            take; what takes longer is a fault, and its process is killed. ``None``: no limit.
        **kwargs: for the environment.

    Raises:
        SettingError: if the id is unknown, a package is missing, or settings contradict.
    """
    one_of("env.vectorization", vectorization, get_args(Vectorization))
    if action_mask is not None:
        yes_or_no("env.action_mask", action_mask)
    yes_or_no("env.normalize_observation", normalize_observation)
    yes_or_no("env.normalize_reward", normalize_reward)
    seed = None if seed is None else whole_number("seed", seed)
    if isinstance(id, str) and vectorization in ("sync", "async", "native"):
        id = find_spec(id)  # other processes may not have it registered
    arguments = dict(locals())
    arguments |= arguments.pop("kwargs")
    options = _Options(
        action_repeat=whole_number("env.action_repeat", action_repeat, at_least=1),
        max_episode_steps=_optional("env.max_episode_steps", max_episode_steps),
        wrappers=tuple(wrappers),
        action_mask=action_mask,
        restart_on_error=whole_number("env.restart_on_error", restart_on_error),
        num_workers=_optional("env.num_workers", num_workers),
        step_timeout=step_timeout,
    )
    num_envs = whole_number("env.num_envs", num_envs, at_least=1)
    if isinstance(id, (EnvBase, gym.vector.VectorEnv)):
        backend, make_again = _made_before(id, num_envs, options), None
    else:
        make_again = functools.partial(make_env, **arguments)
        if vectorization in ("sync", "async"):
            backend = _one_by_one(id, num_envs, vectorization, options, kwargs)
        else:
            backend = _together(id, num_envs, vectorization, options, seed, device, kwargs)
    normalizer = None
    if normalize_observation or normalize_reward:
        normalizer = Normalizer(
            backend.observation_leaves,
            backend.num_envs,
            observation=normalize_observation,
            reward=normalize_reward,
            gamma=gamma,
            most=None if normalization_steps is None else num_envs + normalization_steps,
        )
    return VectorEnv(
        backend, seed=seed, normalizer=normalizer, device=device, make_again=make_again
    )


def _optional(field: str, value: Any) -> int | None:
    return None if value is None else whole_number(field, value, at_least=1)


class _Options(NamedTuple):
    """Options of each environment, or of the vector environment."""

    action_repeat: int = 1
    max_episode_steps: int | None = None
    wrappers: tuple[Wrapper, ...] = ()
    action_mask: bool | None = None
    restart_on_error: int = 0
    num_workers: int | None = None
    step_timeout: float | None = None

    def allow(self, what: str, *allowed: str) -> None:
        """Refuse all options that differ from their defaults, but for ``allowed``.

        Raises:
            SettingError: if something else was asked for.
        """
        for name, value in self._asdict().items():
            default = self._field_defaults[name]
            if value != default and name not in allowed:
                works = "or an id with vectorization='sync' or 'async'"
                if name in self._fields[-2:]:
                    works = "or vectorization='async'"
                why = f"is not possible with {what}"
                raise SettingError(f"env.{name}", value, why, [default], works)


def _one_by_one(
    id: EnvSpec | MakeEnv, num_envs: int, vectorization: str, options: _Options, kwargs: Any
) -> EnvBackend:
    """Gymnasium environments made one by one."""
    name = id.id if isinstance(id, EnvSpec) else _name(id)
    if vectorization == "sync":
        # A step in this process cannot be ended from outside.
        options.allow("vectorization='sync'", *options._fields[:-2])
    repeat, limit, wrappers, wanted, restarts, workers, timeout = options

    def made(action_mask: bool) -> EnvBackend:
        one = functools.partial(make_single_env, id, repeat, limit, wrappers, action_mask, kwargs)
        if vectorization == "async":
            how: dict[str, Any] = {"restarts": restarts, "step_timeout": timeout}
            return WorkersBackend(one, num_envs, name, num_workers=workers, **how)
        return SerialBackend(one, num_envs, name, restarts=restarts)

    backend = made(bool(wanted))
    masked = (gym.spaces.Discrete, gym.spaces.MultiDiscrete)
    if wanted is None and isinstance(backend.action_space, masked):
        probe = functools.partial(make_single_env, id, wrappers=wrappers, kwargs=kwargs)
        if gives_action_mask(probe):
            backend.close()
            return made(True)
    return backend


def _name(make: MakeEnv) -> str:
    function = make.func if isinstance(make, functools.partial) else make
    return getattr(function, "__name__", type(function).__name__)


def _together(
    id: str | EnvSpec | MakeEnv,
    num_envs: int,
    vectorization: str,
    options: _Options,
    seed: int,
    device: torch.device | str | None,
    kwargs: Any,
) -> EnvBackend:
    """Vector environments of other libraries, and those written in torch."""
    repeats = ("action_repeat",) if vectorization == "tensor" else ()
    options.allow(f"vectorization={vectorization!r}", "max_episode_steps", *repeats)
    limit = options.max_episode_steps
    if vectorization == "native":
        assert isinstance(id, EnvSpec)
        return make_native(id, num_envs, limit, kwargs)
    id = id.id if isinstance(id, EnvSpec) else str(id)
    seed = env_seeds(seed, num_envs)[0]
    if vectorization == "envpool":
        from kit.envs.backends.envpool import EnvPoolBackend

        return EnvPoolBackend(id, num_envs, seed, limit, kwargs)
    from kit.envs.tensor import TensorBackend, make_tensor_env

    own = {"device": device, "max_episode_steps": limit, "seed": seed}
    repeat = options.action_repeat
    env = make_tensor_env(id, num_envs, action_repeat=repeat, **{**own, **kwargs})
    return TensorBackend(env, id)


def _made_before(
    env: EnvBase | gym.vector.VectorEnv[Any, Any, Any], num_envs: int, options: _Options
) -> EnvBackend:
    """A vector environment of TorchRL or Gymnasium."""
    options.allow(f"a {type(env).__name__} that was made before")
    if isinstance(env, EnvBase):
        from kit.envs.backends.torchrl import TorchRLBackend

        backend: EnvBackend = TorchRLBackend(env)
    else:
        name = env.spec.id if env.spec is not None else type(env).__name__
        backend = GymnasiumBackend(env, name)
    if num_envs not in (1, backend.num_envs):
        raise SettingError(
            "env.num_envs", num_envs, "is not the number of environments in it", [backend.num_envs]
        )
    return backend
