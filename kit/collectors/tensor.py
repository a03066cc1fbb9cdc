"""Collecting from environments written in torch."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from kit.collectors.actor import (
    IS_INIT,
    Actor,
    FastPolicy,
    Policy,
    PolicyPath,
    PolicyRunner,
    Tensors,
    fast_policy_of,
)
from kit.collectors.base import StepsCollector, check_policy
from kit.envs.episodes import Episode
from kit.envs.errors import EnvironmentFault
from kit.envs.normalize import Normalizer
from kit.envs.spaces import Key, Leaf
from kit.envs.tensor import TENSOR_ENVS, EpisodeState, TensorBackend, TensorStep
from kit.envs.vector_env import VectorEnv
from kit.fast.traced import Traced
from kit.steps import SettingError
from kit.steps.errors import whole_number


@runtime_checkable
class StepsTensors(Protocol):
    """The part of :class:`~kit.envs.tensor.TensorEnv` that the collector uses."""

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
        """State of every environment: tensors that keep their memory."""

    def observe(self, physics: Tensor) -> Tensor:
        """Observations, ``[num_envs, observation_size]``."""

    def advance(
        self, episodes: EpisodeState, action: Tensor, uniform: Tensor
    ) -> tuple[EpisodeState, TensorStep]:
        """Make a step, and begin new episodes where one ended, as a pure function."""

    def reset_tensors(self, seed: int | None = None) -> Tensor:
        """Begin an episode in every environment."""

    def state_dict(self) -> Any:
        """State of all environments and of the generator."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Restore :meth:`state_dict`."""


class TensorCollector(StepsCollector):
    """Steps an environment written in torch, with nothing on the host in between.

    Several steps of policy, sampling, environment and the writing of the batch run as one flat
    program (on a GPU as one CUDA graph). Env steps, finished episodes and returns stay on the
    device until they are read. On a CPU a batch is checked for NaN; on a GPU that would wait.
    Running normalisation that ``make_env`` was given is part of the program, too.

    Args:
        create_env_fn: a torch environment, or one of ``make_env(..., vectorization="tensor")``, or
            a function that makes one.
        policy: module from TensorDict to TensorDict; ``None`` acts at random.
        exploration_policy: acts in place of the policy until ``exploration_frames``.
        reset_at_each_iter: whether all environments start a new episode with each batch.
        seed: of policy and random actions; environments are seeded when they are made, or by
            :meth:`set_seed`.
        device: the environment's; another one is refused.
        storing_device: where batches are delivered; ``None``: the environment's device.
        exploration_type: whether actions are sampled.
        fast_policy: ``"auto"`` or ``"exact"``: blocks of steps are replayed; ``"module"``: the
            policy is called as a TensorDict module, step by step.
        block: steps in one program.
        keep_memory: whether glibc keeps freed memory, in the whole process and for as long as it
            lives. Gain in three interleaved rounds with 4,096 CartPoles and 32 steps (CPU time, one
            thread): 0.94 to 1.22 times.
        **counts: those of :class:`~kit.collectors.base.StepsCollector`: ``frames_per_batch``,
            ``steps_per_env``, ``total_frames``, ``init_random_frames``, ``prefill_frames``,
            ``exploration_frames``.

    Raises:
        SettingError: if the environment is not written in torch, or counts cannot be reached.
    """

    def __init__(
        self,
        create_env_fn: EnvBase | StepsTensors | Callable[[], Any],
        policy: Policy | None = None,
        *,
        exploration_policy: Policy | None = None,
        reset_at_each_iter: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        fast_policy: FastPolicy | bool = "auto",
        block: int = 16,
        keep_memory: bool = False,
        **counts: Any,
    ) -> None:
        self.env, self._outer = as_tensor_env(create_env_fn)
        self.device = torch.device(self.env.device)
        if device is not None and torch.device(device).type != self.device.type:
            raise SettingError(
                "device", str(device), "is not the environment's", [str(self.device)]
            )
        super().__init__(
            self.env.num_envs,
            reset_at_each_iter=reset_at_each_iter,
            seed=seed,
            device=self.device,
            **counts,
        )
        self.storing_device = torch.device(storing_device or self.device)
        self.policy = policy
        fast = fast_policy_of(fast_policy) != "module"
        self._actor = Actor(
            self.env,
            policy,
            exploration_policy,
            init_random_frames=self.init_random_frames,
            exploration_frames=self.exploration_frames,
            exploration_type=exploration_type,
            device=self.device,
            fast_policy="exact" if fast else "module",
        )
        self._steps = TensorSteps(
            self.env,
            self._actor,
            self._checked_normalizer(),
            block=whole_number("block", block, at_least=1),
            fast=fast,
        )
        self._ended = FinishedEpisodes(self.num_envs, self.device)
        self._repeated = torch.zeros((), dtype=torch.int64, device=self.device)
        self._episode = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._begun = self._outer is not None and self._outer.is_started
        if keep_memory and self.device.type == "cpu":
            keep_freed_memory()

    @property
    def policy_path(self) -> PolicyPath:
        """How the policy is called, and why not faster."""
        return self._actor.path

    # ------------------------------------------------------------------ one batch
    def _collect_steps(self, steps: int) -> TensorDictBase:
        env = self.env
        if self.reset_at_each_iter and self._iter > 0:
            env.reset_tensors()
            self._restart()
        self._steps.prepare()
        learn = self._begin()
        shape = (steps, env.uniform_size, self.num_envs)
        uniform = torch.rand(shape, generator=env.generator, dtype=env.dtype, device=self.device)
        memory = self._steps.memory(steps)
        start = 0
        for runner, count in self._actor.phases(self.policy_steps, steps):
            end = start + count
            while start < end:
                left = range(start, end)
                start += self._steps.run(runner, memory, uniform, left, learn)
            if runner is None:
                self.random_policy_steps += count * self.num_envs
        if self.device.type == "cpu":
            self._check_policy(memory)
            self._check_finite(memory)
        self._count(memory)
        batch = memory.tensordict(self._trajectories(memory))
        return batch if self.storing_device == self.device else batch.to(self.storing_device)

    # ------------------------------------------------------------------ normalisation
    @property
    def normalizer(self) -> Normalizer | None:
        """Running normalisation of the environment; its statistics are on the device."""
        return None if self._outer is None else self._outer.normalizer

    def _checked_normalizer(self) -> Normalizer:
        """The environment's normaliser, or one that changes nothing.

        Raises:
            SettingError: if it has statistics of other observations.
        """
        if self.normalizer is None:
            return Normalizer([], self.num_envs, observation=False, reward=False)
        size = self.env.observe(self.env.episodes.physics).shape[-1]
        for key, known in self.normalizer.observation.items():
            if (key, known.mean.shape) != ("observation", (size,)):
                shape = tuple(known.mean.shape)
                raise SettingError(
                    "normalizer", (key, shape), "is of another environment", [("observation", size)]
                )
        return self.normalizer

    def _begin(self) -> bool:
        """Take in the observations of a reset; return whether statistics change with the batch."""
        if self._outer is None or self.normalizer is None:
            return False
        normalizer = self.normalizer.to(self.device)
        if not self._begun and self._outer.training:
            seen = self.env.observe(self.env.episodes.physics)
            before = normalizer.statistics
            after = normalizer.first_tensors(before, seen)
            _store(before.tensors(), after.tensors())
        self._begun = True
        return bool(self._outer.training)

    # ------------------------------------------------------------------ after a batch
    def _count(self, memory: TensorMemory) -> None:
        self.policy_steps += memory.steps * self.num_envs
        self._ended.add(memory)
        if memory.env_steps is None:
            self._known_env_steps += memory.steps * self.num_envs
        else:
            self._repeated += memory.env_steps.sum()

    def _trajectories(self, memory: TensorMemory) -> Tensor:
        """Numbers of episodes in the whole run; those of one env are ``num_envs`` apart."""
        done = (memory.terminated | memory.truncated).long()
        ended = self._episode + done.cumsum(0)
        self._episode = ended[-1]
        return (ended - done) * self.num_envs + torch.arange(self.num_envs, device=self.device)

    def _check_policy(self, memory: TensorMemory) -> None:
        written = {key: value.transpose(0, 1) for key, value in memory.written.items()}
        seen: Tensors = {"observation": memory.observation}
        taken = self.policy_steps // self.num_envs
        check_policy(written, seen, self._actor.action_keys, taken)

    def _check_finite(self, memory: TensorMemory) -> None:
        for what, values in (("reward", memory.reward), ("observation", memory.next_observation)):
            if values.sum().isnan() and values.isnan().any():
                step, *_, env = values.isnan().nonzero()[0].tolist()
                name = type(self.env).__name__
                length = int(memory.length[step, env]) - 1
                what = f"returned NaN as {what}, {length} policy steps into its episode"
                raise EnvironmentFault(name, env, what, self.policy_steps // self.num_envs + step)

    # Counts that are on the device; reading them waits for it.

    _known_env_steps = 0

    @property
    def env_steps(self) -> int:
        """Env steps so far."""
        return self._known_env_steps + int(self._repeated)

    @env_steps.setter
    def env_steps(self, value: int) -> None:
        self._known_env_steps = value
        if hasattr(self, "_repeated"):
            self._repeated.zero_()

    @property
    def episodes(self) -> int:
        """Episodes that have ended so far."""
        return self._ended.count() if hasattr(self, "_ended") else 0

    @episodes.setter
    def episodes(self, value: int) -> None:
        assert value == 0 or self._ended.count() == value

    def take_episodes(self) -> list[Episode]:
        """The episodes that ended since the last call, at most the last 65,536; all are counted."""
        self._finished += self._ended.take()
        return super().take_episodes()

    # ------------------------------------------------------------------ in and out
    def _restart(self) -> None:
        self._begun = False
        self._episode += 1
        self._ended.restart()
        self._actor.restart()

    def _seed_environments(self, seed: int) -> None:
        self.env.reset_tensors(seed)
        self._restart()

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Release the programs; the collector cannot be used afterwards."""
        del timeout, close_env, raise_on_error
        self.closed = True
        self._steps.clear()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Counters, random numbers, and the state of the environment; waits for the device."""
        self._finished += self._ended.take()
        state = super().state_dict()
        state["ended"] = self._ended.state_dict()
        state["episode"] = self._episode.clone()
        state["actor"] = self._actor.state_dict()
        state["env"] = dict(self.env.state_dict())
        state["begun"] = self._begun
        state["normalizer"] = self.normalizer and self.normalizer.state_dict()
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._ended.load_state_dict(state_dict["ended"])
        super().load_state_dict(state_dict)
        self._episode = state_dict["episode"].to(self.device).clone()
        self._actor.load_state_dict(state_dict["actor"])
        self.env.load_state_dict(state_dict["env"])
        self._begun = bool(state_dict["begun"])
        if self.normalizer is not None:
            self.normalizer.load_state_dict(state_dict["normalizer"])


def as_tensor_env(create_env_fn: Any) -> tuple[StepsTensors, VectorEnv | None]:
    """The torch environment, made if need be, and the vector environment around it.

    Raises:
        SettingError: if it is another kind of environment.
    """
    env = create_env_fn
    if not isinstance(env, (EnvBase, StepsTensors)) and callable(env):
        env = env()
    outer = None
    if isinstance(env, VectorEnv) and isinstance(env.backend, TensorBackend):
        outer, env = env, env.backend.env
    if not isinstance(env, StepsTensors):
        raise SettingError(
            "collector",
            "tensor",
            f"needs an environment written in torch, not {type(env).__name__}",
            "make_env(..., vectorization='tensor') with one of: " + ", ".join(TENSOR_ENVS),
        )
    return env, outer


Function = Callable[..., Sequence[Tensor]]


class TensorSteps:
    """Steps of policy and environment, written to a batch's memory without the host.

    Args:
        env: the environment.
        actor: chooses the actions.
        normalizer: normalises observations and rewards.
        block: steps in one program.
        fast: whether there are programs at all.
    """

    def __init__(
        self, env: StepsTensors, actor: Actor, normalizer: Normalizer, *, block: int, fast: bool
    ) -> None:
        self.env, self.actor, self.normalizer = env, actor, normalizer
        self.block, self.fast = block, fast
        self._written: dict[Key, Tensor] = {}
        self._blocks: dict[Any, Traced] = {}

    def prepare(self) -> None:
        """Drop programs whose policy has changed; called once per batch."""
        runners = [r for r in (self.actor.runner, self.actor.explorer) if r is not None]
        before = [runner.replays for runner in runners]
        self.actor.prepare()
        kept = all(runner.replays for runner, was in zip(runners, before) if was)
        if any(block.refresh() for block in self._blocks.values()) or not kept:
            self._blocks.clear()

    def memory(self, steps: int) -> TensorMemory:
        """Memory for a batch of ``steps`` of each environment."""
        observation = self.env.observe(self.env.episodes.physics)
        written = self._outputs(observation)
        return TensorMemory(steps, observation, written, repeats=self.env.action_repeat > 1)

    def _outputs(self, observation: Tensor) -> dict[Key, Tensor]:
        """One value of each output of the policy."""
        if not self._written:
            runner = self.actor.runner
            if runner is None:
                drawn = self.env.full_action_spec.zero()
                self._written = {key: drawn.get(key) for key in self.actor.action_keys}
            else:
                values = runner.peek(_policy_input(observation, self.env.episodes))
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
        """Take the next of ``steps``, one program at most, and return how many.

        Args:
            runner: acts; ``None``: random actions.
            memory: written to.
            uniform: random numbers of the whole batch, ``[steps, uniform_size, num_envs]``.
            steps: which steps of the batch are to be taken.
            learn: whether running statistics take the steps in.
        """
        fast = self.fast and (runner is None or runner.replays)
        start, count = steps.start, min(self.block, len(steps)) if fast else 1
        hidden = {} if runner is None else dict(runner.hidden)
        function = self._function(runner, count, fast, list(hidden), learn)
        part = memory.part(start, count)
        now = [*self.env.episodes, *self.normalizer.statistics.tensors()]
        inputs = (*now, uniform[start : start + count], *hidden.values(), *part)
        if fast:
            key = (id(runner), count, learn)
            if key not in self._blocks:
                self._blocks[key] = Traced(
                    lambda given: dict(enumerate(function(*(given[n] for n in range(len(given)))))),
                    # TorchRL's specs of bounded actions check on the host what they draw.
                    name="a block of environment steps" if runner is not None else "",
                )
            outputs: Sequence[Tensor] = list(self._blocks[key](dict(enumerate(inputs))).values())
        else:
            outputs = function(*inputs)
        _store(now, outputs)
        if runner is not None and fast:
            runner.hidden = dict(zip(hidden, outputs[len(now) :]))
        return count

    def _function(
        self,
        runner: PolicyRunner | None,
        count: int,
        fast: bool,
        hidden: list[Key],
        learn: bool,
    ) -> Function:
        """``count`` steps of policy and environment as a function of tensors.

        It takes the state of the environments, running statistics, uniform random numbers, the
        policy's hidden state, and memory to write to; it returns the state of the environments,
        the statistics, and the hidden state.
        """
        env, actor, normalizer = self.env, self.actor, self.normalizer
        known = normalizer.statistics
        keys, size = list(self._written), len(self.env.episodes)
        first = size + len(known.tensors()) + 1
        last = first + len(hidden)

        def steps(*tensors: Tensor) -> list[Tensor]:
            now, uniform = type(env.episodes)(*tensors[:size]), tensors[first - 1]
            statistics = known.replaced(tensors[size : first - 1])
            if runner is not None and fast:
                runner.hidden = dict(zip(hidden, tensors[first:last]))
            for time_step in range(count):
                observation = normalizer.apply(statistics, env.observe(now.physics))
                given = _policy_input(observation, now)
                if runner is None:
                    drawn = env.full_action_spec.rand()
                    outputs = {key: drawn.get(key) for key in actor.action_keys}
                else:
                    values = runner.call_module(given) if fast else runner(given)
                    outputs = dict(zip(runner.out_keys, values))
                now, step = env.advance(now, outputs[actor.action_keys[0]], uniform[time_step])
                statistics, step = normalizer.step_tensors(statistics, step, learn)
                if runner is not None and runner.is_recurrent:
                    runner.end_episodes(step.terminated | step.truncated)
                outputs.setdefault(IS_INIT, given[IS_INIT])
                written = [outputs.get(key) for key in keys]
                write(tensors[last:], time_step, observation, step, written)
            after = [*now, *statistics.tensors()]
            if runner is None or not fast:  # a runner that is not traced keeps its hidden state
                return after
            return [*after, *(runner.hidden[key] for key in hidden)]

        return steps

    def clear(self) -> None:
        """Release the programs."""
        self._blocks.clear()


def _store(present: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Write tensors in place."""
    for tensor, value in zip(present, after):
        tensor.copy_(value)


def _policy_input(observation: Tensor, episodes: EpisodeState) -> Tensors:
    starts = (episodes.episode_length == 0).unsqueeze(-1)
    return {"observation": observation, IS_INIT: starts}


class TensorMemory:
    """Tensors of one batch, time first, on the environment's device.

    Observations are stored entry by entry, ``[steps, observation_size, num_envs]``, as torch
    environments compute them; the batch is a view with the usual order of dimensions.

    Args:
        steps: of each environment.
        observation: of all environments, ``[num_envs, observation_size]``.
        written: one value of each output of the policy, by key.
        repeats: whether a policy step may make several env steps.
    """

    def __init__(
        self, steps: int, observation: Tensor, written: dict[Key, Tensor], repeats: bool
    ) -> None:
        num_envs, size = observation.shape
        self.steps, self.num_envs = steps, num_envs

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((steps, *shape), dtype=dtype, device=observation.device)

        kind = observation.dtype
        self.observation = make(kind, size, num_envs)
        self.next_observation = make(kind, size, num_envs)
        self.reward, self.episode_return = make(kind, num_envs), make(kind, num_envs)
        self.terminated, self.truncated = make(torch.bool, num_envs), make(torch.bool, num_envs)
        self.length = make(torch.int64, num_envs)
        self.env_steps = make(torch.int64, num_envs) if repeats else None
        self.written = {
            key: torch.zeros((steps, *value.shape), dtype=value.dtype, device=value.device)
            for key, value in written.items()
        }

    def part(self, start: int, count: int) -> list[Tensor]:
        """The memory of ``count`` steps from ``start``, in the order of :func:`write`."""
        tensors = [
            self.observation,
            self.next_observation,
            self.reward,
            self.terminated,
            self.truncated,
            self.episode_return,
            self.length,
            *([] if self.env_steps is None else [self.env_steps]),
            *self.written.values(),
        ]
        return [tensor[start : start + count] for tensor in tensors]

    def tensordict(self, trajectories: Tensor) -> TensorDictBase:
        """The batch, ``[num_envs, steps]``.

        Args:
            trajectories: number of each step's episode, ``[steps, num_envs]``.
        """
        shape = [self.num_envs, self.steps]
        root: dict[Any, Tensor] = {"observation": self.observation.permute(2, 0, 1)}
        following: dict[Any, Tensor] = {"observation": self.next_observation.permute(2, 0, 1)}
        for key, value in self.written.items():
            value = value.transpose(0, 1)
            if isinstance(key, tuple) and key[0] == "next":
                following[key[1] if len(key) == 2 else key[1:]] = value
            else:
                root[key] = value
        root[("collector", "traj_ids")] = trajectories.T
        for name in ("reward", "terminated", "truncated"):
            following[name] = getattr(self, name).T.unsqueeze(-1)
        following["done"] = following["terminated"] | following["truncated"]
        return TensorDict({**root, "next": TensorDict(following, shape)}, shape)


def write(
    part: Sequence[Tensor],
    time_step: int,
    observation: Tensor,
    step: TensorStep,
    written: Sequence[Tensor | None],
) -> None:
    """Write one step to the memory of some steps, in place.

    Args:
        part: of :meth:`TensorMemory.part`.
        time_step: number of the step in it.
        observation: acted on.
        step: of the environment.
        written: outputs of the policy; ``None`` where this step has none.
    """
    values = [
        observation.T,
        step.next_observation.T,
        step.reward,
        step.terminated,
        step.truncated,
        step.episode_return,
        step.episode_length,
    ]
    if len(part) > len(values) + len(written):
        values.append(step.env_steps)
    for memory, value in zip(part, [*values, *written]):
        if value is not None:
            memory[time_step].copy_(value)


class FinishedEpisodes:
    """A list of finished episodes on the device, read only on demand.

    It holds the last ``capacity`` episodes that were not taken; all are counted.

    Args:
        num_envs: number of environments.
        device: where batches come from.
        capacity: episodes it holds.
    """

    def __init__(self, num_envs: int, device: torch.device, capacity: int = 2**16) -> None:
        self.num_envs, self.capacity = num_envs, capacity
        self._ended = torch.zeros((), dtype=torch.int64, device=device)
        self._taken = 0
        # One place more than the capacity, for steps that end no episode.
        self._whole = torch.zeros(4, capacity + 1, dtype=torch.int64, device=device)
        self._returns = torch.zeros(capacity + 1, device=device)
        self._open_env_steps = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def add(self, memory: TensorMemory) -> None:
        """Take in a batch."""
        done, length = memory.terminated | memory.truncated, memory.length
        made = length if memory.env_steps is None else self._env_steps(done, memory.env_steps)
        envs = torch.arange(self.num_envs, device=done.device).expand_as(length)
        for start in range(0, len(done), max(self.capacity // self.num_envs, 1)):
            part = slice(start, start + max(self.capacity // self.num_envs, 1))
            flat = done[part].reshape(-1)
            places = (self._ended + flat.cumsum(0) - 1) % self.capacity
            places = torch.where(flat, places, self.capacity)
            values = [envs[part], length[part], made[part], memory.terminated[part].long()]
            whole = torch.stack([value.reshape(-1) for value in values])
            self._whole.scatter_(1, places.expand_as(whole), whole)
            self._returns.scatter_(0, places, memory.episode_return[part].reshape(-1).float())
            self._ended += flat.sum()

    def _env_steps(self, done: Tensor, env_steps: Tensor) -> Tensor:
        """Env steps since each episode began, ``[steps, num_envs]``."""
        made = env_steps.long().cumsum(0)
        at_ends = (made * done).cummax(0).values
        before = torch.cat([torch.zeros_like(made[:1]), at_ends[:-1]])
        since = made - before + self._open_env_steps * (before == 0)
        self._open_env_steps = torch.where(done[-1], torch.zeros_like(since[-1]), since[-1])
        return since

    def count(self) -> int:
        """Number of episodes that have ended; waits for the device."""
        return int(self._ended)

    def take(self) -> list[Episode]:
        """The episodes that ended since the last call; waits for the device."""
        ended = self.count()
        first = max(self._taken, ended - self.capacity)
        self._taken = ended
        places = torch.arange(first, ended, device=self._returns.device) % self.capacity
        whole, returns = self._whole[:, places].tolist(), self._returns[places].tolist()
        return [
            Episode(env, value, length, made, bool(terminated))
            for env, length, made, terminated, value in zip(*whole, returns)
        ]

    def restart(self) -> None:
        """Begin new episodes in all environments."""
        self._open_env_steps = torch.zeros_like(self._open_env_steps)

    def state_dict(self) -> dict[str, Tensor | int]:
        """Counts; episodes that were not taken belong to the collector's state."""
        return {"ended": self.count(), "open_env_steps": self._open_env_steps.cpu().clone()}

    def load_state_dict(self, state_dict: dict[str, Tensor | int]) -> None:
        """Restore :meth:`state_dict`."""
        self._taken = int(state_dict["ended"])
        self._ended.fill_(self._taken)
        self._open_env_steps.copy_(torch.as_tensor(state_dict["open_env_steps"]))


def keep_freed_memory() -> None:
    """Ask glibc to serve large blocks from its heap, and to keep the heap, in the whole process.

    Activations of some thousand environments take a megabyte. By default such a block is returned
    to the system as soon as it is free, and faulted in page by page when it is needed again, in
    every step.
    """
    if not sys.platform.startswith("linux"):
        return
    mmap_threshold, trim_threshold, gigabyte = -3, -1, 2**30  # names and numbers of mallopt(3)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for option in (mmap_threshold, trim_threshold):
            libc.mallopt(option, gigabyte)
