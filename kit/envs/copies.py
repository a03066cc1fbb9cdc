"""Stepping many copies of an environment, each backend writing into arrays it is given.

All backends reset a finished copy within the step that finished it: the true last observation goes
to ``next_observation``, the first one of the next episode to ``observation``, and no policy step is
spent or faked.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from kit.envs.errors import EnvironmentFault
from kit.envs.spaces import ActionConverter, Arrays, Leaf, leaves, value_at
from kit.envs.state import CannotCapture, capture, restore


class StepArrays(NamedTuple):
    """Where one step of all copies is written; every array has ``num_envs`` rows."""

    next_observation: Arrays
    """the observation that the step led to, also when it was the last of an episode."""
    observation: Arrays
    """the observation to act on next: after a reset where an episode ended."""
    reward: NDArray[np.float32]
    """rewards, ``[num_envs]``."""
    terminated: NDArray[np.bool_]
    """whether the episode ended by itself, ``[num_envs]``; zeroed before the step."""
    truncated: NDArray[np.bool_]
    """whether the episode was cut, ``[num_envs]``; zeroed before the step."""
    env_steps: NDArray[np.int32]
    """env steps made, ``[num_envs]``; ones before the step."""
    raw_reward: NDArray[np.float32] | None = None
    """rewards before normalisation, where they are normalised, ``[num_envs]``."""


class Copies(ABC):
    """Several copies of one environment, stepped together.

    Attributes:
        name: id of the environment.
        num_envs: number of copies.
        observation_leaves: arrays of an observation.
        action_leaves: arrays of an action.
        resumable: whether the state of all copies can be captured.
    """

    name: str
    num_envs: int
    observation_leaves: list[Leaf]
    action_leaves: list[Leaf]
    convert: ActionConverter
    resumable = True

    def _describe(
        self, name: str, num_envs: int, observation_space: Any, action_space: Any
    ) -> None:
        self.name, self.num_envs = name, num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.observation_leaves = leaves(observation_space, "observation", "observation_space")
        self.action_leaves = leaves(action_space, "action", "action_space")
        self.convert = ActionConverter(action_space, self.action_leaves)

    @abstractmethod
    def reset(
        self,
        observation: Arrays,
        seeds: Sequence[int] | None = None,
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Start new episodes in all copies, or in those of ``mask``, and write their observations.

        Args:
            observation: written to.
            seeds: one for each copy; ``None`` goes on with the copies' own random numbers.
            mask: copies to reset.
        """

    @abstractmethod
    def step(self, actions: Arrays, result: StepArrays) -> None:
        """Take one step in every copy.

        Args:
            actions: one row for each copy.
            result: written to.

        Raises:
            EnvironmentFault: if a copy raises or returns something impossible.
        """

    @abstractmethod
    def full_states(self) -> list[Any]:
        """Return the state of each copy as plain values.

        Raises:
            CannotCapture: if some environment cannot give its state.
        """

    @abstractmethod
    def set_full_states(self, states: list[Any]) -> None:
        """Put back what :meth:`full_states` returned."""

    @abstractmethod
    def close(self) -> None:
        """Release what the copies hold."""


class InProcess(Copies):
    """Copies in this process, stepped one after the other: cheapest for fast environments.

    Args:
        make: makes one copy; called ``num_envs`` times.
        num_envs: number of copies.
        name: id of the environment, for messages.
    """

    def __init__(
        self, make: Callable[[], gym.Env[Any, Any]], num_envs: int, name: str = "env"
    ) -> None:
        self.make = make
        self.envs = [make() for _ in range(num_envs)]
        first = self.envs[0]
        self._describe(name, num_envs, first.observation_space, first.action_space)
        self._repeats = first.has_wrapper_attr("env_steps")
        self._plain = None if self.observation_leaves[0].path else self.observation_leaves[0]

    def reset(
        self,
        observation: Arrays,
        seeds: Sequence[int] | None = None,
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Reset copies one by one."""
        for number, env in enumerate(self.envs):
            if mask is None or mask[number]:
                self._reset(number, env, observation, None if seeds is None else seeds[number])

    def _reset(
        self, number: int, env: gym.Env[Any, Any], observation: Arrays, seed: int | None
    ) -> None:
        try:
            first, _ = env.reset(seed=seed)
        except Exception as error:
            raise self._fault(number, error, "reset") from error
        self._write(number, first, observation)

    def step(self, actions: Arrays, result: StepArrays) -> None:
        """Step copies one by one."""
        reward, observation = result.reward, result.next_observation
        rows, shape = None, None
        if self._plain is not None:
            rows, shape = observation[self._plain.key], self._plain.shape
        ended: list[int] = []
        number = 0
        try:
            for number, (env, action) in enumerate(
                zip(self.envs, self.convert.rows(actions, self.num_envs))
            ):
                seen, reward[number], terminated, truncated, info = env.step(action)
                if rows is not None and getattr(seen, "shape", ()) == shape:
                    rows[number] = seen
                else:
                    self._write(number, seen, observation)
                if self._repeats:
                    result.env_steps[number] = info["env_steps"]
                if terminated or truncated:
                    result.terminated[number] = terminated
                    result.truncated[number] = truncated
                    ended.append(number)
        except Exception as error:
            raise self._fault(number, error, "step") from error
        for key, array in result.observation.items():
            array[...] = observation[key]
        for number in ended:
            self._reset(number, self.envs[number], result.observation, None)

    def _write(self, number: int, seen: Any, arrays: Arrays) -> None:
        for leaf in self.observation_leaves:
            value = value_at(seen, leaf.path)
            if np.shape(value) != leaf.shape:
                raise EnvironmentFault(
                    self.name,
                    number,
                    f"returned {leaf.key} of shape {np.shape(value)}, its space says {leaf.shape}",
                )
            arrays[leaf.key][number] = value

    def _fault(self, number: int, error: Exception, call: str) -> EnvironmentFault:
        if isinstance(error, EnvironmentFault):
            return error
        return EnvironmentFault(
            self.name, number, f"{call}() raised {type(error).__name__}: {error}"
        )

    def full_states(self) -> list[Any]:
        """Capture copy by copy."""
        return [capture(env) for env in self.envs]

    def set_full_states(self, states: list[Any]) -> None:
        """Restore copy by copy."""
        for env, state in zip(self.envs, states, strict=True):
            restore(env, state)

    def close(self) -> None:
        """Close every copy."""
        for env in self.envs:
            with contextlib.suppress(Exception):
                env.close()


class GymnasiumVector(Copies):
    """Any Gymnasium vector environment that resets in the same step, or lets itself be reset.

    ``AsyncVectorEnv`` and ``SyncVectorEnv`` are to be made with
    ``autoreset_mode=AutoresetMode.SAME_STEP``. One with ``DISABLED`` is reset by mask.

    Args:
        vector: the vector environment.
        name: id of the environment, for messages.

    Raises:
        ValueError: if the vector environment spends a step on a reset.
    """

    def __init__(self, vector: gym.vector.VectorEnv[Any, Any, Any], name: str = "env") -> None:
        self.vector = vector
        mode = vector.metadata.get("autoreset_mode")
        self._resets_by_mask = mode == gym.vector.AutoresetMode.DISABLED
        if mode not in (
            gym.vector.AutoresetMode.SAME_STEP,
            gym.vector.AutoresetMode.DISABLED,
        ):
            raise ValueError(
                f"{type(vector).__name__} has autoreset_mode={mode}, which spends a policy step on "
                "each reset; make it with autoreset_mode=AutoresetMode.SAME_STEP"
            )
        self._describe(
            name, vector.num_envs, vector.single_observation_space, vector.single_action_space
        )

    def reset(
        self,
        observation: Arrays,
        seeds: Sequence[int] | None = None,
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Reset through the vector environment."""
        options = None if mask is None or mask.all() else {"reset_mask": mask}
        seed = None if seeds is None else list(seeds)
        try:
            first, _ = self.vector.reset(seed=seed, options=options)
        except Exception as error:
            raise self._fault(error, "reset") from error
        for leaf in self.observation_leaves:
            value = value_at(first, leaf.path)
            if mask is None:
                observation[leaf.key][...] = value
            else:
                observation[leaf.key][mask] = value[mask]

    def step(self, actions: Arrays, result: StepArrays) -> None:
        """Step through the vector environment; put each last observation in its place."""
        try:
            seen, reward, terminated, truncated, info = self.vector.step(self.convert(actions))
        except Exception as error:
            raise self._fault(error, "step") from error
        result.reward[...] = reward
        result.terminated[...] = terminated
        result.truncated[...] = truncated
        if "env_steps" in info:
            result.env_steps[...] = info["env_steps"]
        ended = terminated | truncated
        any_ended = ended.any()
        for leaf in self.observation_leaves:
            value = value_at(seen, leaf.path)
            result.observation[leaf.key][...] = value
            result.next_observation[leaf.key][...] = value
        if not any_ended:
            return
        if self._resets_by_mask:
            self.reset(result.observation, mask=ended)
            return
        if "final_info" in info and "env_steps" in info["final_info"]:
            result.env_steps[ended] = info["final_info"]["env_steps"][ended]
        for number in np.flatnonzero(ended):
            last = info["final_obs"][number]
            for leaf in self.observation_leaves:
                result.next_observation[leaf.key][number] = value_at(last, leaf.path)

    def _fault(self, error: Exception, call: str) -> EnvironmentFault:
        return EnvironmentFault(self.name, None, f"{call}() raised {type(error).__name__}: {error}")

    def full_states(self) -> list[Any]:
        """Ask every copy, in its process."""
        try:
            return list(self.vector.get_attr("full_state"))
        except Exception as error:
            raise CannotCapture(f"{type(self.vector).__name__}: {error}") from error

    def set_full_states(self, states: list[Any]) -> None:
        """Tell every copy, in its process."""
        self.vector.set_attr("full_state", states)

    def close(self) -> None:
        """Close the vector environment and its processes."""
        with contextlib.suppress(Exception):
            self.vector.close()
