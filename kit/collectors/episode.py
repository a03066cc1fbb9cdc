"""Collector that returns complete episodes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from kit.collectors.base import KitCollector, check_policy
from kit.collectors.episode_buffer import EpisodeBuffer, Span
from kit.collectors.policy import Policy, Tensors
from kit.collectors.rollout import ActiveEnvs, VectorCollector, as_vector_env, rollout
from kit.collectors.rollout_buffer import MaskCheck
from kit.envs.backends.base import Mask, StepArrays
from kit.envs.errors import EnvError
from kit.envs.spaces import Arrays, some
from kit.steps import SettingError
from kit.steps.errors import one_of, whole_number

Layout = Literal["padded", "flat"]


class EpisodeCollector(KitCollector):
    """Collects complete episodes until a batch reaches ``min_episodes`` and ``min_steps``.

    Each batch consists of new episodes. Every episode that starts is played to its end and is part
    of the batch, which avoids a bias towards short episodes. An idle environment starts another
    episode only if the episodes started so far are not expected to reach both minimums. The
    expected length of an open episode is ``episode_length`` or the mean length so far, but at least
    its current length.

    With ``min_episodes`` alone, a batch has exactly that many episodes. If all episodes are equally
    long, batches match the plan exactly for any number of environments. Otherwise, a batch may
    exceed ``min_steps``, because open episodes are still played to their end.

    Idle environments are not stepped if the backend supports this. Native, EnvPool and torch
    environments always step together. Steps of idle environments are counted only in
    ``idle_env_steps``.

    Args:
        create_env_fn: environment, or function that creates an environment.
        policy: module that takes and returns a TensorDict; ``None``: random actions.
        min_episodes: minimum number of episodes per batch.
        min_steps: minimum number of policy steps per batch. At least one minimum is required.
        episode_length: number of policy steps per episode, if all episodes are equally long.
        layout: ``padded``: batches are ``[episodes, longest episode]``, with zeros where
            ``("collector", "mask")`` is false. ``flat``: batches are ``[policy steps]``, the
            concatenated episodes.
        prefill_frames: minimum number of policy steps in a separate first batch; 0: no such batch.
        prefill_random: whether all actions in the prefill batch are random.
        **settings: arguments for :class:`~kit.collectors.KitCollector`, such as ``seed``,
            ``device`` and ``total_frames``. No batch begins after ``total_frames`` policy steps.

    Attributes:
        idle_env_steps: number of env steps taken by idle environments.

    Raises:
        SettingError: if neither minimum is set, or the policy is incompatible.
    """

    collects_on_host = True

    _left: Arrays | None = None  # last observation, where the next batch continues

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
        **settings: Any,
    ) -> None:
        if min_episodes is None and min_steps is None:
            reason = "leaves the batch size undefined"
            raise SettingError("min_episodes", None, reason, [1], "or set min_steps")
        self.min_episodes = whole_number("min_episodes", min_episodes or 1, at_least=1)
        self.min_steps = whole_number("min_steps", min_steps or 1, at_least=1)
        self.episode_length = episode_length
        self.prefill_frames = whole_number("prefill_frames", prefill_frames)
        self.prefill_random = prefill_random
        self.layout = one_of("layout", layout, ("padded", "flat"))
        self.env, self.policy = as_vector_env(create_env_fn), policy
        super().__init__(self.env.num_envs, **settings)
        self.idle_env_steps = 0
        self._create_actor()
        self._check_masks = MaskCheck(self.env)
        self._needs_reset = np.zeros(self.num_envs, np.bool_)

    deliver_raw = VectorCollector.deliver_raw

    # ------------------------------------------------------------------ batch collection
    def _collect(self) -> TensorDictBase:
        self._actor.prepare()
        prefill = self.policy_steps < self.prefill_frames
        least = (self.prefill_frames, 1) if prefill else (self.min_steps, self.min_episodes)
        self._actor.at_random = prefill and self.prefill_random
        self._actor.restart()
        self._check_continuity()
        if self._needs_reset.any():
            self.env.restart(self._needs_reset)
            self._needs_reset[...] = False
        buffer = EpisodeBuffer(self.env)
        schedule = ActiveEpisodes(self, *least)
        try:
            with self._actor.begin(self.policy_steps):
                rollout(self.env, self._actor, buffer.rows(), schedule)
            self._left = self.env.start()
            outputs = self._checked_outputs(buffer, schedule.spans)
        except BaseException as error:
            self._needs_reset[...] = True  # the next batch starts new episodes
            self.env.take_infos()
            if isinstance(error, EnvError):
                raise error.at(buffer.steps - 1) from error
            raise
        self._count(buffer, schedule)
        first = self.episodes - len(schedule.spans)
        batch = buffer.tensordict(schedule.spans, outputs, self.layout, first)
        return batch if self.storing_device.type == "cpu" else batch.to(self.storing_device)

    def _check_continuity(self) -> None:
        """Mark all environments as needing a reset if other code has stepped them."""
        if self.env.is_started and not self.env.is_at(self._left):
            self._needs_reset[...] = True

    def _checked_outputs(self, buffer: EpisodeBuffer, spans: Sequence[Span]) -> Tensors:
        """Check the policy's outputs and then the environments for NaN; return the outputs."""
        acted_on = buffer.acted_on()
        outputs = self._actor.outputs()
        taken = self.policy_steps // self.num_envs
        check_policy(outputs, acted_on, self._actor.action_keys, taken)
        buffer.check_finite(self.env.name, spans)
        self._check_masks(acted_on, taken)
        return outputs

    def _count(self, buffer: EpisodeBuffer, schedule: ActiveEpisodes) -> None:
        finished = buffer.episodes(schedule.spans)
        frames = schedule.policy_steps - self.policy_steps
        self.random_policy_steps += self._actor.random_steps(self.policy_steps, frames)
        self.policy_steps = schedule.policy_steps
        self.env_steps += sum(episode.env_steps for episode in finished)
        self.environment_errors = self.env.backend.faults
        self.episodes += len(finished)
        self._finished += finished

    # ------------------------------------------------------------------ seed and state
    def _seed_environments(self, seed: int) -> None:
        self.env.set_seed(seed)
        self._actor.seeded()
        self._needs_reset[...] = False

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the counters, the RNG state and the state of the environments."""
        state = super().state_dict()
        state["idle_env_steps"] = self.idle_env_steps
        self._check_continuity()
        state["strayed"] = self._needs_reset.tolist()
        state["env"] = self.env.full_state()
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`.

        If the state of the environments could not be captured, ``exact_resume`` is set to false.
        No episodes are lost, because no episode is open between batches.
        """
        super().load_state_dict(state_dict)
        self.idle_env_steps = int(state_dict["idle_env_steps"])
        self._needs_reset[...] = state_dict["strayed"]
        self.exact_resume = self.env.load_full_state(state_dict["env"])
        self._left = self.env.start() if self.env.is_started else None
        if not self.exact_resume:
            self._needs_reset[...] = False


class ActiveEpisodes(ActiveEnvs):
    """Decides which environments start episodes, and records where episodes are stored.

    Args:
        collector: collector whose previous episodes determine the expected episode length.
        min_steps: minimum number of policy steps in the batch.
        min_episodes: minimum number of episodes in the batch.

    Attributes:
        spans: buffer locations of the episodes, ordered by start time.
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
        all_playing = count == len(self._playing)
        self.done, self._count = count == 0, count
        self.active = None if all_playing else self._playing
        can_freeze = self._collector.env.backend.steps_some
        self.freeze_mask = self.active if can_freeze else None

    def begins(self, result: StepArrays) -> Mask:
        """Return a mask of the environments whose next step is the first of an episode."""
        return self._begun

    def stepped(self, result: StepArrays) -> None:
        """Record the episodes that ended in this step, and start new episodes if needed."""
        self._time += 1
        self.policy_steps += self._count
        ended = result.terminated | result.truncated
        if self.active is not None:
            if self.freeze_mask is None:
                self._collector.idle_env_steps += int(result.env_steps[~self._playing].sum())
                self._collector._needs_reset |= ~self._playing
        elif not some(ended):
            self._begun = ended
            return
        ended &= self._playing
        for env in np.flatnonzero(ended):
            self._open.pop(int(env)).end = self._time
        begun = self._begin(~self._playing | ended)
        self._reset_idle(begun & ~ended)
        self._playing = (self._playing & ~ended) | begun
        self._begun = begun
        self._update()

    def _begin(self, free: Mask) -> Mask:
        """Start as many episodes as needed; return a mask of the environments that start one."""
        begun = np.zeros_like(free)
        for env in np.flatnonzero(free):
            if len(self.spans) >= self.min_episodes and self._expected() >= self.min_steps:
                break
            span = self._open[int(env)] = Span(int(env), self._time)
            self.spans.append(span)
            begun[env] = True
        return begun

    def _expected(self) -> int:
        """Return the expected number of policy steps in all episodes started so far."""
        collector, length = self._collector, self._collector.episode_length
        finished = sum(span.end - span.start for span in self.spans if span.end)
        if length is None:
            episodes = collector.episodes + len(self.spans) - len(self._open)
            length = -(-(collector.policy_steps + finished) // episodes) if episodes else 1
        return finished + sum(max(self._time - s.start, length) for s in self._open.values())

    def _reset_idle(self, begun: Mask) -> None:
        """Reset the starting environments that were stepped while they were idle."""
        needs_reset = begun & self._collector._needs_reset
        if needs_reset.any():
            self._collector.env.restart(needs_reset)
            self._collector._needs_reset &= ~needs_reset
