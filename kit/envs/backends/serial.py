"""Backend that steps environments sequentially in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from kit.envs.backends.base import EnvBackend, Mask, StepArrays, derived_seed, hold, info_numbers
from kit.envs.errors import FAULTS, EnvError, fault_of
from kit.envs.single_env import ActionRepeat, close_quietly, seed_spaces
from kit.envs.spaces import Arrays
from kit.envs.state import Shared, capture, held, layers, learning_layer, restore
from kit.steps.errors import SettingError

MakeCopy = Callable[[], gym.Env[Any, Any]]


class SerialBackend(EnvBackend):
    """Backend that steps environments sequentially in this process; fastest for cheap steps.

    Args:
        make: function that creates one environment; called ``num_envs`` times.
        num_envs: number of environments.
        name: id of the environment, for messages.
        restarts: maximum number of rebuilds after failures; further failures raise.
        first: index of the first environment, if other processes step the preceding ones.

    Attributes:
        clock: shared array in which the index of the current environment and the start time of its
            step are recorded for the parent process; ``None``: not recorded.
    """

    clock: NDArray[np.float64] | None = None

    steps_some = True

    def __init__(
        self, make: MakeCopy, num_envs: int, name: str = "env", *, restarts: int = 0, first: int = 0
    ) -> None:
        self.make, self.restarts, self.first = make, restarts, first
        self.envs = [make() for _ in range(num_envs)]
        if len({id(env.unwrapped) for env in self.envs}) < num_envs:
            reason = "The function must create a new environment on each call"
            raise SettingError("env.id", name, reason, "For example, use lambda: gym.make(...)")
        self._shared = Shared(self.envs[0])
        self._since_made = [held(env) for env in self.envs]
        one = self.envs[0]
        self._describe(name, num_envs, one.observation_space, one.action_space)
        self._repeats = any(isinstance(layer, ActionRepeat) for layer in layers(one))
        leaf = self.observation_leaves[0]
        is_float_array = not leaf.path and leaf.dtype.kind == "f"
        # Float arrays of this shape are written unchecked; "" (unequal to any shape) disables this.
        self._key, self._shape = leaf.key, leaf.shape if is_float_array else ""
        self._numbers = range(num_envs)
        self._seeds = list(range(num_envs))
        self._rebuilt = [0] * num_envs  # number of rebuilds per environment
        self._next_seeds: dict[int, int] = {}

    def reset(
        self, observation: Arrays, seeds: Sequence[int] | None = None, mask: Mask | None = None
    ) -> None:
        """Reset the environments in ``mask`` (``None``: all), one after another."""
        if seeds is not None:
            self._seeds = [int(seed) for seed in seeds]
        for number in range(self.num_envs):
            if mask is None or mask[number]:
                self._reset(number, observation, None if seeds is None else seeds[number])
        self.present = observation

    def _reset(self, number: int, arrays: Arrays, seed: int | None = None) -> None:
        while True:
            try:
                if self.clock is not None:
                    self.clock[:] = self.first + number, time.monotonic()
                env_seed = self._next_seeds.pop(number, seed)
                if env_seed is not None:
                    seed_spaces(self.envs[number], env_seed)
                first, _ = self.envs[number].reset(seed=env_seed)
                self._write(number, first, arrays)
                return
            except FAULTS as error:
                self._rebuild(number, error, "reset()")

    def step(self, actions: Arrays, result: StepArrays, active: Mask | None = None) -> Mask | None:
        """Step the environments in ``active`` (``None``: all), one after another."""
        numbers = iter(self._numbers)
        if active is not None:
            hold(~active, result, self.present)
            result.env_steps[~active] = 0
            numbers = iter(np.flatnonzero(active).tolist())
        if self.clock is not None:
            numbers = self._timed(numbers)
        chosen = self.convert.rows(actions)
        self.infos, recovered = {}, None
        ended: list[int] = []
        while not self._step(numbers, chosen, result, ended):
            recovered = np.zeros(self.num_envs, np.bool_) if recovered is None else recovered
            recovered[ended[-1]] = True
        for key, array in result.observation.items():
            result.next_observation[key][...] = array
        for number in ended:
            self._reset(number, result.observation)
        self.present = result.observation
        return recovered

    def _timed(self, numbers: Iterator[int]) -> Iterator[int]:
        """Yield each environment's index after recording the start time of its step."""
        assert self.clock is not None
        for number in numbers:
            self.clock[:] = self.first + number, time.monotonic()
            yield number

    def _step(
        self, numbers: Iterator[int], chosen: Sequence[Any], result: StepArrays, ended: list[int]
    ) -> bool:
        """Step environments and write their observations to ``result.observation``.

        Indices of environments whose episode ended are appended to ``ended``. If an environment
        fails, it is rebuilt, its episode is truncated, the loop stops and False is returned.
        """
        envs, reward, number, value = self.envs, result.reward, 0, 0.0
        observation, shape = result.observation.get(self._key), self._shape
        try:
            for number in numbers:
                seen, value, terminated, truncated, info = envs[number].step(chosen[number])
                reward[number] = float(value)
                if getattr(seen, "shape", None) == shape:
                    observation[number] = seen  # type: ignore[index]
                else:
                    self._write(number, seen, result.observation)
                if self._repeats:
                    result.env_steps[number] = info["env_steps"]
                if terminated or truncated:
                    result.terminated[number] = self._flag(number, "terminated", terminated)
                    result.truncated[number] = self._flag(number, "truncated", truncated)
                    ended.append(number)
                    if info and (numbers_of_it := info_numbers(info)):
                        self.infos = {**self.infos, number: numbers_of_it}
        except FAULTS as error:
            ended.append(number)
            self._rebuild(number, error, "step()")
            hold(number, result, self.present)
            result.truncated[number] = True
            return False
        return True

    def _flag(self, number: int, name: str, value: Any) -> bool:
        """Return a flag as a bool, or raise EnvError if it is neither true nor false."""
        if value in (0, 1):
            return bool(value)
        raise EnvError(self.name, self.first + number, f"returned {value!r} as {name}")

    def _write(self, number: int, seen: Any, arrays: Arrays) -> None:
        values = []
        for leaf in self.observation_leaves:
            try:
                value = leaf.of(seen)
            except (KeyError, TypeError, IndexError):
                value = None
            if np.shape(value) != leaf.shape or value is None:
                what = f"{leaf.key} of shape {np.shape(value)}" if value is not None else "nothing"
                what = f"returned {what} as {leaf.key}, but its space has shape {leaf.shape}"
                raise EnvError(self.name, self.first + number, what)
            if (wrong := leaf.misfit(value)) is not None:
                raise EnvError(self.name, self.first + number, f"returned {wrong}")
            values.append(value)
        for leaf, value in zip(self.observation_leaves, values):
            arrays[leaf.key][number] = value

    def _rebuild(self, number: int, error: BaseException, call: str) -> None:
        """Replace a failed environment with a new one, or raise EnvError if no restart is left."""
        while True:
            self._recovered(fault_of(self.name, self.first + number, error, call))
            close_quietly(self.envs[number])
            self._rebuilt[number] += 1
            self._next_seeds[number] = derived_seed(self._seeds[number], self._rebuilt[number])
            try:
                self.envs[number] = self.make()
                self._since_made[number] = held(self.envs[number])
                return
            except FAULTS as new_error:
                error, call = new_error, "creating it"

    @property
    def learns(self) -> str | None:
        """Name of an active normalisation wrapper around the environments, if any."""
        return learning_layer(self.envs[0])

    def full_states(self) -> list[Any]:
        """Return the state, seed and number of rebuilds of each environment."""
        self._shared.check()
        return [
            {"env": capture(env, since_made), "seed": seed, "rebuilt": rebuilt}
            for env, since_made, seed, rebuilt in zip(
                self.envs, self._since_made, self._seeds, self._rebuilt
            )
        ]

    def set_full_states(self, states: list[Any]) -> None:
        """Restore states returned by :meth:`full_states`."""
        for env, state, since_made in zip(self.envs, states, self._since_made, strict=True):
            restore(env, state["env"], since_made)
        self._seeds = [state["seed"] for state in states]
        self._rebuilt = [state["rebuilt"] for state in states]

    def close(self) -> None:
        """Close all environments."""
        for env in self.envs:
            close_quietly(env)
