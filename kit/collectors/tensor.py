"""Collecting from environments written in torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from kit.collectors.acting import Acting
from kit.collectors.base import StepsCollector
from kit.collectors.blocks import Block, Function, keep_freed_memory
from kit.collectors.finished import FinishedEpisodes
from kit.collectors.policy import IS_INIT, Policy, PolicyRunner, Tensors
from kit.collectors.tensor_memory import TensorMemory, write
from kit.envs.episodes import Episode
from kit.envs.errors import EnvironmentFault
from kit.envs.spaces import Key, Leaf
from kit.envs.tensor import TENSOR_ENVS, EpisodeState, TensorCopies, TensorStep
from kit.envs.vector_env import VectorEnv
from kit.steps import SettingError
from kit.steps.errors import whole_number


@runtime_checkable
class StepsTensors(Protocol):
    """What the collector asks of a torch environment; see :class:`~kit.envs.tensor.TensorEnv`."""

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


class TensorCollector(StepsCollector):
    """Steps an environment written in torch, with nothing on the host in between.

    Several steps of policy, sampling, environment and the writing of the batch run as one flat
    program (on a GPU as one CUDA graph). Env steps, finished episodes and returns stay on the
    device until they are asked for. On a CPU a batch is checked for NaN; on a GPU that would wait.

    Args:
        create_env_fn: a torch environment, or one of ``make_env(..., vectorization="tensor")``, or
            a function that makes one.
        policy: module from TensorDict to TensorDict; ``None`` acts at random.
        frames_per_batch: see :class:`~kit.collectors.base.StepsCollector`, like the other counts.
        steps_per_env: see there.
        total_frames: see there.
        init_random_frames: see there.
        prefill_frames: see there.
        reset_at_each_iter: see there.
        exploration_policy: acts in place of the policy until ``exploration_frames``.
        exploration_frames: see there.
        seed: see there; environments are seeded when they are made, or by :meth:`set_seed`.
        device: the environment's, unless left out.
        storing_device: where batches are delivered; the environment's, unless told otherwise.
        exploration_type: whether actions are sampled.
        fast_policy: whether to replay blocks of steps.
        block: steps in one program.
        keep_memory: whether the process keeps freed memory (glibc), which doubles the speed of
            large batches on a CPU.

    Raises:
        SettingError: if the environment is not written in torch, or counts cannot be reached.
    """

    def __init__(
        self,
        create_env_fn: EnvBase | StepsTensors | Callable[[], Any],
        policy: Policy | None = None,
        *,
        frames_per_batch: int | None = None,
        steps_per_env: int | None = None,
        total_frames: int = -1,
        init_random_frames: int | None = None,
        prefill_frames: int = 0,
        reset_at_each_iter: bool = False,
        exploration_policy: Policy | None = None,
        exploration_frames: int = 0,
        seed: int = 0,
        device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        fast_policy: bool = True,
        block: int = 16,
        keep_memory: bool = True,
    ) -> None:
        self.env = as_tensor_env(create_env_fn)
        self.device = torch.device(self.env.device)
        if device is not None and torch.device(device).type != self.device.type:
            raise SettingError(
                "device", str(device), "is not the environment's", [str(self.device)]
            )
        super().__init__(
            self.env.num_envs,
            frames_per_batch=frames_per_batch,
            steps_per_env=steps_per_env,
            total_frames=total_frames,
            init_random_frames=init_random_frames,
            exploration_frames=exploration_frames,
            prefill_frames=prefill_frames,
            reset_at_each_iter=reset_at_each_iter,
            seed=seed,
            device=self.device,
        )
        self.storing_device = torch.device(storing_device or self.device)
        self.policy = policy
        self.block = whole_number("block", block, at_least=1)
        self._fast = fast_policy
        self._acting = Acting(
            self.env,
            policy,
            exploration_policy,
            init_random_frames=self.init_random_frames,
            exploration_frames=self.exploration_frames,
            exploration_type=exploration_type,
            device=self.device,
            fast=fast_policy,
        )
        self._written: dict[Key, Tensor] = {}
        self._blocks: dict[tuple[int, int], Block] = {}
        self._ended = FinishedEpisodes(self.num_envs, self.device)
        self._repeated = torch.zeros((), dtype=torch.int64, device=self.device)
        self._episode = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        if keep_memory and self.device.type == "cpu":
            keep_freed_memory()

    # ------------------------------------------------------------------ one batch
    def _collect_steps(self, steps: int) -> TensorDictBase:
        env = self.env
        if self.reset_at_each_iter and self._iter > 0:
            env.reset_tensors()
            self._restart()
        self._prepare()
        shape = (steps, env.uniform_size, self.num_envs)
        uniform = torch.rand(shape, generator=env.generator, dtype=env.dtype, device=self.device)
        observation = env.observe(env.episodes.physics)
        memory = TensorMemory(steps, observation, self._outputs(observation), self._repeats)
        start = 0
        for stretch in self._acting.stretches(self.policy_steps, steps):
            end = start + stretch.steps
            while start < end:
                start += self._run(stretch.runner, memory, uniform, range(start, end))
            if stretch.runner is None:
                self.random_policy_steps += stretch.steps * self.num_envs
        if self.device.type == "cpu":
            self._check_finite(memory)
        self._count(memory)
        batch = memory.tensordict(self._trajectories(memory))
        return batch if self.storing_device == self.device else batch.to(self.storing_device)

    def _prepare(self) -> None:
        """Forget blocks whose policy is no longer what was traced."""
        runners = [r for r in (self._acting.runner, self._acting.explorer) if r is not None]
        before = [runner.replays for runner in runners]
        self._acting.mode()
        kept = all(runner.replays for runner, was in zip(runners, before) if was)
        if not kept or not all(block.is_valid() for block in self._blocks.values()):
            self._blocks.clear()

    def _outputs(self, observation: Tensor) -> dict[Key, Tensor]:
        """Return one value of everything that is written besides what the environment gives."""
        if not self._written:
            runner = self._acting.runner
            if runner is None:
                drawn = self.env.full_action_spec.zero()
                self._written = {key: drawn.get(key) for key in self._acting.action_keys}
            else:
                values = runner.peek(self._seen(observation, self.env.episodes))
                self._written = dict(zip(runner.out_keys, values))
        return self._written

    def _run(
        self,
        runner: PolicyRunner | None,
        memory: TensorMemory,
        uniform: Tensor,
        steps: range,
    ) -> int:
        """Take the next of ``steps``, one block at most, and return how many."""
        fast = self._fast and (runner is None or runner.replays)
        start, count = steps.start, min(self.block, len(steps)) if fast else 1
        remembered = {} if runner is None else dict(runner.memory)
        function = self._steps(runner, count, fast, list(remembered))
        part = memory.part(start, count)
        inputs = (*self.env.episodes, uniform[start : start + count], *remembered.values(), *part)
        if fast:
            key = (id(runner), count)
            if key not in self._blocks:
                self._blocks[key] = Block(function, len(part))
            outputs = self._blocks[key](*inputs)
        else:
            outputs = function(*inputs)
        for present, after in zip(self.env.episodes, outputs):
            present.copy_(after)
        if runner is not None and fast:
            runner.memory = dict(zip(remembered, outputs[len(self.env.episodes) :]))
        return count

    def _steps(
        self, runner: PolicyRunner | None, count: int, fast: bool, remembered: list[Key]
    ) -> Function:
        """Return ``count`` steps of policy and environment as a function of tensors.

        It takes where the copies stand, uniform random numbers, what the policy remembers, and
        memory to write to; it returns where the copies stand then, and what is remembered.
        """
        env, acting, keys = self.env, self._acting, list(self._written)
        state = type(env.episodes)
        size = len(env.episodes)

        def steps(*tensors: Tensor) -> list[Tensor]:
            now, uniform = state(*tensors[:size]), tensors[size]
            first = size + 1 + len(remembered)
            part = tensors[first:]
            if runner is not None and fast:
                runner.memory = dict(zip(remembered, tensors[size + 1 : first]))
            for time_step in range(count):
                observation = env.observe(now.physics)
                seen = self._seen(observation, now)
                if runner is None:
                    drawn = env.full_action_spec.rand()
                    outputs = {key: drawn.get(key) for key in acting.action_keys}
                else:
                    values = runner.plainly(seen) if fast else runner(seen)
                    outputs = dict(zip(runner.out_keys, values))
                now, step = env.advance(now, outputs[acting.action_keys[0]], uniform[time_step])
                if runner is not None and runner.remembers:
                    runner.ended(step.terminated | step.truncated)
                outputs.setdefault(IS_INIT, seen[IS_INIT])
                write(part, time_step, observation, step, [outputs.get(key) for key in keys])
            after = [] if runner is None else [runner.memory[key] for key in remembered]
            return [*now, *after]

        return steps

    def _seen(self, observation: Tensor, episodes: EpisodeState) -> Tensors:
        starts = (episodes.episode_length == 0).unsqueeze(-1)
        return {"observation": observation, IS_INIT: starts}

    # ------------------------------------------------------------------ after a batch
    @property
    def _repeats(self) -> bool:
        return self.env.action_repeat > 1

    def _count(self, memory: TensorMemory) -> None:
        self.policy_steps += memory.steps * self.num_envs
        self._ended.add(
            memory.terminated,
            memory.truncated,
            memory.episode_return,
            memory.length,
            memory.env_steps,
        )
        if memory.env_steps is None:
            self._known_env_steps += memory.steps * self.num_envs
        else:
            self._repeated += memory.env_steps.sum()

    def _trajectories(self, memory: TensorMemory) -> Tensor:
        """Number episodes through the whole run: those of a copy are ``num_envs`` apart."""
        done = (memory.terminated | memory.truncated).long()
        ended = self._episode + done.cumsum(0)
        self._episode = ended[-1]
        copies = torch.arange(self.num_envs, device=self.device)
        return (ended - done) * self.num_envs + copies

    def _check_finite(self, memory: TensorMemory) -> None:
        for what, values in (("reward", memory.reward), ("observation", memory.next_observation)):
            if values.sum().isnan() and values.isnan().any():
                step, *_, copy = values.isnan().nonzero()[0].tolist()
                name = type(self.env).__name__
                length = int(memory.length[step, copy]) - 1
                what = f"returned NaN as {what}, {length} policy steps into its episode"
                raise EnvironmentFault(name, copy, what, self.policy_steps // self.num_envs + step)

    # Counts that are on the device; whoever asks for them waits for it.

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
        """Return the episodes that ended since the last call, and forget them.

        At most the last 65,536 of them are kept; all are counted.
        """
        self._finished += self._ended.take()
        return super().take_episodes()

    # ------------------------------------------------------------------ in and out
    def _restart(self) -> None:
        self._episode += 1
        self._ended.restart()
        self._acting.restart()

    def _seed_environments(self, seed: int) -> None:
        self.env.reset_tensors(seed)
        self._restart()

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Release the blocks; the collector cannot be used afterwards."""
        del timeout, close_env, raise_on_error
        self.closed = True
        self._blocks.clear()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return counters, random numbers, and the state of the environment; waits for it."""
        self._finished += self._ended.take()
        state = super().state_dict()
        state["ended"] = self._ended.state_dict()
        state["episode"] = self._episode.clone()
        state["acting"] = self._acting.state_dict()
        state["env"] = dict(self.env.state_dict())
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._ended.load_state_dict(state_dict["ended"])
        super().load_state_dict(state_dict)
        self._episode = state_dict["episode"].to(self.device).clone()
        self._acting.load_state_dict(state_dict["acting"])
        self.env.load_state_dict(state_dict["env"])


def as_tensor_env(create_env_fn: Any) -> StepsTensors:
    """Return the torch environment, made if need be.

    Raises:
        SettingError: if it is another kind of environment, or has something around it that a torch
            environment cannot have.
    """
    env = create_env_fn
    if not isinstance(env, (EnvBase, StepsTensors)) and callable(env):
        env = env()
    if isinstance(env, VectorEnv):
        if env.normalizer is not None:
            raise SettingError(
                "normalize_observation", True, "is not possible on tensors", [False],
                "or collector='vector'",
            )  # fmt: skip
        env = env.copies.env if isinstance(env.copies, TensorCopies) else env
    if not isinstance(env, StepsTensors):
        raise SettingError(
            "collector",
            "tensor",
            f"needs an environment written in torch, not {type(env).__name__}",
            "make_env(..., vectorization='tensor') with one of: " + ", ".join(TENSOR_ENVS),
        )
    return env
