"""Single environments and their wrappers. Importing this module does not import torch."""

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
    stacked_frames: int = 1,
) -> gym.Env[Any, Any]:
    """Create one environment and apply wrappers, action mask, action repeat and time limit.

    Args:
        id: Gymnasium spec, or a function that creates the environment.
        action_repeat: number of env steps for which each action is repeated.
        max_episode_steps: time limit in policy steps; ``None``: the registered limit in env steps.
        wrappers: wrappers to apply, innermost first.
        action_mask: whether to move the action mask from ``info`` into the observation.
        kwargs: keyword arguments for the environment.
        stacked_frames: number of observations that form one observation, unless the environment
            already returns stacks of this size.

    Raises:
        EnvError: if creating the environment raises an exception.
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
    if (
        stacked_frames > 1
        and not action_mask
        and not _stacks(env.observation_space, stacked_frames)
    ):
        env = gym.wrappers.FrameStackObservation(env, stacked_frames)
    if max_episode_steps is not None:
        _check_time_limit(env, max_episode_steps, action_repeat)
        env = gym.wrappers.TimeLimit(env, max_episode_steps)
    return env


def _stacks(space: gym.Space[Any], frames: int) -> bool:
    """Return whether all observations in a space are stacks of this number of frames."""
    if isinstance(space, gym.spaces.Dict):
        return all(_stacks(entry, frames) for entry in space.values())
    shape = space.shape
    return shape is not None and len(shape) > 1 and shape[0] == frames


def _check_time_limit(env: gym.Env[Any, Any], limit: int, action_repeat: int) -> None:
    """Raise SettingError if an inner ``TimeLimit`` ends episodes before ``limit`` policy steps."""
    limits = (layer for layer in layers(env) if isinstance(layer, gym.wrappers.TimeLimit))
    for env_steps in (int(layer._max_episode_steps) for layer in limits):
        if env_steps < limit * action_repeat:
            reason = f"The environment's own TimeLimit ends episodes after {env_steps} env steps"
            hint = "Create the environment with max_episode_steps=-1, or pass its registered id"
            raise SettingError("env.max_episode_steps", limit, reason, hint)


class ActionRepeat(gym.Wrapper[Any, Any, Any, Any]):  # type: ignore[misc, unused-ignore]
    """Repeats each action for several env steps and reports the number of steps performed.

    Rewards are summed. The repeat stops early when the episode ends, or when the action mask in
    the observation no longer allows the action, so that the policy can choose a new action.

    Args:
        env: environment to wrap.
        repeat: number of env steps for which each action is repeated, at least 1.
    """

    def __init__(self, env: gym.Env[Any, Any], repeat: int) -> None:
        super().__init__(env)
        self.repeat = whole_number("action_repeat", repeat, at_least=1)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Perform up to ``repeat`` env steps and store their number in ``info["env_steps"]``."""
        total, env_steps = 0.0, 0
        while env_steps < self.repeat:
            env_steps += 1
            # The environment may modify its action, so all but the last step get a copy.
            repeated = action if env_steps == self.repeat else copy.deepcopy(action)
            observation, reward, terminated, truncated, info = self.env.step(repeated)
            total += float(reward)
            if terminated or truncated or not self._is_allowed(action, observation):
                break
        info["env_steps"] = env_steps
        return observation, total, terminated, truncated, info

    def _is_allowed(self, action: Any, observation: Any) -> bool:
        mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
        space = self.action_space
        if mask is None or not isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
            return True
        chosen = np.ravel(action - space.start)
        if isinstance(space, gym.spaces.MultiDiscrete):  # masks are concatenated
            chosen = chosen + np.cumsum([0, *np.ravel(space.nvec)[:-1]])
        return bool(np.asarray(mask)[chosen].all())


class ActionMask(gym.Wrapper[Any, Any, Any, Any]):  # type: ignore[misc, unused-ignore]
    """Moves ``info["action_mask"]`` into the observation, under the key ``action_mask``.

    A mask is true (1) for each allowed action. Its shape is ``[n]`` for Discrete actions and
    ``[sum(nvec)]`` for MultiDiscrete actions (concatenated masks). Entries of a Dict observation
    keep their keys; any other observation is stored under ``observation``. If the mask is missing
    in the last step of an episode, all actions are allowed.

    Args:
        env: environment with Discrete or MultiDiscrete actions.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        space: Any = env.action_space
        self.size = int(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec.sum())
        # Copied because these spaces are seeded, and environments may share class-level spaces.
        seen = copy.deepcopy(env.observation_space)
        entries = seen.spaces if isinstance(seen, gym.spaces.Dict) else {"observation": seen}
        mask = gym.spaces.MultiBinary(self.size)
        self.observation_space = gym.spaces.Dict({**entries, "action_mask": mask})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the environment and return its observation with the action mask."""
        seen, info = self.env.reset(seed=seed, options=options)
        return with_mask(seen, info["action_mask"], self.size), info

    def step(self, action: Any) -> tuple[dict[str, Any], Any, bool, bool, dict[str, Any]]:
        """Perform one env step and return its observation with the action mask."""
        seen, reward, terminated, truncated, info = self.env.step(action)
        mask = info.get("action_mask")
        if mask is None and not (terminated or truncated):
            raise KeyError("info has no action_mask")
        return with_mask(seen, mask, self.size), reward, terminated, truncated, info


def with_mask(seen: Any, mask: Any, size: int) -> dict[str, Any]:
    """Add a mask with ``size`` entries to an observation, as :class:`ActionMask` does.

    ``mask`` is one array or a list with an array per component; ``None`` allows all actions.
    """
    if mask is None:
        mask = np.ones(size, np.int8)
    elif isinstance(mask, (tuple, list)):
        mask = np.concatenate([np.ravel(part) for part in mask])
    entries = seen if isinstance(seen, Mapping) else {"observation": seen}
    return {**entries, "action_mask": np.asarray(mask, np.int8).reshape(size)}


def gives_action_mask(make: Callable[[], gym.Env[Any, Any]]) -> bool:
    """Reset a temporary environment and return whether its ``info`` has an action mask."""
    with contextlib.suppress(*FAULTS):
        env = make()
        try:
            return "action_mask" in env.reset(seed=0)[1]
        finally:
            close_quietly(env)
    return False


def close_quietly(env: gym.Env[Any, Any]) -> None:
    """Close an environment and ignore errors raised while closing."""
    with contextlib.suppress(*FAULTS):
        env.close()


def seed_spaces(env: gym.Env[Any, Any], seed: int) -> None:
    """Seed the spaces of an environment and its wrappers, because ``reset`` does not.

    Each space gets a different seed, derived from ``seed``.
    """
    layer: Any = env
    spaces: list[gym.Space[Any]] = []
    while layer is not None:
        attributes = getattr(layer, "__dict__", {})
        spaces += [value for value in attributes.values() if isinstance(value, gym.Space)]
        layer = attributes.get("env")
    for space, sequence in zip(spaces, np.random.SeedSequence(seed).spawn(len(spaces))):
        space.seed(int(sequence.generate_state(1)[0]))


def find_spec(id: str) -> EnvSpec:
    """Return Gymnasium's spec for ``id``. For ``module:id``, import ``module`` first.

    Raises:
        SettingError: if no such id is registered; the message suggests similar ids.
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
        similar = difflib.get_close_matches(name, list(gym.registry), n=3, cutoff=0.4)
        reason = f"Gymnasium cannot create this environment: {reason}"
        raise SettingError("env.id", id, reason, similar) from None


def _make(spec: EnvSpec, limit: int | None, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    with errors_of_making(spec.id), quiet_mujoco(spec):
        return gym.make(spec, max_episode_steps=limit, disable_env_checker=True, **kwargs)


@contextlib.contextmanager
def errors_of_making(name: str) -> Iterator[None]:
    """Convert exceptions raised while creating an environment to :class:`EnvError`.

    Raises:
        EnvError: for any exception except SettingError.
    """
    try:
        yield
    except SettingError:
        raise
    except FAULTS as error:
        raise fault_of(name, None, error, "creating it") from error


def _call(make: MakeEnv | Wrapper, kwargs: dict[str, Any], *inner: Any) -> Any:
    with errors_of_making(getattr(make, "__name__", type(make).__name__)):
        return make(*inner, **kwargs)


@contextlib.contextmanager
def quiet_mujoco(spec: EnvSpec) -> Iterator[None]:
    """Convert MuJoCo's warnings to Python warnings.

    Otherwise, MuJoCo prints its warnings for each environment and appends them to a file in the
    working folder. Python shows each warning once. Warnings about deprecated attributes in
    Gymnasium's own models are dropped.
    """
    if "mujoco" not in str(spec.entry_point) or not importlib.util.find_spec("mujoco"):
        yield  # if MuJoCo is missing, gym.make reports it
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
