"""Collecting from environments that run on the host."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType

from kit.collectors.base import KitCollector
from kit.collectors.policy import PolicyRunner, Tensors
from kit.envs.copies import StepArrays
from kit.envs.episodes import EpisodeAccounts
from kit.envs.errors import EnvironmentFault
from kit.envs.spaces import Arrays, Key
from kit.envs.vector_env import VectorEnv

Policy = Callable[[TensorDictBase], TensorDictBase]


class VectorCollector(KitCollector):
    """Steps a :class:`~kit.envs.VectorEnv` with a policy and yields batches.

    Environments write into arrays that become the batch; the policy is called with plain tensors
    (see :class:`~kit.collectors.policy.PolicyRunner`); one TensorDict is built per batch. It takes
    the place of TorchRL's ``Collector`` in TorchRL's scripts and in its ``Trainer``.

    Args:
        create_env_fn: the environment, or a function that makes it.
        policy: module from TensorDict to TensorDict; ``None`` acts at random.
        frames_per_batch: see :class:`~kit.collectors.base.KitCollector`, like the other counts.
        steps_per_env: see there.
        total_frames: see there.
        init_random_frames: see there.
        prefill_frames: see there.
        reset_at_each_iter: see there.
        seed: see there; environments are seeded when they are made, or by :meth:`set_seed`.
        device: where batches are delivered and, unless told otherwise, the policy runs.
        policy_device: where the policy runs.
        storing_device: where batches are delivered.
        exploration_type: whether actions are sampled.
        reuse: whether all batches share one memory, each overwriting the one before. Otherwise
            the memory belongs to the receiver.
        fast_policy: whether to take the policy past TensorDict where possible.

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
        create_env_fn: VectorEnv | Callable[[], VectorEnv],
        policy: Policy | None = None,
        *,
        frames_per_batch: int | None = None,
        steps_per_env: int | None = None,
        total_frames: int = -1,
        init_random_frames: int | None = None,
        prefill_frames: int = 0,
        reset_at_each_iter: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        policy_device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        reuse: bool = False,
        fast_policy: bool = True,
    ) -> None:
        env = create_env_fn if isinstance(create_env_fn, VectorEnv) else create_env_fn()
        super().__init__(
            env.num_envs,
            frames_per_batch=frames_per_batch,
            steps_per_env=steps_per_env,
            total_frames=total_frames,
            init_random_frames=init_random_frames,
            prefill_frames=prefill_frames,
            reset_at_each_iter=reset_at_each_iter,
            seed=seed,
        )
        self.env = env
        self.policy = policy
        self.policy_device = torch.device(policy_device or device or "cpu")
        self.storing_device = torch.device(storing_device or device or "cpu")
        self.exploration_type = exploration_type
        self.reuse = reuse
        self._action_keys = [leaf.key for leaf in env.action_leaves]
        self._accounts = EpisodeAccounts(self.num_envs)
        self._trajectories = np.arange(self.num_envs)
        self._memory: _Memory | None = None
        self._runner: PolicyRunner | None = None
        if policy is not None:
            self._runner = PolicyRunner(
                policy,
                [leaf.key for leaf in env.observation_leaves],
                self.num_envs,
                exploration_type=exploration_type,
                fast=fast_policy,
            )

    # ------------------------------------------------------------------ one batch
    def _collect(self, steps: int) -> TensorDictBase:
        if self.reset_at_each_iter and self._iter > 0:
            self.env.restart()
            self._accounts.restart()
        memory = self._allocate(steps)
        before, written = self.policy_steps, []
        random_steps = self._random_steps(steps)
        with self._mode():
            for step, (observation, arrays) in enumerate(zip(memory.observed, memory.rows)):
                outputs = self._act(observation) if step >= random_steps else self._act_at_random()
                written.append(outputs)
                try:
                    self.env.step_arrays(self._actions(outputs), arrays)
                except EnvironmentFault as fault:
                    taken = before // self.num_envs + step
                    raise EnvironmentFault(fault.name, fault.copy, fault.what, taken) from fault
        self.policy_steps += steps * self.num_envs
        self.random_policy_steps += random_steps * self.num_envs
        self._check_finite(memory, before)
        self._account(memory)
        return self._batch(memory, written[:random_steps], written[random_steps:])

    def _random_steps(self, steps: int) -> int:
        """How many of the next ``steps`` of each copy have random actions."""
        if self._runner is None:
            return steps
        left = max(self.init_random_frames - self.policy_steps, 0) // self.num_envs
        return min(left, steps)

    def _mode(self) -> Any:
        """Inference mode is cheaper, but a first call may have to make parameters."""
        if self._runner is None:
            return torch.no_grad()
        self._runner.prepare()
        return torch.inference_mode() if self._runner.replays else torch.no_grad()

    def _act(self, observation: Mapping[Key, Tensor]) -> Sequence[Tensor]:
        assert self._runner is not None
        if self.policy_device.type != "cpu":
            observation = {k: v.to(self.policy_device) for k, v in observation.items()}
        return self._runner(observation)

    def _actions(self, outputs: Sequence[Tensor]) -> Arrays:
        """The actions among what the policy wrote, for the environments."""
        if len(outputs) == len(self._action_keys):
            return {key: _array(value) for key, value in zip(self._action_keys, outputs)}
        assert self._runner is not None
        written = self._runner.out_keys
        return {key: _array(outputs[written.index(key)]) for key in self._action_keys}

    def _act_at_random(self) -> Sequence[Tensor]:
        sampled = self.env.full_action_spec.rand()
        return [sampled.get(key) for key in self._action_keys]

    def _allocate(self, steps: int) -> _Memory:
        present = self.env.start()
        if self.reuse and self._memory is not None and self._memory.steps == steps:
            self._memory.clear()
        else:
            self._memory = _Memory(self.env, steps)
        self._memory.begin(present)
        return self._memory

    # ------------------------------------------------------------------ after a batch
    def _check_finite(self, memory: _Memory, before: int) -> None:
        """Refuse NaN, naming the copy and the step; ``before`` are the policy steps until then."""
        for what, values in [("reward", memory.reward), *memory.next_observation.items()]:
            if values.dtype.kind != "f" or not np.isnan(values.sum()):
                continue
            found = np.argwhere(np.isnan(values))
            if len(found):
                step, copy = int(found[0][0]), int(found[0][1])
                length = int(self._accounts.lengths[copy]) + step
                ends = np.flatnonzero(
                    memory.terminated[:step, copy] | memory.truncated[:step, copy]
                )
                length = step - int(ends[-1]) - 1 if len(ends) else length
                raise EnvironmentFault(
                    self.env.name,
                    copy,
                    f"returned NaN as {what}, {length} policy steps into its episode",
                    before // self.num_envs + step,
                )

    def _account(self, memory: _Memory) -> None:
        reward = memory.reward if memory.raw_reward is None else memory.raw_reward
        finished = self._accounts.add(reward, memory.terminated, memory.truncated, memory.env_steps)
        self.env_steps += int(memory.env_steps.sum())
        self.episodes += len(finished)
        self._finished += finished

    def _batch(
        self, memory: _Memory, at_random: list[Sequence[Tensor]], acted: list[Sequence[Tensor]]
    ) -> TensorDictBase:
        ended = memory.terminated | memory.truncated
        batch: dict[Any, Tensor] = {
            key: _rows(array[:-1]) for key, array in memory.observation.items()
        }
        batch |= self._written(at_random, acted)
        batch[("collector", "traj_ids")] = _rows(self._trajectory_ids(ended))
        done = torch.from_numpy(ended).T.unsqueeze(-1)
        following: dict[Key, Tensor] = {
            key: _rows(array) for key, array in memory.next_observation.items()
        }
        following["reward"] = _rows(memory.reward).unsqueeze(-1)
        following["done"] = done
        following["terminated"] = _rows(memory.terminated).unsqueeze(-1)
        following["truncated"] = _rows(memory.truncated).unsqueeze(-1)
        shape = [self.num_envs, memory.steps]
        tensordict = TensorDict({**batch, "next": TensorDict(following, shape)}, shape)
        if self.storing_device.type != "cpu" or self.policy_device.type != "cpu":
            tensordict = tensordict.to(self.storing_device)
        return tensordict

    def _written(self, at_random: list[Sequence[Tensor]], acted: list[Sequence[Tensor]]) -> Tensors:
        """Stack what was written at each step, copies first.

        Random steps wrote actions only; the policy's other outputs are zero there.
        """
        keys = self._runner.out_keys if acted and self._runner is not None else self._action_keys
        stacked: Tensors = {}
        for place, key in enumerate(keys):
            values = [outputs[place] for outputs in acted]
            if at_random:
                first = [
                    outputs[self._action_keys.index(key)]
                    if key in self._action_keys
                    else torch.zeros_like(values[0])
                    for outputs in at_random
                ]
                values = [*first, *values]
            stacked[key] = torch.stack(values).transpose(0, 1)
        return stacked

    def _trajectory_ids(self, ended: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Number episodes through the whole run: a new number for each that begins."""
        ids = np.empty(ended.shape, np.int64)
        begun = np.zeros_like(ended)
        begun[1:] = ended[:-1]
        if not ended.any():
            ids[...] = self._trajectories
            return ids
        following = int(self._trajectories.max()) + 1
        for copy in np.flatnonzero(ended.any(axis=0)):
            starts = begun[:, copy].cumsum()
            numbers = np.arange(following, following + starts[-1] + 1)
            ids[:, copy] = np.where(starts, numbers[starts - 1], self._trajectories[copy])
            following += int(starts[-1])
            self._trajectories[copy] = ids[-1, copy]
            if ended[-1, copy]:
                self._trajectories[copy] = following
                following += 1
        steady = ~ended.any(axis=0)
        ids[:, steady] = self._trajectories[steady]
        return ids

    # ------------------------------------------------------------------ in and out
    def _seed_environments(self, seed: int) -> None:
        self.env.set_seed(seed)

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
        state["trajectories"] = self._trajectories.tolist()
        state["env"] = self.env.full_state()
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Where the environments could not give their state, their open episodes are closed and new
        ones begin; ``exact_resume`` is then false.
        """
        super().load_state_dict(state_dict)
        self._accounts.load_state_dict(state_dict["accounts"])
        self._trajectories[...] = state_dict["trajectories"]
        self.exact_resume = self.env.load_full_state(state_dict["env"])
        if not self.exact_resume:
            self._accounts.restart()
            self._trajectories += int(self._trajectories.max()) + 1

    exact_resume = True
    """whether the last :meth:`load_state_dict` put every environment back where it was."""


class _Memory:
    """Arrays of one batch, time first; rows are handed to the environments step by step."""

    def __init__(self, env: VectorEnv, steps: int) -> None:
        n = env.num_envs
        self.steps = steps
        self.observation: dict[Key, NDArray[Any]] = {}
        self.next_observation: dict[Key, NDArray[Any]] = {}
        rows: dict[Key, tuple[Tensor, ...]] = {}
        for leaf in env.observation_leaves:
            array = np.empty((steps + 1, n, *leaf.shape), leaf.dtype)
            self.observation[leaf.key] = array
            self.next_observation[leaf.key] = np.empty((steps, n, *leaf.shape), leaf.dtype)
            rows[leaf.key] = torch.from_numpy(array).unbind(0)
        self.reward = np.empty((steps, n), np.float32)
        self.raw_reward = np.empty((steps, n), np.float32) if env.needs_raw_reward else None
        self.terminated = np.zeros((steps, n), np.bool_)
        self.truncated = np.zeros((steps, n), np.bool_)
        self.env_steps = np.ones((steps, n), np.int32)
        # What each step reads and writes, as views of the arrays above.
        self.observed = [{key: views[t] for key, views in rows.items()} for t in range(steps)]
        self.rows = [self._row(step) for step in range(steps)]

    def clear(self) -> None:
        """Make ready for another batch in the same memory."""
        self.terminated[...] = False
        self.truncated[...] = False
        self.env_steps[...] = 1

    def begin(self, present: Mapping[Key, NDArray[Any]]) -> None:
        """Put the observation to act on first in its place."""
        for key, array in present.items():
            self.observation[key][0] = array

    def _row(self, step: int) -> StepArrays:
        return StepArrays(
            {key: array[step] for key, array in self.next_observation.items()},
            {key: array[step + 1] for key, array in self.observation.items()},
            self.reward[step],
            self.terminated[step],
            self.truncated[step],
            self.env_steps[step],
            None if self.raw_reward is None else self.raw_reward[step],
        )


def _array(tensor: Tensor) -> NDArray[Any]:
    if tensor.is_cpu:
        return tensor.numpy()  # type: ignore[no-any-return]
    return tensor.cpu().numpy()  # type: ignore[no-any-return]


def _rows(array: NDArray[Any]) -> Tensor:
    """Return a time-first array as a tensor with copies first, sharing its memory."""
    return torch.from_numpy(array).transpose(0, 1)
