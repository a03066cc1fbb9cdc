"""Settings for Dreamer: the official DreamerV3, and Algorithm 1 of the first paper.

``Dreamer`` contains the settings from https://github.com/danijar/dreamerv3. DreamerV3 counts
transitions, and counts the observation after a reset as one. ``train_ratio`` is the number of
replayed time steps per transition. For batches of 16 sequences with 64 steps each,
``train_ratio`` is 1,024 times the replay ratio.

``DreamerPaper`` is Algorithm 1 of "Dream to Control" (Hafner et al. 2020), which alternates between
collecting one episode and taking ``collect_interval`` gradient steps.
:meth:`DreamerPaper.interleaved` spreads these gradient steps over the policy steps, as in
DreamerV3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from kit.dialects.base import OFF_POLICY, Dialect, ratio_of, step_by_step, trains
from kit.dialects.fields import count_field, extra_field, mapped
from kit.steps.counting import COUNTING_RULES, CountingRule, as_fraction, needed, rule_numbers
from kit.steps.counts import PlannedCounts
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan
from kit.steps.schema import NonNegativeInt, PositiveInt

_DRIVER_STEPS = 10
"""Minimum number of transitions that the driver collects before it checks whether to stop."""


@dataclass
class Dreamer(Dialect):
    """Settings for training and replay in the official DreamerV3."""

    NAME = "dreamer"
    LIBRARY = "DreamerV3"
    VERSIONS: ClassVar = {
        "e3f0224": "code of e3f0224; the ratio is evaluated per transition and starts with 1",
    }
    ALGORITHMS: ClassVar = {"dreamer_v3": OFF_POLICY}
    TOTAL = "steps"
    CANNOT: ClassVar = {
        "on_policy": (False, "DreamerV3 trains from a replay buffer"),
        "world_size": (1, "DreamerV3 trains in a single process"),
    }
    SECTIONS = frozenset({"", "run", "defaults", "defaults.run"})
    PATHS: ClassVar = {"replay.size": "replay_size"}

    steps: NonNegativeInt = 10**10
    """Transitions in the run, rounded up to whole driver chunks (``run.steps``)."""
    train_ratio: float = 32.0
    """Replayed time steps per transition (``run.train_ratio``), which is ``batch_size *
    batch_length`` times the replay ratio. 0 disables training. A negative value means one gradient
    step per transition."""
    batch_size: PositiveInt = count_field("minibatch_size", 16)
    """Sequences per minibatch."""
    batch_length: PositiveInt = count_field("sequence_length", 64)
    """Time steps per sequence."""
    envs: PositiveInt = count_field("num_envs", 16)
    """Number of environments (``run.envs``)."""
    replay_context: NonNegativeInt = 1
    """Time steps before each sequence, which initialise the latent state."""
    consec_train: PositiveInt = 1
    """Number of consecutive sequences per replay item, which are replayed in order."""
    repeat: PositiveInt = count_field("action_repeat", 1)
    """Env steps per action (``env.*.repeat``), such as 4 for Atari."""
    replay_size: PositiveInt = mapped("buffer_size", 5_000_000)
    """Capacity of the replay buffer in transitions (``replay.size``)."""
    max_episode_steps: PositiveInt | None = extra_field("max_episode_steps")
    """Policy steps after which the environment truncates an episode."""

    @property
    def stored_length(self) -> int:
        """Time steps per replay item."""
        return self.consec_train * self.batch_length + self.replay_context

    @property
    def first_transition(self) -> int:
        """Number of transitions after which the replay buffer has enough items for training."""
        return self.batch_size * self.batch_length + self.envs * (self.stored_length - 1)

    @property
    def transitions(self) -> int:
        """Number of transitions in the run, rounded up to whole driver chunks."""
        chunk = -(-_DRIVER_STEPS // self.envs) * self.envs
        return -(-self.steps // chunk) * chunk

    def _plan(self) -> dict[str, Any]:
        rows = self.batch_size * self.batch_length
        ratio = self.train_ratio / rows if self.train_ratio >= 0 else 1.0
        stored = self.batch_size * self.stored_length
        if stored > self.replay_size:
            reason = "The replay buffer must be able to hold one batch of sequences"
            raise SettingError("replay_size", self.replay_size, reason, [stored])
        first = self.first_transition
        iteration = -(-first // self.envs)
        return {
            "iterations": self.transitions // self.envs,
            "learning_starts": iteration * self.envs if iteration > 1 else 0,
            "random_steps": 0,
            "replay_ratio": as_fraction("train_ratio", ratio),
            "counting": f"dreamer:{first}" if ratio else "exact",
        }

    @staticmethod
    def _fields_for(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        plan = step_by_step(plan)
        size, length = plan.minibatch_size or 16, plan.sequence_length or 1
        # Express a delayed start of training as additional replay context.
        _, _, first = plan.counting.partition(":")
        vector_steps = -(-plan.learning_starts // plan.num_envs)
        needed_steps = int(first) if first.isdecimal() else vector_steps * plan.num_envs
        stored = (needed_steps - size * length) // plan.num_envs + 1
        context = max(stored - length, 0)
        return {
            "steps": plan.total_policy_steps,
            "train_ratio": float(ratio_of(plan) * size * length) if trains(plan) else 0.0,
            "replay_context": context,
            "batch_size": size,
            "batch_length": length,
            "envs": plan.num_envs,
            "replay_size": max(5_000_000, size * (length + context)),
        }

    def _notes(self, plan: StepPlan) -> Iterator[str]:
        batch = self.batch_size * self.batch_length
        yield (
            f"train_ratio={self.train_ratio:g} counts replayed time steps. Minibatches of "
            f"{self.batch_size} x {self.batch_length} steps result in a replay ratio of "
            f"{self.train_ratio / batch:.6g}."
        )
        if self.replay_context == 0:
            yield "replay_context=0 only affects counts; use stored_latents=false for zero states."
        if plan.total_policy_steps != self.steps:
            yield f"steps is rounded up to {plan.total_policy_steps:,}, in whole driver chunks."
        yield "DreamerV3 counts the observation after a reset as a step; the kit does not."
        yield (
            f"There are no random actions. Training begins at transition "
            f"{self.first_transition:,}, when the replay has {batch:,} sequence starts."
        )
        if plan.counting.startswith("dreamer"):
            yield (
                "The ratio of DreamerV3 starts with one gradient step. DreamerV3 trains between "
                "the environments of a vector step; the kit trains after the vector step."
            )


@dataclass
class DreamerPaper(Dialect):
    """Algorithm 1 of the first Dreamer paper, which alternates between episodes and updates."""

    NAME = "dreamer-paper"
    LIBRARY = "the first Dreamer paper"
    VERSIONS: ClassVar = {"2020": "Algorithm 1 of Hafner et al. 2020"}
    ALGORITHMS: ClassVar = {"dreamer_v1": OFF_POLICY}
    CANNOT: ClassVar = {"collects_episodes": (True, "its loop collects whole episodes")}

    steps: PositiveInt = 5_000_000
    """Env steps in the run, rounded up to whole episodes."""
    seed_episodes: PositiveInt = 5
    """Episodes with random actions before the training loop (S)."""
    collect_interval: NonNegativeInt = count_field("gradient_steps_per_iteration", 100)
    """Gradient steps between two episodes (C)."""
    batch_size: PositiveInt = count_field("minibatch_size", 50)
    """Sequences per minibatch (B)."""
    sequence_length: PositiveInt = count_field("sequence_length", 50)
    """Time steps per sequence (L)."""
    imagination_horizon: PositiveInt = mapped("imagination_horizon", 15)
    """Time steps per imagined trajectory (H)."""
    action_repeat: PositiveInt = count_field("action_repeat", 2)
    """Env steps per action (R)."""
    episode_length: PositiveInt = 1000
    """Env steps per episode (T)."""

    @property
    def policy_steps_per_episode(self) -> int:
        """Policy steps per episode."""
        return -(-self.episode_length // self.action_repeat)

    def interleaved(self) -> StepPlan:
        """Return a plan for the same experiment, with gradient steps spread over policy steps.

        The ``collect_interval`` gradient steps after the seed episodes become pretraining steps.
        """
        return step_by_step(self.to_plan())

    def _plan(self) -> dict[str, Any]:
        """Return the plan settings. An iteration is a collection followed by gradient steps."""
        episodes = -(-self.steps // self.episode_length)
        return {
            "iterations": max(episodes - self.seed_episodes, 0) + 1,
            "min_episodes": 1,
            "episode_length": self.policy_steps_per_episode,
            "prefill_steps": self.seed_episodes * self.policy_steps_per_episode,
            "prefill_is_iteration": True,
            "random_steps": 0,
        }

    @staticmethod
    def _fields_for(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        if plan.episode_length is None:
            reason = "The plan must have a fixed episode length"
            raise SettingError("episode_length", None, reason, "Set episode_length")
        return {
            "steps": plan.total_policy_steps * plan.action_repeat,
            "seed_episodes": max(plan.local_prefill_steps // plan.episode_length, 1),
            "collect_interval": plan.gradient_steps_per_iteration or 0,
            "batch_size": plan.minibatch_size or 50,
            "sequence_length": plan.sequence_length or 50,
            "episode_length": plan.episode_length * plan.action_repeat,
        }

    def _notes(self, plan: StepPlan) -> Iterator[str]:
        ratio = Fraction(self.collect_interval, self.policy_steps_per_episode)
        yield (
            f"C={self.collect_interval} updates per episode of {self.policy_steps_per_episode} "
            f"policy steps are a replay ratio of {ratio}."
        )
        yield (
            "Updates at the start of the loop are counted with the preceding collection, initially "
            "the seed episodes. The plan has no episode after the last updates."
        )


# ---------------------------------------------------------------------- counting rule
_EXACT_FLOATS = 2**53


class TransitionRatio(CountingRule):
    """DreamerV3's replay ratio, evaluated once per transition.

    Evaluations start once the replay buffer has enough items. The first evaluation returns 1
    regardless of the ratio. Later evaluations carry over fractions of a gradient step as floats.

    Args:
        ratio: gradient steps per transition.
        first: number of the transition at which the ratio is first evaluated.
        before: number of transitions before the first training iteration.
    """

    STATE = ("transitions", "prev")
    asks_each_step = True

    def __init__(self, ratio: float, first: int, before: int) -> None:
        self.ratio, self.first = ratio, first
        self.transitions = before
        self.prev: float | None = None

    def advance(self, policy_steps: int) -> int:
        """Add ``policy_steps`` transitions and return the number of gradient steps now due."""
        due = 0
        for _ in range(policy_steps):
            self.transitions += 1
            if self.transitions >= self.first:
                due += self._ask(self.transitions)
        return due

    def _ask(self, step: int) -> int:
        if self.ratio == 0:
            return 0
        if self.prev is None:
            self.prev = step
            return 1
        repeats = int((step - self.prev) * self.ratio)
        self.prev += repeats / self.ratio
        return repeats

    def total(self, trainings: int, policy_steps: int, first: int) -> int | None:
        """Return the total gradient steps, or ``None`` if float rounding prevents a closed form."""
        last = self.transitions + trainings * policy_steps
        ratio = Fraction(self.ratio)
        if ratio == 0 or last < self.first:
            return 0
        is_exact = ratio.denominator == 1 or (1 / ratio).denominator == 1
        if last >= _EXACT_FLOATS or not is_exact or first != policy_steps:
            return None
        return 1 + int((last - self.first) * ratio)


def _transition_ratio(plan: PlannedCounts, argument: str) -> TransitionRatio:
    """Create a rule such as ``dreamer:24``, which first evaluates the ratio at transition 24."""
    (first,) = rule_numbers(plan, argument, 1, "dreamer:1")
    ratio = float(needed(plan, "replay_ratio"))
    before = (plan.first_training_iteration - 1) * plan.frames_per_batch
    return TransitionRatio(ratio, first, before)


COUNTING_RULES["dreamer"] = _transition_ratio
