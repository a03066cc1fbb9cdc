"""Collecting from environments written in torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from kit.collectors.acting import Acting
from kit.collectors.base import StepsCollector
from kit.collectors.diverged import check_policy
from kit.collectors.finished import FinishedEpisodes
from kit.collectors.policy import Policy, Tensors
from kit.collectors.tensor_memory import TensorMemory
from kit.collectors.tensor_steps import StepsTensors, TensorSteps
from kit.envs.episodes import Episode
from kit.envs.errors import EnvironmentFault
from kit.envs.normalize import Normalizer
from kit.envs.tensor import TENSOR_ENVS, TensorBackend
from kit.envs.tensor.normalize import Statistics, TensorNormalizer
from kit.envs.vector_env import VectorEnv
from kit.fast.block import keep_freed_memory
from kit.steps import SettingError
from kit.steps.errors import whole_number


class TensorCollector(StepsCollector):
    """Steps an environment written in torch, with nothing on the host in between.

    Several steps of policy, sampling, environment and the writing of the batch run as one flat
    program (on a GPU as one CUDA graph). Env steps, finished episodes and returns stay on the
    device until they are asked for. On a CPU a batch is checked for NaN; on a GPU that would wait.
    Running normalisation that was asked of ``make_env`` is part of the program, too.

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
        self.env, self._outer = as_tensor_env(create_env_fn)
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
        self._normalization = self._normalized()
        self._steps = TensorSteps(
            self.env,
            self._acting,
            self._normalization,
            block=whole_number("block", block, at_least=1),
            fast=fast_policy,
        )
        self._ended = FinishedEpisodes(self.num_envs, self.device)
        self._repeated = torch.zeros((), dtype=torch.int64, device=self.device)
        self._episode = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._begun = self._outer is not None and self._outer.is_started
        if keep_memory and self.device.type == "cpu":
            keep_freed_memory()

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
        for runner, count in self._acting.sources(self.policy_steps, steps):
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
        """The normaliser on the host, with the statistics of now; waits for the device."""
        normalizer = None if self._outer is None else self._outer.normalizer
        if normalizer is not None:
            normalizer.bring_here()
        return normalizer

    def _normalized(self) -> TensorNormalizer | None:
        if self._outer is None or self._outer.normalizer is None:
            return None
        size = self.env.observe(self.env.episodes.physics).shape[-1]
        return TensorNormalizer(self._outer.normalizer, self.num_envs, size, self.device)

    def _begin(self) -> bool:
        """Take in the observations of a reset; return whether statistics change with the batch."""
        if self._outer is None or self._normalization is None:
            return False
        if not self._begun and self._outer.training:
            seen = self.env.observe(self.env.episodes.physics)
            before = self._normalization.statistics
            self._normalization.store(self._normalization.first(before, seen))
        self._begun = True
        return bool(self._outer.training)

    # ------------------------------------------------------------------ after a batch
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

    def _check_policy(self, memory: TensorMemory) -> None:
        written = {key: value.transpose(0, 1) for key, value in memory.written.items()}
        seen: Tensors = {"observation": memory.observation.permute(2, 0, 1)}
        taken = self.policy_steps // self.num_envs
        check_policy(written, seen, self._acting.action_keys, taken)

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
        self._begun = False
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
        self._steps.clear()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return counters, random numbers, and the state of the environment; waits for it."""
        self._finished += self._ended.take()
        state = super().state_dict()
        state["ended"] = self._ended.state_dict()
        state["episode"] = self._episode.clone()
        state["acting"] = self._acting.state_dict()
        state["env"] = dict(self.env.state_dict())
        state["begun"] = self._begun
        if self._normalization is not None:
            state["statistics"] = [t.clone() for t in self._normalization.statistics]
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._ended.load_state_dict(state_dict["ended"])
        super().load_state_dict(state_dict)
        self._episode = state_dict["episode"].to(self.device).clone()
        self._acting.load_state_dict(state_dict["acting"])
        self.env.load_state_dict(state_dict["env"])
        self._begun = bool(state_dict["begun"])
        if self._normalization is not None:
            self._normalization.store(Statistics(*state_dict["statistics"]))


def as_tensor_env(create_env_fn: Any) -> tuple[StepsTensors, VectorEnv | None]:
    """Return the torch environment, made if need be, and the vector environment it was in.

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
