"""Batches of whole episodes."""

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
        **settings: of :class:`~kit.collectors.KitCollector`: ``total_frames`` (policy steps after
            which no further batch begins), ``seed``, ``device``, ...

    Attributes:
        idle_env_steps: env steps of environments that could not stand still.

    Raises:
        SettingError: if neither minimum is given, or the policy does not fit.
    """

    collects_on_host = True

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
        **settings: Any,
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
        self.env, self.policy = as_vector_env(create_env_fn), policy
        super().__init__(self.env.num_envs, **settings)
        self.idle_env_steps = 0
        self._let_act()
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
        schedule = ActiveEpisodes(self, *least)
        try:
            with self._actor.begin(self.policy_steps):
                rollout(self.env, self._actor, buffer.rows(), schedule)
            self._left = self.env.start()
            outputs = self._checked_outputs(buffer, schedule.spans)
        except BaseException as error:
            self._strayed[...] = True  # the next batch begins with new episodes
            self.env.take_infos()
            if isinstance(error, EnvError):
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

    def _count(self, buffer: EpisodeBuffer, schedule: ActiveEpisodes) -> None:
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


class ActiveEpisodes(ActiveEnvs):
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
        self.freeze_mask = self.active if can_stand_still else None

    def begins(self, result: StepArrays) -> Mask:
        """Return which environments began an episode after the last step."""
        return self._begun

    def stepped(self, result: StepArrays) -> None:
        """Close the episodes that ended, and begin others while they are needed."""
        self._time += 1
        self.policy_steps += self._count
        ended = result.terminated | result.truncated
        if self.active is not None:
            if self.freeze_mask is None:
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
