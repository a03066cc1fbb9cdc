"""One environment and its wrappers. Imports no torch, so that worker processes stay small."""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from kit.envs.errors import FAULTS, fault_of
from kit.envs.state import layers
from kit.lazy import module_and_name
from kit.steps.errors import SettingError, whole_number

MakeEnv = Callable[..., gym.Env[Any, Any]]
Wrapper = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]


def make_single_env(
    id: EnvSpec | MakeEnv,
    action_repeat: int = 1,
    max_episode_steps: int | None = None,
    wrappers: Sequence[Wrapper] = (),
    action_mask: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> gym.Env[Any, Any]:
    """Make one environment, ``wrappers`` around it, action mask, action repeat, time limit.

    Args:
        id: Gymnasium's entry, or a function that makes it.
        action_repeat: env steps one action is held for.
        max_episode_steps: limit in policy steps; ``None``: as registered (in env steps).
        wrappers: innermost first.
        action_mask: whether the action mask in ``info`` becomes an observation.
        kwargs: of the environment.

    Raises:
        EnvError: if making it raises.
    """
    if isinstance(id, EnvSpec):
        env = _make(id, -1 if max_episode_steps is not None else None, kwargs or {})
    else:
        env = _call(id, kwargs or {})
    for wrapper in wrappers:
        env = _call(wrapper, {}, env)
    if action_mask:
        env = ActionMask(env)
    if action_repeat > 1:
        env = ActionRepeat(env, action_repeat)
    if max_episode_steps is not None:
        _refuse_shorter(env, max_episode_steps, action_repeat)
        env = gym.wrappers.TimeLimit(env, max_episode_steps)
    return env


def _refuse_shorter(env: gym.Env[Any, Any], limit: int, action_repeat: int) -> None:
    """Refuse a limit in policy steps that one inside of a function or a wrapper comes before."""
    limits = (one for one in layers(env) if isinstance(one, gym.wrappers.TimeLimit))
    for own in (int(one._max_episode_steps) for one in limits):
        if own < limit * action_repeat:
            why = f"never comes: the environment as it is given ends after {own} steps"
            works = "make it with max_episode_steps=-1, or give its registered name"
            raise SettingError("env.max_episode_steps", limit, why, works)


class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):  # type: ignore[misc, unused-ignore]
    """Holds each action for several env steps, and reports how many were really made.

    Rewards are summed. An episode that ends inside a repeat ends it: the remaining env steps are
    not made. Nor are those in which the action mask of the observation, if there is one, forbids
    the action: the policy chooses another.

    Args:
        env: the environment.
        repeat: env steps one action is held for, at least 1.
    """

    def __init__(self, env: gym.Env[Any, Any], repeat: int) -> None:
        super().__init__(env)
        self.repeat = whole_number("action_repeat", repeat, at_least=1)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make up to ``repeat`` env steps; ``info["env_steps"]`` says how many."""
        total, made = 0.0, 0
        while made < self.repeat:
            made += 1
            # A copy, as the environment may change what it is given.
            held = action if made == self.repeat else copy.deepcopy(action)
            observation, reward, terminated, truncated, info = self.env.step(held)
            total += float(reward)
            if terminated or truncated or not self._is_allowed(action, observation):
                break
        info["env_steps"] = made
        return observation, total, terminated, truncated, info

    def _is_allowed(self, action: Any, observation: Any) -> bool:
        mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
        space = self.action_space
        if mask is None or not isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
            return True
        chosen = np.ravel(action - space.start)
        if isinstance(space, gym.spaces.MultiDiscrete):  # masks one after the other
            chosen = chosen + np.cumsum([0, *np.ravel(space.nvec)[:-1]])
        return bool(np.asarray(mask)[chosen].all())


class ActionMask(gym.Wrapper[Any, Any, Any, Any]):  # type: ignore[misc, unused-ignore]
    """Moves ``info["action_mask"]`` into the observation, under the key ``action_mask``.

    A mask is true (1) where an action may be chosen: ``[n]`` for Discrete actions; for
    MultiDiscrete ones the masks of all choices one after the other, ``[sum(nvec)]``. Entries of a
    Dict observation keep their keys, another observation has the key ``observation``. In the last
    step of an episode the mask may be missing; all actions are then allowed.

    Args:
        env: an environment with Discrete or MultiDiscrete actions.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        space: Any = env.action_space
        self.size = int(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec.sum())
        # Other objects, as these are seeded: those of the environment may be its class's.
        seen = copy.deepcopy(env.observation_space)
        entries = seen.spaces if isinstance(seen, gym.spaces.Dict) else {"observation": seen}
        mask = gym.spaces.MultiBinary(self.size)
        self.observation_space = gym.spaces.Dict({**entries, "action_mask": mask})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode."""
        seen, info = self.env.reset(seed=seed, options=options)
        return with_mask(seen, info["action_mask"], self.size), info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Make one env step."""
        seen, reward, terminated, truncated, info = self.env.step(action)
        mask = info.get("action_mask")
        if mask is None and not (terminated or truncated):
            raise KeyError("no action_mask in info")
        return with_mask(seen, mask, self.size), reward, terminated, truncated, info


def with_mask(seen: Any, mask: Any, size: int) -> dict[str, Any]:
    """Return an observation with a mask of ``size`` entries, as :class:`ActionMask` does.

    The mask is of all choices or a list with one of each; ``None`` allows all of them.
    """
    if mask is None:
        mask = np.ones(size, np.int8)
    elif isinstance(mask, (tuple, list)):
        mask = np.concatenate([np.ravel(part) for part in mask])
    entries = seen if isinstance(seen, Mapping) else {"observation": seen}
    return {**entries, "action_mask": np.asarray(mask, np.int8).reshape(size)}


def gives_action_mask(make: Callable[[], gym.Env[Any, Any]]) -> bool:
    """Whether ``info`` has an action mask; asks an environment of its own, which it closes."""
    with contextlib.suppress(*FAULTS):
        env = make()
        try:
            return "action_mask" in env.reset(seed=0)[1]
        finally:
            close_quietly(env)
    return False


def close_quietly(env: gym.Env[Any, Any]) -> None:
    """Close an environment, which may raise: nothing is lost by then."""
    with contextlib.suppress(*FAULTS):
        env.close()


def seed_spaces(env: gym.Env[Any, Any], seed: int) -> None:
    """Seed the spaces of an environment and its wrappers, from which ``reset`` may draw, too.

    Each gets numbers of its own, other than those that ``reset(seed=seed)`` gives to the rest.
    """
    layer: Any = env
    spaces: list[gym.Space[Any]] = []
    while layer is not None:
        attributes = getattr(layer, "__dict__", {})
        spaces += [value for value in attributes.values() if isinstance(value, gym.Space)]
        layer = attributes.get("env")
    for space, own in zip(spaces, np.random.SeedSequence(seed).spawn(len(spaces))):
        space.seed(int(own.generate_state(1)[0]))


def find_spec(id: str) -> EnvSpec:
    """Return Gymnasium's entry for ``id``; ``module:id`` imports a module that registers it.

    Raises:
        SettingError: if there is none; the message names the ids most like it.
    """
    module, name = module_and_name(id)
    try:
        if id.startswith("ALE/"):
            gym.register_envs(importlib.import_module("ale_py"))
        if module:
            importlib.import_module(module)
        return gym.spec(name)
    except (ImportError, gym.error.Error) as error:
        reason = str(error).rstrip(".")
        near = difflib.get_close_matches(name, list(gym.registry), n=3, cutoff=0.4)
        raise SettingError("env.id", id, f"cannot be made: {reason}", near) from None


def _make(spec: EnvSpec, limit: int | None, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    with errors_of_making(spec.id), quiet_mujoco(spec):
        return gym.make(spec, max_episode_steps=limit, disable_env_checker=True, **kwargs)


@contextlib.contextmanager
def errors_of_making(name: str) -> Iterator[None]:
    """Name the environment in errors of making it.

    Raises:
        EnvError: instead of any other error.
    """
    try:
        yield
    except SettingError:  # it is one line
        raise
    except FAULTS as error:
        raise fault_of(name, None, error, "making it") from error


def _call(make: MakeEnv | Wrapper, kwargs: dict[str, Any], *inner: Any) -> Any:
    with errors_of_making(getattr(make, "__name__", type(make).__name__)):
        return make(*inner, **kwargs)


@contextlib.contextmanager
def quiet_mujoco(spec: EnvSpec) -> Iterator[None]:
    """Keep MuJoCo's own output out of the terminal and out of the working folder.

    MuJoCo prints its warnings for each environment and appends them to a file in the working
    folder. Warnings of the deprecated attribute in Gymnasium's models are dropped. Others become
    Python warnings, which are shown once.
    """
    if "mujoco" not in str(spec.entry_point) or not importlib.util.find_spec("mujoco"):
        yield  # making the environment says that MuJoCo is missing
        return
    import mujoco

    texts: list[str] = []
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(texts.append)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
        for text in texts:
            if "deprecated" not in text:
                warnings.warn(f"MuJoCo, {spec.id}: {text}", stacklevel=2)
