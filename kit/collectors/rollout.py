"""Rollouts in host environments, and the collector that returns fixed-length batches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from kit.collectors.actor import NO_CONTEXT, ActionSelector
from kit.collectors.base import StepsCollector, check_policy
from kit.collectors.policy import Policy, Tensors
from kit.collectors.rollout_buffer import (
    CHUNK,
    SMALL,
    EpisodeIds,
    MaskCheck,
    RolloutBuffer,
    RolloutViews,
    Row,
)
from kit.envs.backends.base import Mask, StepArrays
from kit.envs.episodes import Episode, EpisodeStatistics
from kit.envs.errors import EnvError
from kit.envs.make import make_env
from kit.envs.spaces import Arrays
from kit.envs.vector_env import VectorEnv


class ActiveEnvs:
    """Selects the environments that take the next step of a rollout. By default, all do."""

    policy_steps: int
    """Total number of policy steps in all environments so far."""
    active: Mask | None = None
    """Mask of the environments that take the next step. If ``None``, all do."""
    freeze_mask: Mask | None = None
    """Equal to ``active`` if the other environments can skip steps, else ``None``."""
    done = False
    """Whether the rollout is finished."""

    def __init__(self, num_envs: int, policy_steps: int = 0) -> None:
        self.num_envs, self.policy_steps = num_envs, policy_steps

    def stepped(self, result: StepArrays) -> None:
        """Record a completed step."""
        self.policy_steps += self.num_envs

    def begins(self, result: StepArrays) -> Mask:
        """Return a mask of the environments whose next step starts an episode."""
        return result.terminated | result.truncated


def rollout(
    env: VectorEnv,
    actor: ActionSelector,
    rows: Iterable[Row],
    schedule: ActiveEnvs,
    *,
    rewards: bool = True,
) -> None:
    """Step environments until the schedule is done or no rows are left.

    Args:
        env: environments to step.
        actor: selects the actions.
        rows: observation and result arrays for each step.
        schedule: selects the environments that take each step.
        rewards: whether running reward normalisation is applied at each step.

    Raises:
        EnvError: if an environment fails.
    """
    recurrent = actor.is_recurrent
    for observation, row in rows:
        seen = env.observed(observation) if env.raw else observation
        actions = actor(seen, schedule.policy_steps, schedule.active)
        env.step_arrays(actions, row, schedule.freeze_mask, rewards=rewards, played=schedule.active)
        schedule.stepped(row)
        if recurrent:
            actor.end_episodes(schedule.begins(row))
        if schedule.done:
            return


class VectorCollector(StepsCollector):
    """Steps environments with a policy and yields batches ``[num_envs, steps_per_env]``.

    Environments write into arrays that become the batch, and the policy is called with plain
    tensors or arrays. The collector can replace TorchRL's ``Collector`` in TorchRL's scripts and
    ``Trainer``.

    Args:
        create_env_fn: environment, or function that creates an environment. TorchRL environments
            are supported, but do not run faster.
        policy: module that takes and returns a TensorDict; ``None``: random actions.
        reuse: whether each batch overwrites the memory of the previous batch. Otherwise, the caller
            owns each batch.
        reset_at_each_iter: whether each batch starts new episodes in all environments.
        **settings: arguments for :class:`~kit.collectors.StepsCollector`, such as
            ``frames_per_batch``, ``total_frames`` and ``device``.

    Raises:
        SettingError: if a step count cannot be reached exactly or the policy is incompatible.

    Examples:
        >>> from kit.envs import make_env
        >>> env = make_env("CartPole-v1", num_envs=2)
        >>> collector = VectorCollector(env, None, frames_per_batch=10, total_frames=20)
        >>> [batch.shape for batch in collector]
        [torch.Size([2, 5]), torch.Size([2, 5])]
    """

    collects_on_host = True

    _buffer: RolloutBuffer | None = None
    _batches: RolloutViews | None = None
    _gives_away = False
    _left: Arrays | None = None  # last observation, where the next batch continues

    def __init__(
        self,
        create_env_fn: EnvBase | Callable[[], EnvBase],
        policy: Policy | None = None,
        *,
        reuse: bool = False,
        reset_at_each_iter: bool = False,
        **settings: Any,
    ) -> None:
        env = as_vector_env(create_env_fn)
        super().__init__(env.num_envs, **settings)
        self.env, self.policy, self.reuse = env, policy, reuse
        self.reset_at_each_iter = reset_at_each_iter
        self._create_actor()
        self._check_masks = MaskCheck(env)
        self._statistics = EpisodeStatistics(self.num_envs)
        self._infos: dict[tuple[int, int], Mapping[str, float]] = {}  # of uncounted steps
        self._episode_ids = EpisodeIds(self.num_envs)

    # ------------------------------------------------------------------ batch collection
    def deliver_raw(self, raw: bool) -> bool:
        """Set whether batches are raw or normalised. Both are always supported."""
        self.env.leave_raw(raw)
        return True

    def _prepared(self) -> AbstractContextManager[Any]:
        self._actor.prepare()
        ready = self._actor.is_ready(self.policy_steps, self.steps_per_env)
        if ready and not (self.is_prefill or self.env.backend.uses_torch):
            return NO_CONTEXT
        return super()._prepared()

    def _collect_steps(self, steps: int) -> TensorDictBase:
        self.continues_episodes = self.env.is_at(self._left) and not self.reset_at_each_iter
        if not self.continues_episodes:  # drop the open episodes
            self.env.abandon()
            self._restart()
        buffer = self._begin(steps)
        schedule = ActiveEnvs(self.num_envs, self.policy_steps)
        try:
            with self._actor.begin(self.policy_steps, steps, buffer.actions):
                alone = steps == 1  # normalising a single reward directly is three times as fast
                rollout(self.env, self._actor, buffer.rows, schedule, rewards=alone)
            self._left = buffer.rows[-1][1].observation
            if not alone:
                self.env.normalize_rewards(buffer.whole)
            buffer.end(self._episode_ids)
            outputs = self._checked_outputs(buffer)
        except BaseException as error:
            self.env.abandon()  # the environments' state is unknown, and nothing was counted
            self._buffer = None
            if isinstance(error, EnvError):
                raise error.at(schedule.policy_steps // self.num_envs) from error
            raise
        assert self._batches is not None
        batch = self._batches.take(outputs, self._episode_ids)
        self._count(buffer)
        return batch if self.storing_device.type == "cpu" else batch.to(self.storing_device)

    def _begin(self, steps: int) -> RolloutBuffer:
        """Return the buffer for the next batch."""
        buffer, shown = self._buffer, self._batches is not None and not self._batches.copied
        kept = self._gives_away or (shown and not self.reuse)  # the caller may keep the last batch
        if buffer is None or buffer.steps != steps or kept:
            self._count_batches()
            numpy = self._actor.numpy
            buffer = RolloutBuffer(self.env, steps, None if numpy is None else numpy.actions)
            size = sum(array.nbytes for array in buffer.entries().values())
            self._gives_away = size > SMALL and not self.reuse
            self._buffer, self._batches = buffer, None
        copied = not (self.reuse or self._gives_away)
        if self._batches is None or self._batches.copied != copied:
            self._count_batches()
            self._batches = None
        if self._batches is None or (self._batches.is_full and copied):
            count = 1 if self._gives_away else max(CHUNK // steps, 1)
            self._batches = RolloutViews(buffer, count, copied=copied)
        elif self._batches.is_full:
            self._batches.rewind()
        buffer.begin(shown=shown)
        return buffer

    def _checked_outputs(self, buffer: RolloutBuffer) -> Tensors:
        """Check the policy's outputs and then the environments for NaN; return the outputs."""
        taken = self.policy_steps // self.num_envs
        outputs, doubtful = self._actor.outputs(), buffer.may_be_infinite()
        if checked := buffer.doubtful_actions() | outputs if doubtful else outputs:
            check_policy(checked, buffer.acted_on, self._actor.action_keys, taken)
        if doubtful and buffer.has_infinite():
            self._count_batches()
            buffer.check_finite(self.env.name, self._statistics, taken)
        self._check_masks(buffer.acted_on, taken)
        return outputs

    def _count(self, buffer: RolloutBuffer) -> None:
        frames = buffer.steps * self.num_envs
        self.random_policy_steps += self._actor.random_steps(self.policy_steps, frames)
        self.policy_steps += frames
        self.environment_errors = self.env.backend.faults
        assert self._batches is not None
        if infos := self.env.take_infos():
            earlier = self._batches.uncounted_steps - buffer.steps
            self._infos |= {(earlier + step, env): info for (step, env), info in infos.items()}
        if self._batches.is_full:
            self._count_batches()

    def _count_batches(self) -> None:
        """Update the env step and episode counts with all batches that are not yet counted."""
        if self._batches is None or not self._batches.uncounted_steps:
            return
        reward, terminated, truncated, env_steps = self._batches.uncounted()
        infos, self._infos = self._infos, {}
        finished = self._statistics.add(reward, terminated, truncated, env_steps, infos)
        self._env_steps += int(env_steps.sum())
        self._episodes += len(finished)
        self._finished += finished

    @property
    def env_steps(self) -> int:
        """Number of env steps so far."""
        self._count_batches()
        return self._env_steps

    @env_steps.setter
    def env_steps(self, value: int) -> None:
        self._env_steps = value

    @property
    def episodes(self) -> int:
        """Number of episodes that have ended so far."""
        self._count_batches()
        return self._episodes

    @episodes.setter
    def episodes(self, value: int) -> None:
        self._episodes = value

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call."""
        self._count_batches()
        return super().take_episodes()

    def _restart(self) -> None:
        """Reset statistics and hidden state. Called when all environments start new episodes."""
        self._count_batches()
        self._statistics.restart()
        self._episode_ids.restart()
        self._actor.restart()

    # ------------------------------------------------------------------ seed and state
    def _seed_environments(self, seed: int) -> None:
        self.env.set_seed(seed)
        self._actor.seeded()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the counters, RNG state, open episodes and state of the environments."""
        self._count_batches()
        state = super().state_dict()
        state["statistics"] = self._statistics.state_dict()
        state["continues_episodes"] = self.env.is_at(self._left)
        state["episode_ids"] = self._episode_ids.present.tolist()
        state["actor"] = self._actor.state_dict()
        state["env"] = self.env.full_state()
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`.

        If the state of the environments could not be captured, new episodes begin and
        ``exact_resume`` is set to false.
        """
        self._count_batches()
        super().load_state_dict(state_dict)
        self._statistics.load_state_dict(state_dict["statistics"])
        self._episode_ids.load(state_dict["episode_ids"])
        self._actor.load_state_dict(state_dict["actor"])
        self.exact_resume = self.env.load_full_state(state_dict["env"])
        if not self.exact_resume:
            self._restart()
        continues_episodes = not self.exact_resume or state_dict.get(
            "continues_episodes", self.env.is_started
        )
        self._left = self.env.start() if continues_episodes else None


def as_vector_env(create_env_fn: EnvBase | Callable[[], EnvBase]) -> VectorEnv:
    """Return the environment as a :class:`VectorEnv`, creating it if necessary."""
    env = create_env_fn if isinstance(create_env_fn, EnvBase) else create_env_fn()
    return env if isinstance(env, VectorEnv) else make_env(env)
