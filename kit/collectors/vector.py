"""Collecting from environments that run on the host."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from kit.collectors.acting import Acting
from kit.collectors.base import StepsCollector
from kit.collectors.diverged import check_policy
from kit.collectors.memory import BatchMemory, EpisodeIds
from kit.collectors.policy import Policy, Tensors
from kit.collectors.stretches import Stretch
from kit.envs.episodes import EpisodeStatistics
from kit.envs.errors import EnvironmentFault
from kit.envs.make import make_env
from kit.envs.vector_env import VectorEnv


class VectorCollector(StepsCollector):
    """Steps environments with a policy and yields batches ``[num_envs, steps_per_env]``.

    Environments write into arrays that become the batch; the policy is called with plain tensors
    (see :class:`~kit.collectors.policy.PolicyRunner`); one TensorDict is built per batch. It takes
    the place of TorchRL's ``Collector`` in TorchRL's scripts and in its ``Trainer``.

    Args:
        create_env_fn: the environment, or a function that makes it; one of TorchRL is taken too,
            at TorchRL's cost.
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
        device: where batches are delivered and, unless told otherwise, the policy runs.
        policy_device: where the policy runs.
        storing_device: where batches are delivered.
        exploration_type: whether actions are sampled.
        reuse: whether all batches share one memory, each overwriting the one before. Otherwise
            the memory belongs to the receiver.
        fast_policy: whether to take the policy past TensorDict where possible.
        exact_policy: whether its results have to be bitwise those of the policy as a module.
            Otherwise NumPy may make the operations of a small policy, which is faster and rounds
            differently (see :class:`~kit.collectors.in_numpy.NumpyProgram`).

    Raises:
        SettingError: if counts cannot be reached exactly or the policy does not fit.

    Examples:
        >>> from kit.envs import make_env
        >>> env = make_env("CartPole-v1", num_envs=2)
        >>> collector = VectorCollector(env, None, frames_per_batch=10, total_frames=20)
        >>> [batch.shape for batch in collector]
        [torch.Size([2, 5]), torch.Size([2, 5])]
    """

    def __init__(
        self,
        create_env_fn: EnvBase | Callable[[], EnvBase],
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
        policy_device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        reuse: bool = False,
        fast_policy: bool = True,
        exact_policy: bool = False,
    ) -> None:
        env = as_vector_env(create_env_fn)
        self.policy_device = torch.device(policy_device or device or "cpu")
        self.storing_device = torch.device(storing_device or device or "cpu")
        super().__init__(
            env.num_envs,
            frames_per_batch=frames_per_batch,
            steps_per_env=steps_per_env,
            total_frames=total_frames,
            init_random_frames=init_random_frames,
            exploration_frames=exploration_frames,
            prefill_frames=prefill_frames,
            reset_at_each_iter=reset_at_each_iter,
            seed=seed,
            device=self.policy_device,
        )
        self.env, self.policy, self.reuse = env, policy, reuse
        self.exact_policy = exact_policy or not fast_policy
        self._acting = Acting(
            env,
            policy,
            exploration_policy,
            init_random_frames=self.init_random_frames,
            exploration_frames=self.exploration_frames,
            exploration_type=exploration_type,
            device=self.policy_device,
            fast=fast_policy,
            in_numpy=not self.exact_policy,
        )
        self._accounts = EpisodeStatistics(self.num_envs)
        self._trajectories = EpisodeIds(self.num_envs)
        self._memory: BatchMemory | None = None

    # ------------------------------------------------------------------ one batch
    def _collect_steps(self, steps: int) -> TensorDictBase:
        if self.reset_at_each_iter and self._iter > 0:
            self.env.restart()
            self._restart()
        memory = self._allocate(steps)
        try:
            with self._acting.mode({k: array[0] for k, array in memory.observation.items()}):
                stretches = self._acting.stretches(self.policy_steps, steps)
                self._take(memory, stretches)
            written = self._check(memory, stretches)
        except BaseException:
            self.env.abandon()  # how far its copies came is not known, and nothing was counted
            self._restart()
            raise
        self._count(memory, stretches)
        batch = memory.tensordict(written, self._trajectories.number(memory.ended))
        if self.storing_device.type != "cpu" or self.policy_device.type != "cpu":
            batch = batch.to(self.storing_device)
        return batch

    def _take(self, memory: BatchMemory, stretches: list[Stretch]) -> None:
        """Take the steps of a batch."""
        start = 0
        try:
            for stretch in stretches:
                stretch.begin(memory.acted_on(start, stretch.steps))
                results = memory.results(start, stretch.steps)
                self.env.step_through(stretch, results, self._acting.following(stretch))
                start += stretch.steps
        except EnvironmentFault as fault:
            step = sum(stretch.taken for stretch in stretches) - 1
            raise fault.at(self.policy_steps // self.num_envs + step) from fault

    def _check(self, memory: BatchMemory, stretches: list[Stretch]) -> Tensors:
        """Refuse NaN, a policy's first; return what it wrote, ``[num_envs, steps, ...]``."""
        taken = self.policy_steps // self.num_envs
        seen = memory.seen()
        written = self._acting.written(stretches, {key: v[:, 0] for key, v in seen.items()})
        check_policy(written, seen, self._acting.action_keys, taken)
        memory.check_finite(self.env.name, self._accounts, taken)
        return written

    def _allocate(self, steps: int) -> BatchMemory:
        present = self.env.start()
        if self.reuse and self._memory is not None and self._memory.steps == steps:
            self._memory.clear()
        else:
            self._memory = BatchMemory(self.env, steps)
        self._memory.begin(present)
        return self._memory

    def _count(self, memory: BatchMemory, stretches: list[Stretch]) -> None:
        finished = self._accounts.add(
            memory.episode_rewards(), memory.terminated, memory.truncated, memory.env_steps
        )
        at_random = sum(stretch.steps for stretch in stretches if stretch.runner is None)
        self.policy_steps += memory.steps * self.num_envs
        self.random_policy_steps += at_random * self.num_envs
        self.env_steps += int(memory.env_steps.sum())
        self.environment_errors = self.env.backend.faults
        self.episodes += len(finished)
        self._finished += finished

    def _restart(self) -> None:
        """All copies have begun new episodes."""
        self._accounts.restart()
        self._trajectories.restart()
        self._acting.restart()

    # ------------------------------------------------------------------ in and out
    def _seed_environments(self, seed: int) -> None:
        self.env.set_seed(seed)
        self._restart()

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Close the environments; the collector cannot be used afterwards."""
        del timeout
        if self.closed:
            return
        self.closed = True
        if close_env:
            with contextlib.nullcontext() if raise_on_error else contextlib.suppress(Exception):
                self.env.close(raise_if_closed=False)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return counters, random numbers, open episodes and the state of the environments."""
        state = super().state_dict()
        state["accounts"] = self._accounts.state_dict()
        state["trajectories"] = self._trajectories.present.tolist()
        state["acting"] = self._acting.state_dict()
        state["env"] = self.env.full_state()
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Where the environments could not give their state, their open episodes are closed and new
        ones begin; ``exact_resume`` is then false.
        """
        super().load_state_dict(state_dict)
        self._accounts.load_state_dict(state_dict["accounts"])
        self._trajectories.present[...] = state_dict["trajectories"]
        self._acting.load_state_dict(state_dict["acting"])
        self.exact_resume = self.env.load_full_state(state_dict["env"])
        if not self.exact_resume:
            self._restart()


def as_vector_env(create_env_fn: EnvBase | Callable[[], EnvBase]) -> VectorEnv:
    """Return the environment, made if need be, as the kit steps it."""
    env = create_env_fn if isinstance(create_env_fn, EnvBase) else create_env_fn()
    return env if isinstance(env, VectorEnv) else make_env(env)
