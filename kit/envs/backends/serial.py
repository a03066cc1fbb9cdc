"""Copies in this process, stepped one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from kit.envs.backends.base import EnvBackend, Mask, StepArrays, fault_of, hold, rebuilt_seed
from kit.envs.errors import EnvironmentFault
from kit.envs.spaces import Arrays, value_at
from kit.envs.state import capture, restore

MakeCopy = Callable[[], gym.Env[Any, Any]]


class SerialBackend(EnvBackend):
    """Copies in this process, stepped one after the other: cheapest for fast environments.

    Args:
        make: makes one copy; called ``num_envs`` times.
        num_envs: number of copies.
        name: id of the environment, for messages.
        restarts: faults that are mended: the copy is rebuilt and its episode truncated.
        first: number of the first copy, where the others are elsewhere.
    """

    steps_some = True

    def __init__(
        self,
        make: MakeCopy,
        num_envs: int,
        name: str = "env",
        *,
        restarts: int = 0,
        first: int = 0,
    ) -> None:
        self.make, self.restarts, self.first = make, restarts, first
        self.envs = [make() for _ in range(num_envs)]
        one = self.envs[0]
        self._describe(name, num_envs, one.observation_space, one.action_space)
        self._repeats = one.has_wrapper_attr("env_steps")
        leaf = self.observation_leaves[0]
        self._key, self._shape = leaf.key, None if leaf.path else leaf.shape
        self._numbers = range(num_envs)
        self._seeds = list(range(num_envs))
        self._rebuilt = [0] * num_envs  # how often
        self._next_seeds: dict[int, int] = {}
        self._present: Arrays = {}
        self._one_step: tuple[StepArrays | None, Any] = None, None  # the last, and it as many

    def reset(
        self,
        observation: Arrays,
        seeds: Sequence[int] | None = None,
        mask: Mask | None = None,
    ) -> None:
        """Reset copies one by one."""
        if seeds is not None:
            self._seeds = [int(seed) for seed in seeds]
        first = {key: array[None] for key, array in observation.items()}
        for number in range(self.num_envs):
            if mask is None or mask[number]:
                self._reset(number, first, 0, None if seeds is None else seeds[number])
        self._present = observation

    def _reset(self, number: int, arrays: Arrays, step: int, seed: int | None = None) -> None:
        while True:
            try:
                first, _ = self.envs[number].reset(seed=self._next_seeds.pop(number, seed))
                self._write(number, first, arrays, step)
                return
            except Exception as error:
                self._rebuild(number, error, "reset()")

    def step(self, actions: Arrays, result: StepArrays, active: Mask | None = None) -> Mask | None:
        """Step copies one by one."""
        chosen = self.convert.rows(actions)
        numbers: Sequence[int] = self._numbers
        if active is not None:
            hold(~active, result, self._present)
            result.env_steps[~active] = 0
            numbers = np.flatnonzero(active).tolist()
        if result is not self._one_step[0]:
            self._one_step = result, result.at(None)
        results = self._one_step[1]
        ended, mended = self._step(iter(numbers), chosen, results, 0)
        self._fill_in(results, bool(ended))
        return mended

    def step_through(self, actions: Iterable[Arrays], results: StepArrays) -> None:
        """Step copies one by one, without a view of all arrays for each step."""
        convert, numbers, any_ended = self.convert.rows, self._numbers, False
        for step, chosen in enumerate(actions):
            ended, _ = self._step(iter(numbers), convert(chosen), results, step)
            if ended:
                any_ended = True
        self._fill_in(results, any_ended)

    def _fill_in(self, results: StepArrays, any_ended: bool) -> None:
        """Write next observations where no episode ended: they are acted on next."""
        for key, array in results.next_observation.items():
            then = results.observation[key]
            if any_ended:
                going_on = ~(results.terminated | results.truncated)
                where = going_on.reshape(*going_on.shape, *[1] * (array.ndim - 2))
                np.copyto(array, then, where=where)
            else:
                array[...] = then
        self._present = {key: array[-1] for key, array in results.observation.items()}

    def _step(
        self, numbers: Iterator[int], chosen: Sequence[Any], results: StepArrays, step: int
    ) -> tuple[list[int], Mask | None]:
        """Step copies; where an episode goes on, only what is acted on next is written.

        Args:
            numbers: of the copies.
            chosen: an action for each copy.
            results: of many steps.
            step: which of them.

        Returns:
            Environments whose episode ended, and which of them were mended (``None``: none).
        """
        envs, reward, number, shape = self.envs, results.reward, 0, self._shape
        observation = None if shape is None else results.observation[self._key]
        ended: list[int] = []
        mended = None
        while True:
            try:
                for number in numbers:
                    seen, reward[step, number], terminated, truncated, info = envs[number].step(
                        chosen[number]
                    )
                    if observation is not None and getattr(seen, "shape", None) == shape:
                        observation[step, number] = seen
                    else:
                        self._write(number, seen, results.observation, step)
                    if self._repeats:
                        results.env_steps[step, number] = info["env_steps"]
                    if terminated or truncated:
                        results.terminated[step, number] = terminated
                        results.truncated[step, number] = truncated
                        ended.append(number)
                break
            except Exception as error:
                mended = np.zeros(self.num_envs, np.bool_) if mended is None else mended
                mended[number] = True
                ended.append(number)
                self._mend(number, error, results, step)
        for number in ended:
            for key, array in results.observation.items():
                results.next_observation[key][step, number] = array[step, number]
            self._reset(number, results.observation, step)
        return ended, mended

    def _mend(self, number: int, error: Exception, results: StepArrays, step: int) -> None:
        """Rebuild a copy that failed, and truncate its episode.

        Raises:
            EnvironmentFault: if no restart is left.
        """
        self._rebuild(number, error, "step()")
        before = {key: array[step - 1] for key, array in results.observation.items()}
        result = results.at(step)
        hold(number, result, before if step else self._present)
        result.truncated[number] = True

    def _write(self, number: int, seen: Any, arrays: Arrays, step: int) -> None:
        values = []
        for leaf in self.observation_leaves:
            try:
                value = value_at(seen, leaf.path)
            except (KeyError, TypeError, IndexError):
                value = None
            if np.shape(value) != leaf.shape or value is None:
                what = f"{leaf.key} of shape {np.shape(value)}" if value is not None else "nothing"
                raise EnvironmentFault(
                    self.name,
                    self.first + number,
                    f"returned {what} as {leaf.key}, its space says shape {leaf.shape}",
                )
            values.append(value)
        for leaf, value in zip(self.observation_leaves, values):
            arrays[leaf.key][step, number] = value

    def _rebuild(self, number: int, error: Exception, call: str) -> None:
        """Put a new copy in the place of one that has failed.

        Raises:
            EnvironmentFault: if no restart is left.
        """
        while True:
            self._mended(fault_of(self.name, self.first + number, error, call))
            with contextlib.suppress(Exception):
                self.envs[number].close()
            self._rebuilt[number] += 1
            self._next_seeds[number] = rebuilt_seed(self._seeds[number], self._rebuilt[number])
            try:
                self.envs[number] = self.make()
                return
            except Exception as again:
                error, call = again, "making it"

    def full_states(self) -> list[Any]:
        """Capture copy by copy."""
        return [
            {"env": capture(env), "seed": seed, "rebuilt": rebuilt}
            for env, seed, rebuilt in zip(self.envs, self._seeds, self._rebuilt)
        ]

    def set_full_states(self, states: list[Any]) -> None:
        """Restore copy by copy."""
        for env, state in zip(self.envs, states, strict=True):
            restore(env, state["env"])
        self._seeds = [state["seed"] for state in states]
        self._rebuilt = [state["rebuilt"] for state in states]

    def close(self) -> None:
        """Close every copy."""
        for env in self.envs:
            with contextlib.suppress(Exception):
                env.close()
