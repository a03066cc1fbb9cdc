"""Collecting whole episodes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from kit.collectors.acting import Acting
from kit.collectors.base import KitCollector
from kit.collectors.diverged import check_policy
from kit.collectors.episode_memory import CHUNK, EpisodeMemory, Span
from kit.collectors.policy import IS_INIT, Policy, Tensors
from kit.collectors.stretches import OpenNumpyStretch
from kit.collectors.vector import VectorCollector, as_vector_env
from kit.envs.backends.base import Mask, StepArrays
from kit.envs.errors import EnvironmentFault
from kit.envs.spaces import Arrays, Key
from kit.steps import SettingError
from kit.steps.errors import one_of, whole_number

Layout = Literal["padded", "flat"]


class EpisodeCollector(KitCollector):
    """Plays whole episodes until a batch has ``min_episodes`` and ``min_steps``, and yields them.

    Each batch begins with new episodes in all copies. Every episode that begins is played to its
    end and is in the batch, so nothing is dropped and short episodes are not preferred. A copy that
    is free begins another one while those that have begun are not expected to reach the minima: an
    open episode is expected to be as long as ``episode_length``, or as the mean so far, and at
    least as long as it is already. With ``min_episodes`` alone a batch is exactly that many
    episodes; with equally long ones it is exactly what the plan says, whatever the number of
    copies. Otherwise it can exceed ``min_steps`` by the episodes that were open when it was met.

    Free copies stand still. Where they cannot (native, EnvPool and torch environments step all
    copies or none), what they do meanwhile is in no batch and no count but ``idle_env_steps``.

    Args:
        create_env_fn: the environment, or a function that makes it.
        policy: module from TensorDict to TensorDict; ``None`` acts at random.
        min_episodes: episodes of a batch, at least.
        min_steps: policy steps of a batch, at least. One of the two is enough.
        episode_length: policy steps of every episode, where all are equally long.
        layout: ``padded``: ``[episodes, longest]``, zeros where ``("collector", "mask")`` is false;
            ``flat``: ``[policy steps]``, one episode after the other.
        total_frames: policy steps after which no further batch begins; -1 never ends.
        init_random_frames: policy steps with random actions at the beginning.
        prefill_frames: least policy steps of a first batch of its own; 0 for none.
        exploration_policy: acts in place of the policy until ``exploration_frames``.
        exploration_frames: policy steps, counted from the beginning.
        seed: of the random numbers that policy and random actions use in this collector.
        device: where batches are delivered and, unless told otherwise, the policy runs.
        policy_device: where the policy runs.
        storing_device: where batches are delivered.
        exploration_type: whether actions are sampled.
        fast_policy: whether to take the policy past TensorDict where possible.
        exact_policy: whether its results have to be bitwise those of the policy as a module, as in
            :class:`~kit.collectors.VectorCollector`.

    Attributes:
        idle_env_steps: env steps of copies that could not stand still.

    Raises:
        SettingError: if neither minimum is given, or the policy does not fit.
    """

    def __init__(
        self,
        create_env_fn: EnvBase | Callable[[], EnvBase],
        policy: Policy | None = None,
        *,
        min_episodes: int | None = None,
        min_steps: int | None = None,
        episode_length: int | None = None,
        layout: Layout = "padded",
        total_frames: int = -1,
        init_random_frames: int | None = None,
        prefill_frames: int = 0,
        exploration_policy: Policy | None = None,
        exploration_frames: int = 0,
        seed: int = 0,
        device: torch.device | str | None = None,
        policy_device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        exploration_type: ExplorationType = ExplorationType.RANDOM,
        fast_policy: bool = True,
        exact_policy: bool = False,
    ) -> None:
        if min_episodes is None and min_steps is None:
            raise SettingError(
                "min_episodes", None, "leaves open what to collect", [1], "or give min_steps"
            )
        self.min_episodes = whole_number("min_episodes", min_episodes or 1, at_least=1)
        self.min_steps = whole_number("min_steps", min_steps or 1, at_least=1)
        self.episode_length = episode_length
        self.prefill_frames = whole_number("prefill_frames", prefill_frames)
        self.layout = one_of("layout", layout, ("padded", "flat"))
        self.policy_device = torch.device(policy_device or device or "cpu")
        self.storing_device = torch.device(storing_device or device or "cpu")
        self.env, self.policy = as_vector_env(create_env_fn), policy
        super().__init__(
            self.env.num_envs,
            total_frames=total_frames,
            init_random_frames=init_random_frames,
            exploration_frames=exploration_frames,
            seed=seed,
            device=self.policy_device,
        )
        self.idle_env_steps = 0
        self.exact_policy = exact_policy or not fast_policy
        self._acting = Acting(
            self.env,
            policy,
            exploration_policy,
            init_random_frames=self.init_random_frames,
            exploration_frames=self.exploration_frames,
            exploration_type=exploration_type,
            device=self.policy_device,
            fast=fast_policy,
            in_numpy=not self.exact_policy,
        )
        self._strayed = np.zeros(self.num_envs, np.bool_)

    # ------------------------------------------------------------------ one batch
    def _collect(self) -> TensorDictBase:
        prefill = self.policy_steps < self.prefill_frames
        least = (self.prefill_frames, 1) if prefill else (self.min_steps, self.min_episodes)
        self._acting.restart()
        memory = EpisodeMemory(self.env, self._open_stretch)
        before = self.policy_steps, self.random_policy_steps
        if self._strayed.any():
            self.env.restart(self._strayed)
            self._strayed[...] = False
        try:
            with self._acting.mode(self.env.start()):
                spans = self._play(memory, *least)
                memory.end()
            written, seen = memory.written(self._keys()), memory.seen()
            check_policy(written, seen, self._acting.action_keys, before[0] // self.num_envs)
            memory.check_finite(self.env.name, spans)
        except BaseException:
            self.policy_steps, self.random_policy_steps = before
            self._strayed[...] = True  # the next batch begins with new episodes
            raise
        self._count(memory, spans)
        batch = memory.tensordict(spans, written, self.layout, self.episodes - len(spans))
        if self.storing_device.type != "cpu" or self.policy_device.type != "cpu":
            batch = batch.to(self.storing_device)
        return batch

    def _play(self, memory: EpisodeMemory, min_steps: int, min_episodes: int) -> list[Span]:
        """Play episodes until both minima are met; return where in the memory they are."""
        try:
            return self._play_all(memory, min_steps, min_episodes)
        except EnvironmentFault as fault:
            raise fault.at(memory.steps - 1) from fault

    def _play_all(self, memory: EpisodeMemory, min_steps: int, min_episodes: int) -> list[Span]:
        needs = _Needs(self, min_steps, min_episodes)
        active = needs.begin(np.ones(self.num_envs, np.bool_), memory.steps)
        count = int(active.sum())
        while count:
            row = memory.next_row()
            self._step(self._act(memory, active, count), row, active, count)
            ended = row.terminated | row.truncated
            if count < self.num_envs or ended.any():
                ended &= active
                needs.end(ended, memory.steps)
                begun = needs.begin(~active | ended, memory.steps)
                self._begin(begun & ~ended)
                active = (active & ~ended) | begun
                count = int(active.sum())
                if self._acting.remembers:
                    self._acting.ended(begun)
        return needs.spans

    def _step(self, actions: Arrays, row: StepArrays, active: Mask, count: int) -> None:
        if count == self.num_envs:
            self.env.step_arrays(actions, row)
        elif self.env.backend.steps_some:
            self.env.step_arrays(actions, row, active)
        else:
            self.env.step_arrays(actions, row)
            self.idle_env_steps += int(row.env_steps[~active].sum())
            self._strayed |= ~active

    def _begin(self, mask: Mask) -> None:
        """Reset copies that begin an episode and have not stood still since their last one."""
        strayed = mask & self._strayed
        if strayed.any():
            self.env.restart(strayed)
            self._strayed &= ~strayed

    # ------------------------------------------------------------------ actions
    def _keys(self) -> list[Key]:
        runner = self._acting.runner
        return self._acting.action_keys if runner is None else runner.out_keys

    def _open_stretch(self) -> OpenNumpyStretch | None:
        return self._acting.open_stretch(self.policy_steps, CHUNK)

    def _act(self, memory: EpisodeMemory, active: Mask, count: int) -> Arrays:
        """Return the actions of one step, and have what else is written in it kept."""
        actions = memory.actions()
        if actions is not None:
            self.policy_steps += count
            return actions
        outputs = self._outputs(memory.observation(), active, count)
        memory.keep(outputs)
        keys = self._keys()
        return {key: outputs[keys.index(key)].cpu().numpy() for key in self._acting.action_keys}

    def _outputs(self, observation: Tensors, active: Mask, count: int) -> Sequence[Tensor]:
        """Return what is written in one step; its first copies act at random while that is due."""
        acting, taken = self._acting, self.policy_steps
        self.policy_steps += count
        left = count if acting.runner is None else max(self.init_random_frames - taken, 0)
        at_random = min(left, count)
        self.random_policy_steps += at_random
        if acting.runner is None:
            return acting.random(observation)
        if not at_random:
            return self._by_policy(observation, taken)
        drawn = dict(zip(acting.action_keys, acting.random(observation)))
        if at_random == count:
            return acting.aligned(drawn, observation)
        chosen = torch.zeros(self.num_envs, dtype=torch.bool, device=acting.device)
        chosen[torch.from_numpy(np.flatnonzero(active)[:at_random])] = True
        outputs = self._by_policy(observation, taken)
        others = [
            drawn.get(key, value if key == IS_INIT else torch.zeros_like(value)).to(value.device)
            for key, value in zip(acting.runner.out_keys, outputs)
        ]
        return [_where(chosen, one, other) for one, other in zip(others, outputs)]

    def _by_policy(self, observation: Tensors, taken: int) -> Sequence[Tensor]:
        """Have the policy act, or the exploration policy in its place."""
        acting = self._acting
        given = observation
        if not acting.on_cpu:
            given = {key: value.to(acting.device) for key, value in observation.items()}
        assert acting.runner is not None
        if acting.explorer is None or taken >= self.exploration_frames:
            return acting.runner(given)
        values = acting.explorer(given)
        return acting.aligned(dict(zip(acting.explorer.out_keys, values)), observation)

    # ------------------------------------------------------------------ after a batch
    def _count(self, memory: EpisodeMemory, spans: list[Span]) -> None:
        finished = memory.episodes(spans)
        self.env_steps += sum(episode.env_steps for episode in finished)
        self.environment_errors = self.env.backend.faults
        self.episodes += len(finished)
        self._finished += finished

    # ------------------------------------------------------------------ in and out
    def _seed_environments(self, seed: int) -> None:
        self.env.set_seed(seed)
        self._strayed[...] = False

    shutdown = VectorCollector.shutdown

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return counters, random numbers and the state of the environments."""
        state = super().state_dict()
        state["idle_env_steps"] = self.idle_env_steps
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
        if not self.exact_resume:
            self._strayed[...] = False


class _Needs:
    """Decides which copies begin an episode, and keeps where in the memory episodes are.

    Args:
        collector: whose episodes so far say how long one is.
        min_steps: policy steps of the batch, at least.
        min_episodes: episodes of the batch, at least.
    """

    def __init__(self, collector: EpisodeCollector, min_steps: int, min_episodes: int) -> None:
        self.min_steps, self.min_episodes = min_steps, min_episodes
        self._known_length = collector.episode_length
        self._steps_before, self._episodes_before = collector.policy_steps, collector.episodes
        self._open: dict[int, Span] = {}
        self._begun: list[Span] = []

    @property
    def spans(self) -> list[Span]:
        """Where the episodes are, in the order in which they began."""
        return self._begun

    def begin(self, free: Mask, now: int) -> Mask:
        """Begin episodes in free copies while more are needed; return which have begun one.

        Args:
            free: copies that could.
            now: steps in the memory.
        """
        begun = np.zeros_like(free)
        for copy in np.flatnonzero(free):
            if len(self._begun) >= self.min_episodes and self._expected(now) >= self.min_steps:
                break
            span = Span(int(copy), now)
            self._begun.append(span)
            self._open[int(copy)] = span
            begun[copy] = True
        return begun

    def end(self, ended: Mask, now: int) -> None:
        """Note that episodes have ended."""
        for copy in np.flatnonzero(ended):
            self._open.pop(int(copy)).end = now

    def _expected(self, now: int) -> int:
        """Return the policy steps that the episodes that have begun will have."""
        finished = sum(span.end - span.start for span in self._begun if span.end)
        length = self._known_length
        if length is None:
            episodes = self._episodes_before + len(self._begun) - len(self._open)
            length = -(-(self._steps_before + finished) // episodes) if episodes else 1
        return finished + sum(max(now - span.start, length) for span in self._open.values())


def _where(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(rows.reshape(-1, *[1] * (one.ndim - 1)), one, other)
