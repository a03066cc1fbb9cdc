"""Backends for Gymnasium's vector environments."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from kit.envs.backends.base import EnvBackend, Mask, StepArrays, infos_of_arrays
from kit.envs.errors import FAULTS, EnvError, fault_of
from kit.envs.plain_values import StateCaptureError
from kit.envs.single_env import errors_of_making, seed_spaces
from kit.envs.spaces import Arrays, some
from kit.envs.state import capture, held, learning_layer, restore
from kit.steps.errors import SettingError

AutoresetMode = gym.vector.AutoresetMode


def resets_by_mask(vector: gym.vector.VectorEnv[Any, Any, Any]) -> bool:
    """Return whether the autoreset mode is DISABLED, in which case the backend resets by mask.

    Raises:
        SettingError: if the mode is NEXT_STEP or missing from the metadata.
    """
    mode, name = vector.metadata.get("autoreset_mode"), type(vector).__name__
    if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        reason = f"{name} would spend a policy step on each reset, or declares no autoreset mode"
        modes = ["AutoresetMode.SAME_STEP", "AutoresetMode.DISABLED"]
        raise SettingError("autoreset_mode", mode, reason, modes)
    return bool(mode == AutoresetMode.DISABLED)


class GymnasiumBackend(EnvBackend):
    """A Gymnasium vector environment with autoreset mode SAME_STEP or DISABLED.

    Create ``AsyncVectorEnv`` and ``SyncVectorEnv`` with
    ``autoreset_mode=AutoresetMode.SAME_STEP``. With ``DISABLED``, the backend resets by mask.
    Spaces are seeded together with the environments, except in processes of ``AsyncVectorEnv``.

    Args:
        vector: the vector environment.
        name: id of the environment, for messages.

    Raises:
        SettingError: if the vector environment has another autoreset mode.
    """

    def __init__(self, vector: gym.vector.VectorEnv[Any, Any, Any], name: str = "env") -> None:
        self.vector = vector
        self._resets_by_mask = resets_by_mask(vector)
        self._describe(
            name, vector.num_envs, vector.single_observation_space, vector.single_action_space
        )
        in_this_process = isinstance(vector, gym.vector.SyncVectorEnv)
        self._since_made = [held(env) for env in vector.envs] if in_this_process else []

    def reset(
        self, observation: Arrays, seeds: Sequence[int] | None = None, mask: Mask | None = None
    ) -> None:
        """Reset the environments in ``mask`` (``None``: all) through the vector environment."""
        options = None if mask is None or mask.all() else {"reset_mask": mask}
        seed = None if seeds is None else list(seeds)
        if seed is not None:  # seed the vector first, because its envs may share spaces
            seed_spaces(self.vector, seed[0])
            for env, env_seed in zip(getattr(self.vector.unwrapped, "envs", ()), seed):
                seed_spaces(env, env_seed)
        try:
            first, _ = self.vector.reset(seed=seed, options=options)
        except FAULTS as error:
            raise fault_of(self.name, None, error, "reset()") from error
        rows: Any = ... if mask is None else mask
        for leaf in self.observation_leaves:
            observation[leaf.key][rows] = leaf.of(first)[rows]

    def step(self, actions: Arrays, result: StepArrays, active: Mask | None = None) -> Mask | None:
        """Step the vector environment and restore the last observations of ended episodes."""
        assert active is None
        converted = self.convert(actions)
        try:
            seen, reward, terminated, truncated, info = self.vector.step(converted)
        except FAULTS as error:
            raise fault_of(self.name, None, error, "step()") from error
        result.reward[...] = reward
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            flags = np.asarray(value)
            if flags.dtype != np.bool_ and not np.isin(flags, (0, 1)).all():
                raise EnvError(self.name, None, f"returned {flags} as {name}")
            getattr(result, name)[...] = flags
        if "env_steps" in info:
            result.env_steps[...] = info["env_steps"]
        for leaf in self.observation_leaves:
            value = leaf.of(seen)
            if (wrong := leaf.misfit(value)) is not None:
                raise EnvError(self.name, None, f"returned {wrong}")
            result.observation[leaf.key][...] = value
            result.next_observation[leaf.key][...] = value
        ended, self.infos = result.terminated | result.truncated, {}
        if some(ended):
            self.infos = infos_of_arrays(info.get("final_info", info), ended)
            if self._resets_by_mask:
                self.reset(result.observation, mask=ended)
            else:
                self._put_last(ended, info, result)
        return None

    def _put_last(self, ended: Mask, info: dict[str, Any], result: StepArrays) -> None:
        """Write the last observations of ended episodes to ``next_observation``."""
        if "final_info" in info and "env_steps" in info["final_info"]:
            result.env_steps[ended] = info["final_info"]["env_steps"][ended]
        core = self.vector.unwrapped
        first = core._env_obs if isinstance(core, gym.vector.SyncVectorEnv) else None
        for number in np.flatnonzero(ended):
            last = info["final_obs"][number]
            values = [leaf.of(last) for leaf in self.observation_leaves]
            if first is not None and all(
                _are_one_array(value, leaf.of(first[number]))
                for leaf, value in zip(self.observation_leaves, values)
            ):
                reason = "The environment overwrites an episode's last observation during the reset"
                raise SettingError("autoreset_mode", "SAME_STEP", reason, ["DISABLED"])
            for leaf, value in zip(self.observation_leaves, values):
                result.next_observation[leaf.key][number] = value

    @property
    def learns(self) -> str | None:
        """Name of an active normalisation wrapper around environments in this process, if any."""
        core = self.vector.unwrapped
        return learning_layer(core.envs[0]) if isinstance(core, gym.vector.SyncVectorEnv) else None

    def full_states(self) -> list[Any]:
        """Return the state of each environment; only ``SyncVectorEnv`` is supported."""
        if not isinstance(self.vector, gym.vector.SyncVectorEnv):
            name = type(self.vector).__name__
            raise StateCaptureError(f"{name} cannot capture the state of its environments")
        return [capture(*pair) for pair in zip(self.vector.envs, self._since_made)]

    def set_full_states(self, states: list[Any]) -> None:
        """Restore states returned by :meth:`full_states`."""
        for parts in zip(self.vector.envs, states, self._since_made, strict=True):
            restore(*parts)

    def close(self) -> None:
        """Close the vector environment and its processes."""
        with contextlib.suppress(Exception):
            self.vector.close()


def _are_one_array(one: Any, other: Any) -> bool:
    both = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
    return both and np.shares_memory(one, other)


class NativeBackend(GymnasiumBackend):
    """A vector environment registered with Gymnasium. Its state is captured as a whole."""

    def full_states(self) -> list[Any]:
        """Return a list with the state of the whole vector environment."""
        return [capture(self.vector.unwrapped)]

    def set_full_states(self, states: list[Any]) -> None:
        """Restore the state of the whole vector environment."""
        restore(self.vector.unwrapped, states[0])


class _SameStepCartPole(gym.vector.VectorWrapper):  # type: ignore[misc, unused-ignore]
    """Gymnasium's vector CartPole with autoreset mode DISABLED instead of NEXT_STEP."""

    def __init__(self, env: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.DISABLED}

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Reset the environments in ``options["reset_mask"]`` (by default all)."""
        core = self.env.unwrapped
        mask = (options or {}).get("reset_mask")
        if mask is None:
            # The environments share a generator, so only the first seed is used.
            self.env.reset(seed=seed[0] if isinstance(seed, list) else seed)
        else:
            core.state[:, mask] = core.np_random.uniform(core.low, core.high, (4, int(mask.sum())))
            core.steps[mask] = 0
            core.prev_done[mask] = False
        return core.state.T.astype(np.float32), {}


def make_native(
    spec: EnvSpec, num_envs: int, max_episode_steps: int | None, kwargs: Mapping[str, Any]
) -> NativeBackend:
    """Create the vector environment that Gymnasium registers for an id.

    Args:
        spec: Gymnasium's spec.
        num_envs: number of environments.
        max_episode_steps: policy steps after which an episode is truncated; ``None``: the
            registered limit.
        kwargs: keyword arguments for the environment.

    Raises:
        SettingError: if the vector environment spends a policy step on each reset.
        EnvError: if no vector environment is registered, or its creation raises.
    """
    limit = spec.max_episode_steps if max_episode_steps is None else max_episode_steps
    limited = {} if limit is None else {"max_episode_steps": limit}
    with errors_of_making(spec.id):
        vector = gym.make_vec(spec, num_envs, "vector_entry_point", **{**kwargs, **limited})
    if type(vector.unwrapped).__name__ == "CartPoleVectorEnv":
        vector = _SameStepCartPole(vector)
    return NativeBackend(vector, spec.id)
