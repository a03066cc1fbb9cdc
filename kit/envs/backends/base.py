"""Base class of backends, which step environments and write results to preallocated arrays.

All backends reset a finished environment within the step that finished it. The last observation is
written to ``next_observation`` and the first observation of the next episode to ``observation``, so
a reset uses no extra policy step.
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
    """Output arrays for one step of all environments; every array has ``num_envs`` rows.

    For several steps, every array has a leading time dimension.
    """

    next_observation: Arrays
    """Observations after the step, including the last observation of ended episodes."""
    observation: Arrays
    """Observations for the next action. Finished environments have already been reset."""
    reward: NDArray[np.float32]
    """Rewards, ``[num_envs]``."""
    terminated: Mask
    """Whether the episode terminated, ``[num_envs]``; must be set to false before the step."""
    truncated: Mask
    """Whether the episode was truncated, ``[num_envs]``; must be set to false before the step."""
    env_steps: NDArray[np.int32]
    """Number of env steps performed, ``[num_envs]``; must be set to 1 before the step."""
    raw_reward: NDArray[np.float32] | None = None
    """Rewards before normalisation, ``[num_envs]``; ``None`` if rewards are not normalised."""

    @property
    def counted(self) -> tuple[NDArray[np.float32], Mask, Mask, NDArray[np.int32]]:
        """Inputs for episode statistics: unnormalised rewards, end flags and env steps."""
        reward = self.reward if self.raw_reward is None else self.raw_reward
        return reward, self.terminated, self.truncated, self.env_steps

    def rows(self) -> Iterator[StepArrays]:
        """Yield views of the individual steps."""
        raw = itertools.repeat(None) if self.raw_reward is None else self.raw_reward
        flags = self.terminated, self.truncated
        following, present = rows_of(self.next_observation), rows_of(self.observation)
        return map(StepArrays, following, present, self.reward, *flags, self.env_steps, raw)


def rows_of(arrays: Arrays) -> Iterator[Arrays]:
    """Yield the arrays of each step. Three times faster than indexing."""
    if len(arrays) == 1:
        ((key, array),) = arrays.items()
        return ({key: row} for row in array)
    return (dict(zip(arrays, row)) for row in zip(*arrays.values()))


class EnvBackend(ABC):
    """A batch of identical environments that are stepped together.

    Attributes:
        name: id of the environment.
        num_envs: number of environments.
        observation_leaves: arrays that make up an observation.
        action_leaves: arrays that make up an action.
        steps_some: whether :meth:`step` supports stepping only some environments.
        present: current observations of all environments.
        uses_torch: whether environments draw from PyTorch's global random generator.
        restarts: maximum number of failures to recover from; further failures raise.
        faults: number of failures recovered from so far.
        infos: numeric ``info`` entries of episodes that ended in the last :meth:`step`, keyed by
            environment index; see :func:`info_numbers`.
        tell: callback for failures that were recovered from. If ``None``, a warning is emitted.
        specs: TorchRL observation and action specs; ``None`` if Gymnasium spaces are used.
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
        """Reset the environments in ``mask`` (``None``: all) and write their first observations.

        Args:
            observation: output arrays.
            seeds: one seed per environment; ``None``: keep the state of the random generators.
            mask: environments to reset; ``None``: all.
        """

    @abstractmethod
    def step(self, actions: Arrays, result: StepArrays, active: Mask | None = None) -> Mask | None:
        """Perform one step in the environments in ``active`` (``None``: all).

        An inactive environment keeps its observation, with zero reward and no env step. If an
        environment is rebuilt after a failure, ``next_observation`` repeats the previous
        observation with zero reward. The failed env step is counted, the episode is truncated and
        a new episode starts.

        Args:
            actions: action arrays with one row per environment.
            result: output arrays.
            active: environments to step; requires ``steps_some``.

        Returns:
            Mask of the rebuilt environments; ``None`` if no environment was rebuilt.

        Raises:
            EnvError: if an environment raises or returns invalid values, and no restart is left.
        """

    def full_states(self) -> list[Any]:
        """Return the state of each environment as plain values.

        Raises:
            StateCaptureError: if the state of an environment cannot be captured.
        """
        name = type(self).__name__.removesuffix("Backend")
        raise StateCaptureError(f"{name} cannot capture the state of its environments")

    def set_full_states(self, states: list[Any]) -> None:
        """Restore states returned by :meth:`full_states`."""
        raise StateCaptureError(f"{self.name} cannot restore the state of its environments")

    @property
    def is_where_it_was(self) -> bool:
        """Whether no other code has stepped or reset the environments; true if unknown."""
        return True

    @property
    def learns(self) -> str | None:
        """Name of a wrapper or transform that keeps updating during evaluations, or ``None``."""
        return self._learns

    def state_of_transforms(self) -> list[dict[str, Any]]:
        """Return the TorchRL transforms' state, such as running statistics."""
        return []

    def load_state_of_transforms(self, states: list[dict[str, Any]]) -> None:
        """Restore states returned by :meth:`state_of_transforms`."""
        assert not states

    @abstractmethod
    def close(self) -> None:
        """Close the environments and release their resources."""

    def _recovered(self, fault: EnvError) -> None:
        """Record and report a failure, or raise it if no restart is left."""
        if self.faults >= self.restarts:
            raise fault
        self.faults += 1
        (self.tell or self._warn)(fault)

    def _warn(self, fault: EnvError) -> None:
        text = (
            f"{fault}; rebuilt the environment and truncated its episode "
            f"({self.faults} of {self.restarts})"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("always", RuntimeWarning)  # report every failure
            warnings.warn(text, RuntimeWarning, stacklevel=4)


_OF_THE_KIT = frozenset({"env_steps", "TimeLimit.truncated", "action_mask"})


def info_numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric and boolean entries of ``info`` as floats."""
    return {
        str(name): float(value)
        for name, value in info.items()
        if isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating))
        and name not in _OF_THE_KIT
    }


def infos_of_arrays(info: Mapping[str, Any], ended: Mask) -> dict[int, dict[str, float]]:
    """Return the numeric entries of a vector environment's ``info`` for each ended episode.

    Args:
        info: arrays ``[num_envs]`` keyed by name. The array ``_NAME`` is the mask of environments
            that have the entry ``NAME``.
        ended: whether an environment's episode ended, ``[num_envs]``.
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
    """Derive a seed deterministically from the given integers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def hold(rows: Any, result: StepArrays, present: Arrays) -> None:
    """Write a no-op transition for ``rows``: same observation, zero reward, not done."""
    for key, values in present.items():
        result.next_observation[key][rows] = values[rows]
        result.observation[key][rows] = values[rows]
    result.reward[rows] = 0.0
    result.terminated[rows] = False
    result.truncated[rows] = False
