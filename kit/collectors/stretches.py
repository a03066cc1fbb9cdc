"""Consecutive steps of a batch whose actions come from one source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.collectors.in_numpy import NumpyProgram
from kit.collectors.policy import IS_INIT, PolicyRunner, Tensors
from kit.envs.spaces import Arrays, Key


class Stretch(ABC):
    """Steps in which one source acts.

    Args:
        steps: of each copy.
        runner: whose policy acts; ``None``: nobody's.

    Attributes:
        taken: steps that were begun so far.
        starts: whether each step was the first of its episode, where somebody wants to know.
    """

    def __init__(self, steps: int, runner: PolicyRunner | None) -> None:
        self.steps, self.runner = steps, runner
        self.taken = 0
        self.starts: list[Tensor] = []

    def begin(self, observation: Mapping[Key, NDArray[Any]]) -> None:  # noqa: B027
        """Make ready.

        Args:
            observation: what each step will act on, ``[steps, num_envs, ...]``; only the first one
                is there already.
        """

    @abstractmethod
    def __iter__(self) -> Iterator[Arrays]:
        """Yield the actions of each step, ``[num_envs, ...]``, once its observation is there."""

    @abstractmethod
    def value(self, key: Key) -> Tensor | None:
        """Return what was written under ``key``, ``[steps, num_envs, ...]``; ``None``: nothing."""

    def _starts(self, key: Key) -> Tensor | None:
        return torch.stack(self.starts) if key == IS_INIT and self.starts else None


class RandomStretch(Stretch):
    """Nobody acts: actions are drawn beforehand.

    Args:
        steps: of each copy.
        actions: by key, ``[steps, num_envs, ...]``.
    """

    def __init__(self, steps: int, actions: Tensors) -> None:
        super().__init__(steps, None)
        self._actions = actions
        self._arrays = {key: value.cpu().numpy() for key, value in actions.items()}

    def __iter__(self) -> Iterator[Arrays]:
        """Yield what was drawn."""
        for step in range(self.steps):
            self.taken = step + 1
            yield {key: array[step] for key, array in self._arrays.items()}

    def value(self, key: Key) -> Tensor | None:
        """Return the actions."""
        return self._actions.get(key, self._starts(key))


class CalledStretch(Stretch):
    """Something is called with tensors in each step.

    Args:
        steps: of each copy.
        runner: whose policy acts; ``None``: nobody's.
        call: takes an observation, returns what is written.
        action_keys: of the actions; without a runner, ``call`` returns these.
        device: where ``call`` wants the observation.
    """

    def __init__(
        self,
        steps: int,
        runner: PolicyRunner | None,
        call: Callable[[Tensors], Sequence[Tensor]],
        action_keys: Sequence[Key],
        device: torch.device,
    ) -> None:
        super().__init__(steps, runner)
        self._call, self._action_keys, self._device = call, action_keys, device
        self._on_cpu = device.type == "cpu"
        self._observations: list[Tensors] = []
        self._outputs: list[Sequence[Tensor]] = []
        self._places: list[tuple[Key, int]] = []

    def begin(self, observation: Mapping[Key, NDArray[Any]]) -> None:
        """Make a tensor of each observation, which in a tight loop costs a third."""
        self._observations = list(tensors_of_steps(observation))

    def __iter__(self) -> Iterator[Arrays]:
        """Call it in each step."""
        for observation in self._observations:
            self.taken += 1
            yield self._act(observation)

    def _act(self, observation: Tensors) -> Arrays:
        if not self._on_cpu:
            observation = {key: value.to(self._device) for key, value in observation.items()}
        outputs = self._call(observation)
        self._outputs.append(outputs)
        if not self._places:
            keys = self._keys
            self._places = [(key, keys.index(key)) for key in self._action_keys]
        if self._on_cpu:
            return {key: outputs[place].numpy() for key, place in self._places}
        return {key: outputs[place].cpu().numpy() for key, place in self._places}

    @property
    def _keys(self) -> Sequence[Key]:
        return self._action_keys if self.runner is None else self.runner.out_keys

    def value(self, key: Key) -> Tensor | None:
        """Return what was written."""
        if key not in self._keys:
            return self._starts(key)
        place = self._keys.index(key)
        return torch.stack([outputs[place] for outputs in self._outputs])


class NumpyStretch(Stretch):
    """A policy acts whose operations NumPy makes.

    Args:
        steps: of each copy.
        runner: whose policy acts.
        program: the policy's operations.
    """

    def __init__(self, steps: int, runner: PolicyRunner, program: NumpyProgram) -> None:
        super().__init__(steps, runner)
        self._program = program
        self._written: Arrays = {}

    def begin(self, observation: Mapping[Key, NDArray[Any]]) -> None:
        """Do what does not depend on observations."""
        self._program.begin(observation, self.steps)

    def __iter__(self) -> Iterator[Arrays]:
        """Make the operations that lead to the actions."""
        for actions in self._program.steps():
            self.taken += 1
            yield actions

    def value(self, key: Key) -> Tensor | None:
        """Return what was written."""
        if not self._written:
            self._finish()
        if key not in self._written:
            return self._starts(key)
        return torch.from_numpy(self._written[key])

    def _finish(self) -> None:
        assert self.runner is not None
        self._written = dict(zip(self.runner.out_keys, self._program.finish(self.taken)))


class OpenNumpyStretch(NumpyStretch):
    """One of which it is not known beforehand how many steps are taken: ``steps`` at most."""

    def begin(self, observation: Mapping[Key, NDArray[Any]]) -> None:
        """Do what does not depend on observations."""
        self._generator = torch.get_rng_state()
        super().begin(observation)

    def end(self) -> None:
        """Finish the steps that were taken, and give back the random numbers of the others.

        To be called before the program makes other steps.
        """
        if self.taken < self.steps:
            torch.set_rng_state(self._generator)
            self._program.draw(self.taken)
        self._finish()


def tensors_of_steps(observation: Mapping[Key, NDArray[Any]]) -> Iterator[Tensors]:
    """Yield tensors that show the observation of each step.

    Args:
        observation: ``[steps, num_envs, ...]``.
    """
    for row in zip(*[torch.from_numpy(array).unbind(0) for array in observation.values()]):
        yield dict(zip(observation, row))
