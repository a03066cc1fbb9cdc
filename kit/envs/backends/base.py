"""Stepping many environments, each backend writing into arrays it is given.

All backends reset a finished env within the step that finished it: the true last observation goes
to ``next_observation``, the first one of the next episode to ``observation``, and no policy step is
spent or faked.
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kit.envs.errors import EnvError
from kit.envs.plain_values import StateCaptureError
from kit.envs.spaces import ActionConverter, Arrays, Leaf, leaves

Mask = NDArray[np.bool_]


class StepArrays(NamedTuple):
    """Where one step of all envs is written; every array has ``num_envs`` rows.

    Where many steps are written, every array has a dimension of steps in front.
    """

    next_observation: Arrays
    """the observation that the step led to, also when it was the last of an episode."""
    observation: Arrays
    """the observation to act on next: after a reset where an episode ended."""
    reward: NDArray[np.float32]
    """rewards, ``[num_envs]``."""
    terminated: Mask
    """whether the episode ended by itself, ``[num_envs]``; zeroed before the step."""
    truncated: Mask
    """whether the episode was cut, ``[num_envs]``; zeroed before the step."""
    env_steps: NDArray[np.int32]
    """env steps made, ``[num_envs]``; ones before the step."""
    raw_reward: NDArray[np.float32] | None = None
    """rewards before normalisation, where they are normalised, ``[num_envs]``."""

    @property
    def counted(self) -> tuple[NDArray[np.float32], Mask, Mask, NDArray[np.int32]]:
        """What episodes are counted by: rewards before normalisation, both flags, env steps."""
        reward = self.reward if self.raw_reward is None else self.raw_reward
        return reward, self.terminated, self.truncated, self.env_steps

    def rows(self) -> Iterator[StepArrays]:
        """Yield one after the other of many steps, as views."""
        raw = itertools.repeat(None) if self.raw_reward is None else self.raw_reward
        flags = self.terminated, self.truncated
        following, present = rows_of(self.next_observation), rows_of(self.observation)
        return map(StepArrays, following, present, self.reward, *flags, self.env_steps, raw)


def rows_of(arrays: Arrays) -> Iterator[Arrays]:
    """Yield arrays of each step, by key; iterating takes a third of the time of indexing."""
    if len(arrays) == 1:
        ((key, array),) = arrays.items()
        return ({key: row} for row in array)
    return (dict(zip(arrays, row)) for row in zip(*arrays.values()))


class EnvBackend(ABC):
    """Several equal environments, stepped together.

    Attributes:
        name: id of the environment.
        num_envs: number of envs.
        observation_leaves: arrays of an observation.
        action_leaves: arrays of an action.
        steps_some: whether :meth:`step` can leave envs out.
        present: the observation of all envs before the next step.
        uses_torch: whether environments draw random numbers of PyTorch's.
        restarts: faults that are recovered from; the next one is raised.
        faults: faults recovered from so far.
        infos: numbers in the ``info`` of the last step of an episode, by number of the environment,
            where the last call of :meth:`step` ended some; see :func:`info_numbers`.
        tell: called with each fault recovered from; ``None``: it is a warning.
        specs: TorchRL's specs of observation and action, where Gymnasium spaces do not say them.
    """

    name: str
    num_envs: int
    observation_leaves: list[Leaf]
    action_leaves: list[Leaf]
    convert: ActionConverter
    steps_some = False
    present: Arrays
    uses_torch = False
    restarts = 0
    faults = 0
    infos: Mapping[int, Mapping[str, float]] = {}
    tell: Callable[[EnvError], object] | None = None
    specs: tuple[Any, Any] | None = None
    _learns: str | None = None

    def _describe(
        self, name: str, num_envs: int, observation_space: Any, action_space: Any
    ) -> None:
        self.name, self.num_envs = name, num_envs
        self.observation_space, self.action_space = observation_space, action_space
        self.observation_leaves = leaves(observation_space, "observation", "observation_space")
        self.action_leaves = leaves(action_space, "action", "action_space")
        self.convert = ActionConverter(action_space, self.action_leaves, num_envs)

    @abstractmethod
    def reset(
        self, observation: Arrays, seeds: Sequence[int] | None = None, mask: Mask | None = None
    ) -> None:
        """Start new episodes in all envs, or in those of ``mask``, and write their observations.

        Args:
            observation: written to.
            seeds: one for each env; ``None`` continues with the envs' own random numbers.
            mask: envs to reset.
        """

    @abstractmethod
    def step(self, actions: Arrays, result: StepArrays, active: Mask | None = None) -> Mask | None:
        """Take one step in every env, or in those of ``active``.

        An env that is left out keeps its observation, with no reward and no env step. So does one
        that was rebuilt, but its episode is truncated, a new one has begun, and the env step
        that failed is counted.

        Args:
            actions: one row for each env.
            result: written to.
            active: envs to step; only where ``steps_some``.

        Returns:
            Envs that were rebuilt, ``None`` if there are none.

        Raises:
            EnvError: if an env raises or returns something impossible, and no restart is
                left.
        """

    def full_states(self) -> list[Any]:
        """Return the state of each env as plain values.

        Raises:
            StateCaptureError: if some environment cannot give its state.
        """
        name = type(self).__name__.removesuffix("Backend")
        raise StateCaptureError(f"{name} does not give the state of its environments")

    def set_full_states(self, states: list[Any]) -> None:
        """Restore the states of :meth:`full_states`."""
        raise StateCaptureError(f"{self.name}: its environments take no state")

    @property
    def is_where_it_was(self) -> bool:
        """Whether nobody else has stepped or reset the envs since the last call, if known."""
        return True

    @property
    def learns(self) -> str | None:
        """The name of a part that learns from every step, also of evaluations; usually none."""
        return self._learns

    def state_of_transforms(self) -> list[dict[str, Any]]:
        """Return what TorchRL's transforms hold, which new episodes do not begin anew."""
        return []

    def load_state_of_transforms(self, states: list[dict[str, Any]]) -> None:
        """Restore the states of :meth:`state_of_transforms`."""
        assert not states

    @abstractmethod
    def close(self) -> None:
        """Release the envs."""

    def _recovered(self, fault: EnvError) -> None:
        """Count a fault that is going to be recovered from, or raise it if no restart is left."""
        if self.faults >= self.restarts:
            raise fault
        self.faults += 1
        (self.tell or self._warn)(fault)

    def _warn(self, fault: EnvError) -> None:
        text = f"{fault}; it is rebuilt, its episode truncated ({self.faults} of {self.restarts})"
        with warnings.catch_warnings():
            warnings.simplefilter("always", RuntimeWarning)  # each one, not the first alone
            warnings.warn(text, RuntimeWarning, stacklevel=4)


_OF_THE_KIT = frozenset({"env_steps", "TimeLimit.truncated", "action_mask"})


def info_numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """Numbers and truth values in an ``info``; arrays, texts and containers are left out."""
    return {
        str(name): float(value)
        for name, value in info.items()
        if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating))
        and name not in _OF_THE_KIT
    }


def infos_of_arrays(info: Mapping[str, Any], ended: Mask) -> dict[int, dict[str, float]]:
    """The same of an ``info`` of arrays, as vector environments have it.

    Args:
        info: arrays ``[num_envs]`` by name; ``_name`` masks the environments that have it.
        ended: environments whose episode ended, ``[num_envs]``.
    """
    found: dict[int, dict[str, float]] = {}
    for name, values in info.items():
        if name.startswith("_") or np.shape(values) != ended.shape:
            continue
        for env in np.flatnonzero(ended & info.get(f"_{name}", True)).tolist():
            for key, number in info_numbers({name: values[env]}).items():
                found.setdefault(env, {})[key] = number
    return found


def derived_seed(*numbers: int) -> int:
    """Return a seed made of whole numbers: the same in every run in which these are the same."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def hold(rows: Any, result: StepArrays, present: Arrays) -> None:
    """Write for ``rows`` that nothing has happened: the observation stays, there is no reward."""
    for key, values in present.items():
        result.next_observation[key][rows] = values[rows]
        result.observation[key][rows] = values[rows]
    result.reward[rows] = 0.0
    result.terminated[rows] = False
    result.truncated[rows] = False
