"""Steps of a policy in a torch environment, several of them as one program."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kit.collectors.acting import Acting
from kit.collectors.policy import IS_INIT, PolicyRunner, Tensors
from kit.collectors.tensor_memory import TensorMemory, write
from kit.envs.spaces import Key, Leaf
from kit.envs.tensor import EpisodeState, TensorStep
from kit.envs.tensor.normalize import TensorNormalizer
from kit.fast.block import Block, Function


@runtime_checkable
class StepsTensors(Protocol):
    """What is asked of a torch environment; see :class:`~kit.envs.tensor.TensorEnv`."""

    num_envs: int
    action_repeat: int
    uniform_size: int
    dtype: torch.dtype
    generator: torch.Generator
    device: Any
    full_action_spec: Any
    observation_leaves: list[Leaf]
    action_leaves: list[Leaf]

    @property
    def episodes(self) -> EpisodeState:
        """Where every copy stands: tensors that keep their memory."""

    def observe(self, physics: Tensor) -> Tensor:
        """Return what the agent sees, ``[num_envs, observation_size]``."""

    def advance(
        self, episodes: EpisodeState, action: Tensor, uniform: Tensor
    ) -> tuple[EpisodeState, TensorStep]:
        """Make a step, and begin new episodes where one ended, as a pure function."""

    def reset_tensors(self, seed: int | None = None) -> Tensor:
        """Begin an episode in every copy."""

    def state_dict(self) -> Any:
        """Return the state of all copies and of the generator."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore what :meth:`state_dict` returned."""


class TensorSteps:
    """Takes steps and writes them to a batch's memory; nothing is read on the host.

    Args:
        env: is stepped.
        acting: chooses the actions.
        normalizer: normalises observations and rewards; ``None``: they stay as they are.
        block: steps in one program.
        fast: whether there are programs at all.
    """

    def __init__(
        self,
        env: StepsTensors,
        acting: Acting,
        normalizer: TensorNormalizer | None,
        *,
        block: int,
        fast: bool,
    ) -> None:
        self.env, self.acting = env, acting
        self.normalizer: Any = normalizer or _Unchanged()
        self.block, self.fast = block, fast
        self._written: dict[Key, Tensor] = {}
        self._blocks: dict[Any, Block] = {}

    def prepare(self) -> None:
        """Forget blocks whose policy is no longer what was traced; call once per batch."""
        runners = [r for r in (self.acting.runner, self.acting.explorer) if r is not None]
        before = [runner.replays for runner in runners]
        self.acting.mode()
        kept = all(runner.replays for runner, was in zip(runners, before) if was)
        if not kept or not all(block.is_valid() for block in self._blocks.values()):
            self._blocks.clear()

    def memory(self, steps: int) -> TensorMemory:
        """Return memory for a batch of ``steps`` of each copy."""
        observation = self.env.observe(self.env.episodes.physics)
        written = self._outputs(observation)
        return TensorMemory(steps, observation, written, repeats=self.env.action_repeat > 1)

    def _outputs(self, observation: Tensor) -> dict[Key, Tensor]:
        """Return one value of everything that is written besides what the environment gives."""
        if not self._written:
            runner = self.acting.runner
            if runner is None:
                drawn = self.env.full_action_spec.zero()
                self._written = {key: drawn.get(key) for key in self.acting.action_keys}
            else:
                values = runner.peek(_seen(observation, self.env.episodes))
                self._written = dict(zip(runner.out_keys, values))
        return self._written

    def run(
        self,
        runner: PolicyRunner | None,
        memory: TensorMemory,
        uniform: Tensor,
        steps: range,
        learn: bool,
    ) -> int:
        """Take the next of ``steps``, one block at most, and return how many.

        Args:
            runner: acts; ``None``: random actions.
            memory: written to.
            uniform: random numbers of the whole batch, ``[steps, uniform_size, num_envs]``.
            steps: which steps of the batch are to be taken.
            learn: whether running statistics take the steps in.
        """
        fast = self.fast and (runner is None or runner.replays)
        start, count = steps.start, min(self.block, len(steps)) if fast else 1
        remembered = {} if runner is None else dict(runner.memory)
        function = self._function(runner, count, fast, list(remembered), learn)
        part = memory.part(start, count)
        now = [*self.env.episodes, *self.normalizer.statistics]
        inputs = (*now, uniform[start : start + count], *remembered.values(), *part)
        if fast:
            key = (id(runner), count, learn)
            if key not in self._blocks:
                self._blocks[key] = Block(function, len(part))
            outputs = self._blocks[key](*inputs)
        else:
            outputs = function(*inputs)
        for present, after in zip(now, outputs):
            present.copy_(after)
        if runner is not None and fast:
            runner.memory = dict(zip(remembered, outputs[len(now) :]))
        return count

    def _function(
        self,
        runner: PolicyRunner | None,
        count: int,
        fast: bool,
        remembered: list[Key],
        learn: bool,
    ) -> Function:
        """Return ``count`` steps of policy and environment as a function of tensors.

        It takes where the copies stand, running statistics, uniform random numbers, what the policy
        remembers, and memory to write to; it returns where the copies stand then, the statistics,
        and what is remembered.
        """
        env, acting, normalizer = self.env, self.acting, self.normalizer
        keys, size = list(self._written), len(self.env.episodes)
        first = size + len(normalizer.statistics) + 1
        last = first + len(remembered)

        def steps(*tensors: Tensor) -> list[Tensor]:
            now, uniform = type(env.episodes)(*tensors[:size]), tensors[first - 1]
            statistics = normalizer.statistics._make(tensors[size : first - 1])
            if runner is not None and fast:
                runner.memory = dict(zip(remembered, tensors[first:last]))
            for time_step in range(count):
                observation = normalizer.apply(statistics, env.observe(now.physics))
                seen = _seen(observation, now)
                if runner is None:
                    drawn = env.full_action_spec.rand()
                    outputs = {key: drawn.get(key) for key in acting.action_keys}
                else:
                    values = runner.plainly(seen) if fast else runner(seen)
                    outputs = dict(zip(runner.out_keys, values))
                now, step = env.advance(now, outputs[acting.action_keys[0]], uniform[time_step])
                statistics, step = normalizer.step(statistics, step, learn)
                if runner is not None and runner.remembers:
                    runner.ended(step.terminated | step.truncated)
                outputs.setdefault(IS_INIT, seen[IS_INIT])
                written = [outputs.get(key) for key in keys]
                write(tensors[last:], time_step, observation, step, written)
            if runner is None or not fast:  # one that is being traced remembers by itself
                return [*now, *statistics]
            after = [runner.memory[key] for key in remembered]
            return [*now, *statistics, *after]

        return steps

    def clear(self) -> None:
        """Release the programs."""
        self._blocks.clear()


class _NoStatistics(NamedTuple):
    pass


class _Unchanged:
    """In the place of a normaliser: everything stays as it is."""

    statistics = _NoStatistics()

    def apply(self, statistics: _NoStatistics, observation: Tensor) -> Tensor:
        del statistics
        return observation

    def step(
        self, statistics: _NoStatistics, step: TensorStep, learn: bool
    ) -> tuple[_NoStatistics, TensorStep]:
        del learn
        return statistics, step


def _seen(observation: Tensor, episodes: EpisodeState) -> Tensors:
    starts = (episodes.episode_length == 0).unsqueeze(-1)
    return {"observation": observation, IS_INIT: starts}
