"""Rollouts of environments that run on the host: batches of steps, or of whole episodes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from kit.collectors.actor import NO_CONTEXT, Actor
from kit.collectors.base import KitCollector, StepsCollector, check_policy
from kit.collectors.policy import FastPolicy, Policy, Tensors
from kit.collectors.rollout_buffer import (
    CHUNK,
    SMALL,
    Batches,
    EpisodeBuffer,
    EpisodeIds,
    MaskCheck,
    RolloutBuffer,
    Row,
    Span,
)
from kit.config.devices import usable_device
from kit.envs.backends.base import Mask, StepArrays
from kit.envs.episodes import Episode, EpisodeStatistics
from kit.envs.errors import EnvironmentFault
from kit.envs.make import make_env
from kit.envs.spaces import Arrays, some
from kit.envs.vector_env import VectorEnv
from kit.steps import SettingError
from kit.steps.errors import one_of, whole_number

Layout = Literal["padded", "flat"]


class Schedule:
    """Says which environments take the next step of a rollout: all, as long as there are rows."""

    policy_steps: int
    """of all environments so far."""
    active: Mask | None = None
    """environments that take the next step; ``None``: all."""
    stands_still: Mask | None = None
    """``active`` where the other environments can stand still, else ``None``."""
    done = False
    """whether there is no further step."""

    def __init__(self, num_envs: int, policy_steps: int = 0) -> None:
        self.num_envs, self.policy_steps = num_envs, policy_steps

    def stepped(self, result: StepArrays) -> None:
        """Take note of a step."""
        self.policy_steps += self.num_envs

    def begins(self, result: StepArrays) -> Mask:
        """Return which environments begin an episode with the step after the last."""
        return result.terminated | result.truncated


def rollout(
    env: VectorEnv, actor: Actor, rows: Iterable[Row], schedule: Schedule, *, rewards: bool = True
) -> None:
    """Step environments until a schedule is done, or there are no further rows.

    Args:
        env: is stepped.
        actor: chooses the actions.
        rows: what each step acts on, and where it is written.
        schedule: says who takes part.
        rewards: whether rewards are normalised step by step, if they are.

    Raises:
        EnvironmentFault: if an environment fails.
    """
    recurrent = actor.is_recurrent
    for observation, row in rows:
        seen = env.observed(observation) if env.raw else observation
        actions = actor(seen, schedule.policy_steps, schedule.active)
        env.step_arrays(
            actions, row, schedule.stands_still, rewards=rewards, played=schedule.active
        )
        schedule.stepped(row)
        if recurrent:
            actor.end_episodes(schedule.begins(row))
        if schedule.done:
            return


class VectorCollector(StepsCollector):
    """Steps environments with a policy and yields batches ``[num_envs, steps_per_env]``.

    Environments write into arrays that become the batch; the policy is called with plain tensors or
    arrays. It takes the place of TorchRL's ``Collector`` in TorchRL's scripts and in its
    ``Trainer``.

    Args:
        create_env_fn: the environment, or a function that makes it; one of TorchRL is taken too,
            at TorchRL's cost.
        policy: module from TensorDict to TensorDict; ``None`` acts at random.
        device: where batches are delivered and, unless given, the policy runs.
        policy_device: where the policy runs.
        storing_device: where batches are delivered.
        exploration_policy: acts in place of the policy until ``exploration_frames``.
        exploration_type: whether actions are sampled.
        reuse: whether all batches share one memory, each overwriting the one before. Otherwise a
            batch belongs to the receiver.
        fast_policy: how the policy is called. ``"auto"``: NumPy computes the actions of a small
            network, which rounds differently (on a GPU, with weights copied to the host once per
            batch); other policies run as recorded tensor operations. ``"exact"``: recorded tensor
            operations, bitwise those of the module. ``"module"``: the TensorDict module.
        reset_at_each_iter: whether all envs start a new episode with each batch.
        **counts: of :class:`~kit.collectors.StepsCollector`: ``frames_per_batch``,
            ``total_frames``, ...

    Raises:
        SettingError: if counts cannot be reached exactly or the policy does not fit.

    Examples:
        >>> from kit.envs import make_env
        >>> env = make_env("CartPole-v1", num_envs=2)
        >>> collector = VectorCollector(env, None, frames_per_batch=10, total_frames=20)
        >>> [batch.shape for batch in collector]
        [torch.Size([2, 5]), torch.Size([2, 5])]
    """

    _buffer: RolloutBuffer | None = None
    _batches: Batches | None = None
    _gives_away = False
    _left: Arrays | None = None  # the last observation, with which the next batch goes on

    def __init__(
        self,
        create_env_fn: EnvBase | Callable[[], EnvBase],
        policy: Policy | None = None,
        *,
        device: torch.device | str | None = None,
        policy_device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        exploration_policy: Policy | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        reuse: bool = False,
        fast_policy: FastPolicy | bool = "auto",
        reset_at_each_iter: bool = False,
        **counts: Any,
    ) -> None:
        self.policy_device = usable_device(policy_device=policy_device, device=device)
        self.storing_device = usable_device(storing_device=storing_device, device=device)
        env = as_vector_env(create_env_fn)
        super().__init__(env.num_envs, device=self.policy_device, **counts)
        self.env, self.policy, self.reuse = env, policy, reuse
        self.reset_at_each_iter = reset_at_each_iter
        self._let_act(exploration_policy, exploration_type, fast_policy, self.storing_device)
        self._check_masks = MaskCheck(env)
        self._statistics = EpisodeStatistics(self.num_envs)
        self._infos: dict[tuple[int, int], Mapping[str, float]] = {}  # of what is not counted yet
        self._episode_ids = EpisodeIds(self.num_envs)

    # ------------------------------------------------------------------ one batch
    def deliver_raw(self, raw: bool) -> bool:
        """Deliver raw observations and rewards, or normalised ones; return true."""
        self.env.leave_raw(raw)
        return True

    def _prepared(self) -> AbstractContextManager[Any]:
        self._actor.prepare()
        ready = self._actor.is_ready(self.policy_steps, self.steps_per_env)
        if ready and not (self.is_prefill or self.env.backend.uses_torch):
            return NO_CONTEXT
        return super()._prepared()

    def _collect_steps(self, steps: int) -> TensorDictBase:
        self.goes_on = self.env.is_at(self._left) and not self.reset_at_each_iter
        if not self.goes_on:  # of episodes that others began it would count only the rest
            self.env.abandon()
            self._restart()
        buffer = self._begin(steps)
        schedule = Schedule(self.num_envs, self.policy_steps)
        try:
            with self._actor.begin(self.policy_steps, steps, buffer.actions):
                alone = steps == 1  # its reward alone is normalised in a third of the time
                rollout(self.env, self._actor, buffer.rows, schedule, rewards=alone)
            self._left = buffer.rows[-1][1].observation
            if not alone:
                self.env.normalize_rewards(buffer.whole)
            buffer.end(self._episode_ids)
            outputs = self._checked_outputs(buffer)
        except BaseException as error:
            self.env.abandon()  # where its environments are is not known, and nothing was counted
            self._buffer = None
            if isinstance(error, EnvironmentFault):
                raise error.at(schedule.policy_steps // self.num_envs) from error
            raise
        assert self._batches is not None
        batch = self._batches.take(outputs, self._episode_ids)
        self._count(buffer)
        return batch if self.storing_device.type == "cpu" else batch.to(self.storing_device)

    def _begin(self, steps: int) -> RolloutBuffer:
        """Return memory for the next batch, ready to be written to."""
        buffer, shown = self._buffer, self._batches is not None and not self._batches.copied
        kept = self._gives_away or (shown and not self.reuse)  # who got the last batch may keep it
        if buffer is None or buffer.steps != steps or kept:
            self._take_in()
            numpy = self._actor.numpy
            buffer = RolloutBuffer(self.env, steps, None if numpy is None else numpy.actions)
            size = sum(array.nbytes for array in buffer.entries().values())
            self._gives_away = size > SMALL and not self.reuse
            self._buffer, self._batches = buffer, None
        copied = not (self.reuse or self._gives_away)
        if self._batches is None or self._batches.copied != copied:
            self._take_in()
            self._batches = None
        if self._batches is None or (self._batches.is_full and copied):
            count = 1 if self._gives_away else max(CHUNK // steps, 1)
            self._batches = Batches(buffer, count, copied=copied)
        elif self._batches.is_full:
            self._batches.again()
        buffer.begin(shown=shown)
        return buffer

    def _checked_outputs(self, buffer: RolloutBuffer) -> Tensors:
        """Return the policy's outputs; refuse NaN and infinity, the policy's NaN first."""
        taken = self.policy_steps // self.num_envs
        outputs, doubtful = self._actor.outputs(), buffer.may_be_infinite()
        if checked := buffer.doubtful_actions() | outputs if doubtful else outputs:
            check_policy(checked, buffer.acted_on, self._actor.action_keys, taken)
        if doubtful and buffer.has_infinite():
            self._take_in()
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
            self._take_in()

    def _take_in(self) -> None:
        """Count env steps and episodes of the batches since the last call."""
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
        """Env steps so far."""
        self._take_in()
        return self._env_steps

    @env_steps.setter
    def env_steps(self, value: int) -> None:
        self._env_steps = value

    @property
    def episodes(self) -> int:
        """Episodes that have ended so far."""
        self._take_in()
        return self._episodes

    @episodes.setter
    def episodes(self, value: int) -> None:
        self._episodes = value

    def take_episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call, and forget them."""
        self._take_in()
        return super().take_episodes()

    def _restart(self) -> None:
        """All environments have begun new episodes."""
        self._take_in()
        self._statistics.restart()
        self._episode_ids.restart()
        self._actor.restart()

    # ------------------------------------------------------------------ in and out
    def _seed_environments(self, seed: int) -> None:
        self.env.set_seed(seed)
        self._actor.seeded()

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
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
        self._take_in()
        state = super().state_dict()
        state["statistics"] = self._statistics.state_dict()
        state["goes_on"] = self.env.is_at(self._left)
        state["episode_ids"] = self._episode_ids.present.tolist()
        state["actor"] = self._actor.state_dict()
        state["env"] = self.env.full_state()
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Where the environments could not give their state, their open episodes are closed and new
        ones begin; ``exact_resume`` is then false.
        """
        self._take_in()
        super().load_state_dict(state_dict)
        self._statistics.load_state_dict(state_dict["statistics"])
        self._episode_ids.load(state_dict["episode_ids"])
        self._actor.load_state_dict(state_dict["actor"])
        self.exact_resume = self.env.load_full_state(state_dict["env"])
        if not self.exact_resume:
            self._restart()
        goes_on = not self.exact_resume or state_dict.get("goes_on", self.env.is_started)
        self._left = self.env.start() if goes_on else None


class EpisodeCollector(KitCollector):
    """Plays whole episodes until a batch has ``min_episodes`` and ``min_steps``, and yields them.

    Each batch begins with new episodes in all environments. Every episode that begins is played to
    its end and is in the batch, so nothing is dropped and short episodes are not preferred. A free
    environment begins another one while those that have begun are not expected to reach the
    minima: an open episode is expected to be as long as ``episode_length``, or as the mean so far,
    and at least as long as it is already. With ``min_episodes`` alone a batch is exactly that many
    episodes; with equally long ones it is exactly what the plan says, whatever the number of
    environments. Otherwise it can exceed ``min_steps`` by the episodes that were open when it was
    met.

    Free environments stand still. Where they cannot (native, EnvPool and torch environments step
    all or none), what they do meanwhile is in no batch and no count but ``idle_env_steps``.

    Args:
        create_env_fn: the environment, or a function that makes it.
        policy: module from TensorDict to TensorDict; ``None`` acts at random.
        min_episodes: episodes of a batch, at least.
        min_steps: policy steps of a batch, at least. One of the two is enough.
        episode_length: policy steps of every episode, where all are equally long.
        layout: ``padded``: ``[episodes, longest]``, zeros where ``("collector", "mask")`` is false;
            ``flat``: ``[policy steps]``, one episode after the other.
        prefill_frames: least policy steps of a first batch of its own; 0 for none.
        prefill_random: whether all actions of that batch are random, however long its episodes are.
        device: where batches are delivered and, unless given, the policy runs.
        policy_device: where the policy runs.
        storing_device: where batches are delivered.
        exploration_policy: acts in place of the policy until ``exploration_frames``.
        exploration_type: whether actions are sampled.
        fast_policy: how the policy is called: ``"auto"``, ``"exact"`` or ``"module"``, as by
            :class:`VectorCollector`.
        **counts: of :class:`~kit.collectors.KitCollector`: ``total_frames`` (policy steps after
            which no further batch begins), ``init_random_frames``, ``exploration_frames``,
            ``seed``.

    Attributes:
        idle_env_steps: env steps of environments that could not stand still.

    Raises:
        SettingError: if neither minimum is given, or the policy does not fit.
    """

    _left: Arrays | None = None  # the last observation, with which the next batch goes on

    def __init__(
        self,
        create_env_fn: EnvBase | Callable[[], EnvBase],
        policy: Policy | None = None,
        *,
        min_episodes: int | None = None,
        min_steps: int | None = None,
        episode_length: int | None = None,
        layout: Layout = "padded",
        prefill_frames: int = 0,
        prefill_random: bool = False,
        device: torch.device | str | None = None,
        policy_device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        exploration_policy: Policy | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        fast_policy: FastPolicy | bool = "auto",
        **counts: Any,
    ) -> None:
        if min_episodes is None and min_steps is None:
            raise SettingError(
                "min_episodes", None, "leaves open what to collect", [1], "or give min_steps"
            )
        self.min_episodes = whole_number("min_episodes", min_episodes or 1, at_least=1)
        self.min_steps = whole_number("min_steps", min_steps or 1, at_least=1)
        self.episode_length = episode_length
        self.prefill_frames = whole_number("prefill_frames", prefill_frames)
        self.prefill_random = prefill_random
        self.layout = one_of("layout", layout, ("padded", "flat"))
        self.policy_device = usable_device(policy_device=policy_device, device=device)
        self.storing_device = usable_device(storing_device=storing_device, device=device)
        self.env, self.policy = as_vector_env(create_env_fn), policy
        super().__init__(self.env.num_envs, device=self.policy_device, **counts)
        self.idle_env_steps = 0
        self._let_act(exploration_policy, exploration_type, fast_policy, self.storing_device)
        self._check_masks = MaskCheck(self.env)
        self._strayed = np.zeros(self.num_envs, np.bool_)

    deliver_raw = VectorCollector.deliver_raw

    # ------------------------------------------------------------------ one batch
    def _collect(self) -> TensorDictBase:
        self._actor.prepare()
        prefill = self.policy_steps < self.prefill_frames
        least = (self.prefill_frames, 1) if prefill else (self.min_steps, self.min_episodes)
        self._actor.at_random = prefill and self.prefill_random
        self._actor.restart()
        self._see_others()
        if self._strayed.any():
            self.env.restart(self._strayed)
            self._strayed[...] = False
        buffer = EpisodeBuffer(self.env)
        schedule = EpisodeSchedule(self, *least)
        try:
            with self._actor.begin(self.policy_steps):
                rollout(self.env, self._actor, buffer.rows(), schedule)
            self._left = self.env.start()
            outputs = self._checked_outputs(buffer, schedule.spans)
        except BaseException as error:
            self._strayed[...] = True  # the next batch begins with new episodes
            self.env.take_infos()
            if isinstance(error, EnvironmentFault):
                raise error.at(buffer.steps - 1) from error
            raise
        self._count(buffer, schedule)
        first = self.episodes - len(schedule.spans)
        batch = buffer.tensordict(schedule.spans, outputs, self.layout, first)
        return batch if self.storing_device.type == "cpu" else batch.to(self.storing_device)

    def _see_others(self) -> None:
        """Take note where others have stepped: of their episodes it would play only the rest."""
        if self.env.is_started and not self.env.is_at(self._left):
            self._strayed[...] = True

    def _checked_outputs(self, buffer: EpisodeBuffer, spans: Sequence[Span]) -> Tensors:
        """Return the policy's outputs; refuse NaN, the policy's first."""
        acted_on = buffer.acted_on()
        outputs = self._actor.outputs()
        taken = self.policy_steps // self.num_envs
        check_policy(outputs, acted_on, self._actor.action_keys, taken)
        buffer.check_finite(self.env.name, spans)
        self._check_masks(acted_on, taken)
        return outputs

    def _count(self, buffer: EpisodeBuffer, schedule: EpisodeSchedule) -> None:
        finished = buffer.episodes(schedule.spans)
        frames = schedule.policy_steps - self.policy_steps
        self.random_policy_steps += self._actor.random_steps(self.policy_steps, frames)
        self.policy_steps = schedule.policy_steps
        self.env_steps += sum(episode.env_steps for episode in finished)
        self.environment_errors = self.env.backend.faults
        self.episodes += len(finished)
        self._finished += finished

    # ------------------------------------------------------------------ in and out
    def _seed_environments(self, seed: int) -> None:
        self.env.set_seed(seed)
        self._actor.seeded()
        self._strayed[...] = False

    shutdown = VectorCollector.shutdown

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return counters, random numbers and the state of the environments."""
        state = super().state_dict()
        state["idle_env_steps"] = self.idle_env_steps
        self._see_others()
        state["strayed"] = self._strayed.tolist()
        state["env"] = self.env.full_state()
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Batches end with their episodes, so nothing is lost where the environments cannot give
        their state, but ``exact_resume`` is false then.
        """
        super().load_state_dict(state_dict)
        self.idle_env_steps = int(state_dict["idle_env_steps"])
        self._strayed[...] = state_dict["strayed"]
        self.exact_resume = self.env.load_full_state(state_dict["env"])
        self._left = self.env.start() if self.env.is_started else None
        if not self.exact_resume:
            self._strayed[...] = False


class EpisodeSchedule(Schedule):
    """Decides which environments begin an episode, and keeps where in the memory episodes are.

    Args:
        collector: whose episodes so far say how long one is.
        min_steps: policy steps of the batch, at least.
        min_episodes: episodes of the batch, at least.

    Attributes:
        spans: where the episodes are, in the order in which they began.
    """

    def __init__(self, collector: EpisodeCollector, min_steps: int, min_episodes: int) -> None:
        super().__init__(collector.num_envs, collector.policy_steps)
        self.min_steps, self.min_episodes = min_steps, min_episodes
        self.spans: list[Span] = []
        self._collector = collector
        self._open: dict[int, Span] = {}
        self._time = 0
        self._playing = self._begun = self._begin(np.ones(self.num_envs, np.bool_))
        self._update()

    def _update(self) -> None:
        count = int(self._playing.sum())
        everyone = count == len(self._playing)
        self.done, self._count = count == 0, count
        self.active = None if everyone else self._playing
        can_stand_still = self._collector.env.backend.steps_some
        self.stands_still = self.active if can_stand_still else None

    def begins(self, result: StepArrays) -> Mask:
        """Return which environments began an episode after the last step."""
        return self._begun

    def stepped(self, result: StepArrays) -> None:
        """Close the episodes that ended, and begin others while they are needed."""
        self._time += 1
        self.policy_steps += self._count
        ended = result.terminated | result.truncated
        if self.active is not None:
            if self.stands_still is None:
                self._collector.idle_env_steps += int(result.env_steps[~self._playing].sum())
                self._collector._strayed |= ~self._playing
        elif not some(ended):
            self._begun = ended
            return
        ended &= self._playing
        for env in np.flatnonzero(ended):
            self._open.pop(int(env)).end = self._time
        begun = self._begin(~self._playing | ended)
        self._reset_strayed(begun & ~ended)
        self._playing = (self._playing & ~ended) | begun
        self._begun = begun
        self._update()

    def _begin(self, free: Mask) -> Mask:
        """Begin episodes in free environments while more are needed; return which began one."""
        begun = np.zeros_like(free)
        for env in np.flatnonzero(free):
            if len(self.spans) >= self.min_episodes and self._expected() >= self.min_steps:
                break
            span = self._open[int(env)] = Span(int(env), self._time)
            self.spans.append(span)
            begun[env] = True
        return begun

    def _expected(self) -> int:
        """Return the policy steps that the episodes that have begun will have."""
        collector, length = self._collector, self._collector.episode_length
        finished = sum(span.end - span.start for span in self.spans if span.end)
        if length is None:
            episodes = collector.episodes + len(self.spans) - len(self._open)
            length = -(-(collector.policy_steps + finished) // episodes) if episodes else 1
        return finished + sum(max(self._time - s.start, length) for s in self._open.values())

    def _reset_strayed(self, begun: Mask) -> None:
        """Reset environments that begin an episode and have not stood still since their last."""
        strayed = begun & self._collector._strayed
        if strayed.any():
            self._collector.env.restart(strayed)
            self._collector._strayed &= ~strayed


def as_vector_env(create_env_fn: EnvBase | Callable[[], EnvBase]) -> VectorEnv:
    """Return the environment, made if need be, as the kit steps it."""
    env = create_env_fn if isinstance(create_env_fn, EnvBase) else create_env_fn()
    return env if isinstance(env, VectorEnv) else make_env(env)
