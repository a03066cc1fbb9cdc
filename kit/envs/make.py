"""Create vector environments from ids, factory functions or existing environments."""

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
"""Accepted environment sources: an id, a spec, a factory function or a vector environment."""


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
    stacked_frames: int = 1,
    action_mask: bool | None = None,
    device: torch.device | str | None = None,
    restart_on_error: int = 0,
    num_workers: int | None = None,
    step_timeout: float | None = None,
    **kwargs: Any,
) -> VectorEnv:
    """Create a vector environment with ``num_envs`` environments.

    Numeric entries of an episode's last ``info`` (``is_success``, ...) are stored in
    :attr:`Episode.info <kit.envs.Episode>`. Other ``info`` entries are ignored, except for an
    action mask.

    Args:
        id: Gymnasium id or spec, or a function that creates one environment. An existing vector
            environment of TorchRL or Gymnasium is used unchanged, with all transforms or wrappers.
        num_envs: number of environments.
        vectorization: how environments are stepped. ``sync``: sequentially in this process;
            ``async``: in worker processes; ``native``: by the vector environment that Gymnasium
            registers for the id; ``envpool``: by EnvPool; ``tensor``: in torch, on ``device``.
        action_repeat: number of env steps per action. The repeat stops when the episode ends.
        max_episode_steps: policy steps after which an episode is truncated; ``None``: the
            registered limit (in env steps).
        seed: base seed from which each environment's seed is derived.
        normalize_observation: whether to normalise floating-point observations to running mean 0
            and variance 1.
        normalize_reward: whether to divide rewards by the running standard deviation of the
            discounted return.
        gamma: discount factor of the return that ``normalize_reward`` uses.
        normalization_steps: policy steps after which the observation statistics are frozen;
            ``None``: they are always updated.
        wrappers: wrappers to apply to each environment before action repeat, innermost first.
        stacked_frames: number of observations of consecutive policy steps that form one observation
            (``sync`` and ``async`` without action mask). Environments whose observations are
            already stacks of this size are unchanged.
        action_mask: whether to move ``info["action_mask"]`` into the observation, as
            :class:`~kit.envs.ActionMask` does. ``None``: move it if the environment has a mask
            (``sync`` and ``async`` with discrete actions; creates one extra environment to check).
        device: device of the TensorDicts. ``tensor`` environments also run on this device.
        restart_on_error: number of failures to recover from (``sync`` and ``async``). After a
            failure the environment is rebuilt and its episode truncated; further failures raise.
        num_workers: number of ``async`` processes; ``None``: one per core, at most ``num_envs``.
        step_timeout: timeout in seconds for one ``step`` or ``reset`` of an ``async`` environment.
            On timeout, the process is killed and a failure is reported. ``None``: no limit.
        **kwargs: keyword arguments for the environment.

    Raises:
        SettingError: if the id is unknown, a package is missing, or settings contradict each other.
    """
    one_of("env.vectorization", vectorization, get_args(Vectorization))
    if action_mask is not None:
        yes_or_no("env.action_mask", action_mask)
    yes_or_no("env.normalize_observation", normalize_observation)
    yes_or_no("env.normalize_reward", normalize_reward)
    seed = None if seed is None else whole_number("seed", seed)
    if isinstance(id, str) and vectorization in ("sync", "async", "native"):
        id = find_spec(id)  # the id may not be registered in worker processes
    arguments = dict(locals())
    arguments |= arguments.pop("kwargs")
    options = _Options(
        action_repeat=whole_number("env.action_repeat", action_repeat, at_least=1),
        max_episode_steps=_optional("env.max_episode_steps", max_episode_steps),
        wrappers=tuple(wrappers),
        stacked_frames=whole_number("stacked_frames", stacked_frames, at_least=1),
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
    """Per-environment options of :func:`make_env` that not every vectorization supports."""

    action_repeat: int = 1
    max_episode_steps: int | None = None
    wrappers: tuple[Wrapper, ...] = ()
    stacked_frames: int = 1
    action_mask: bool | None = None
    restart_on_error: int = 0
    num_workers: int | None = None
    step_timeout: float | None = None

    def allow(self, source: str, *allowed: str) -> None:
        """Check that only ``allowed`` options differ from their defaults.

        Raises:
            SettingError: if ``source`` does not support an option that is set.
        """
        for name, value in self._asdict().items():
            default = self._field_defaults[name]
            if value != default and name not in allowed:
                hint = "The option requires an id with vectorization='sync' or 'async'"
                if name in self._fields[-2:]:
                    hint = "The option requires vectorization='async'"
                reason = f"The option is not supported with {source}"
                raise SettingError(f"env.{name}", value, reason, [default], hint)


def _one_by_one(
    id: EnvSpec | MakeEnv, num_envs: int, vectorization: str, options: _Options, kwargs: Any
) -> EnvBackend:
    """Return a backend that creates and steps single environments."""
    name = id.id if isinstance(id, EnvSpec) else _name(id)
    if vectorization == "sync":
        # A step that runs in this process cannot be interrupted by a timeout.
        options.allow("vectorization='sync'", *options._fields[:-2])
    repeat, limit, wrappers, frames, has_mask, restarts, workers, timeout = options

    def make_backend(action_mask: bool) -> EnvBackend:
        arguments = id, repeat, limit, wrappers, action_mask, kwargs, frames
        make = functools.partial(make_single_env, *arguments)
        if vectorization == "async":
            how: dict[str, Any] = {"restarts": restarts, "step_timeout": timeout}
            return WorkersBackend(make, num_envs, name, num_workers=workers, **how)
        return SerialBackend(make, num_envs, name, restarts=restarts)

    backend = make_backend(bool(has_mask))
    maskable = (gym.spaces.Discrete, gym.spaces.MultiDiscrete)
    if has_mask is None and isinstance(backend.action_space, maskable):
        probe = functools.partial(make_single_env, id, wrappers=wrappers, kwargs=kwargs)
        if gives_action_mask(probe):
            backend.close()
            return make_backend(True)
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
    """Return a backend for native Gymnasium vector, EnvPool or torch environments."""
    repeats = ("action_repeat",) if vectorization == "tensor" else ()
    allowed = ("max_episode_steps", "stacked_frames", *repeats)
    options.allow(f"vectorization={vectorization!r}", *allowed)
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

    defaults = {"device": device, "max_episode_steps": limit, "seed": seed}
    repeat = options.action_repeat
    env = make_tensor_env(id, num_envs, action_repeat=repeat, **{**defaults, **kwargs})
    return TensorBackend(env, id)


def _made_before(
    env: EnvBase | gym.vector.VectorEnv[Any, Any, Any], num_envs: int, options: _Options
) -> EnvBackend:
    """Return a backend for an existing vector environment of TorchRL or Gymnasium."""
    options.allow(f"an existing {type(env).__name__}", "stacked_frames")
    if isinstance(env, EnvBase):
        from kit.envs.backends.torchrl import TorchRLBackend

        backend: EnvBackend = TorchRLBackend(env)
    else:
        name = env.spec.id if env.spec is not None else type(env).__name__
        backend = GymnasiumBackend(env, name)
    if num_envs not in (1, backend.num_envs):
        reason = f"The vector environment has {backend.num_envs} environments"
        raise SettingError("env.num_envs", num_envs, reason, [backend.num_envs])
    return backend
