"""Dreamer: the official DreamerV3, and Algorithm 1 of the first paper.

``Dreamer`` has the settings of https://github.com/danijar/dreamerv3, whose unit is the transition,
including the observation after a reset. Its ``train_ratio`` is in replayed time steps per
transition: a batch of 16 sequences of 64 steps makes it 1,024 times the replay ratio.

``DreamerPaper`` is Algorithm 1 of "Dream to Control" (Hafner et al. 2020): collect a whole episode,
then make ``collect_interval`` update steps. Its method ``interleaved`` returns the same experiment
in the manner of the third version: one policy step, then the gradient steps that are due.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from kit.dialects.base import OFF_POLICY, Dialect, ratio_of, step_by_step, trains
from kit.dialects.fields import acts, counts, fact
from kit.steps.counting import COUNTING_RULES, CountingRule, as_fraction, needed, rule_numbers
from kit.steps.counts import PlannedCounts
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan
from kit.steps.schema import NonNegativeInt, PositiveInt

_DRIVER_STEPS = 10
"""Transitions that the driver collects at least before the run asks whether it has ended."""


@dataclass
class Dreamer(Dialect):
    """Settings of the official DreamerV3: those of ``run``, and of its replay."""

    NAME = "dreamer"
    LIBRARY = "DreamerV3"
    VERSIONS: ClassVar = {
        "e3f0224": "the code of e3f0224; its ratio answers 1 at first, and is asked per transition",
    }
    ALGORITHMS: ClassVar = {"dreamer_v3": OFF_POLICY}
    TOTAL = "steps"
    CANNOT: ClassVar = {
        "on_policy": (False, "it trains from a replay"),
        "world_size": (1, "one process trains"),
    }
    SECTIONS = frozenset({"", "run", "defaults", "defaults.run"})
    PATHS: ClassVar = {"replay.size": "replay_size"}

    steps: NonNegativeInt = 10**10
    """transitions of the run, rounded up to chunks of at least ten (``run.steps``)."""
    train_ratio: float = 32.0
    """replayed time steps per transition (``run.train_ratio``): ``batch_size * batch_length`` times
    the replay ratio; 0: never train, negative: one gradient step per transition."""
    batch_size: PositiveInt = counts("minibatch_size", 16)
    """sequences in a minibatch."""
    batch_length: PositiveInt = counts("sequence_length", 64)
    """time steps of a sequence."""
    envs: PositiveInt = counts("num_envs", 16)
    """environments (``run.envs``)."""
    replay_context: NonNegativeInt = 1
    """time steps before each sequence that give it its first state."""
    consec_train: PositiveInt = 1
    """consecutive sequences that are read one after the other."""
    repeat: PositiveInt = counts("action_repeat", 1)
    """env steps one action is held for (``env.*.repeat``): 4 for Atari."""
    replay_size: PositiveInt = acts("buffer_size", 5_000_000)
    """transitions in the replay (``replay.size``)."""
    max_episode_steps: PositiveInt | None = fact("max_episode_steps")
    """policy steps after which an episode is truncated; the environment's business."""

    @property
    def stored_length(self) -> int:
        """Time steps of one item of the replay."""
        return self.consec_train * self.batch_length + self.replay_context

    @property
    def first_transition(self) -> int:
        """Number of the transition that puts enough items into the replay to train."""
        return self.batch_size * self.batch_length + self.envs * (self.stored_length - 1)

    @property
    def transitions(self) -> int:
        """Transitions of the run: whole chunks of the driver."""
        chunk = -(-_DRIVER_STEPS // self.envs) * self.envs
        return -(-self.steps // chunk) * chunk

    def _plan(self) -> dict[str, Any]:
        rows = self.batch_size * self.batch_length
        ratio = self.train_ratio / rows if self.train_ratio >= 0 else 1.0
        stored = self.batch_size * self.stored_length
        if stored > self.replay_size:
            why = "does not hold one batch of sequences"
            raise SettingError("replay_size", self.replay_size, why, [stored])
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
    def _from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        plan = step_by_step(plan)
        size, length = plan.minibatch_size or 16, plan.sequence_length or 1
        # What the first training waits for beyond a batch is the context of the sequences.
        _, _, first = plan.counting.partition(":")
        vector_steps = -(-plan.learning_starts // plan.num_envs)
        waits = int(first) if first.isdecimal() else vector_steps * plan.num_envs
        stored = (waits - size * length) // plan.num_envs + 1
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
            f"train_ratio={self.train_ratio:g} counts replayed time steps: with "
            f"{self.batch_size} x {self.batch_length} of them in a minibatch it is a replay ratio "
            f"of {self.train_ratio / batch:.6g}."
        )
        if self.replay_context == 0:
            yield "replay_context=0 counts alone; stored_latents=false begins sequences with zeros."
        if plan.total_policy_steps != self.steps:
            yield f"steps is rounded up to {plan.total_policy_steps:,}: whole driver chunks."
        yield "The observation after a reset is counted as a step there; here a reset costs none."
        yield (
            f"No action is random by plan; training begins with transition "
            f"{self.first_transition:,}, when the replay holds {batch:,} sequence starts."
        )
        if plan.counting.startswith("dreamer"):
            yield (
                "Its ratio answers 1 at first, and gradient steps come between the environments of "
                "one vector step; here they follow the vector step."
            )


@dataclass
class DreamerPaper(Dialect):
    """Algorithm 1 of the first paper: a whole episode, then ``collect_interval`` updates."""

    NAME = "dreamer-paper"
    LIBRARY = "the first Dreamer paper"
    VERSIONS: ClassVar = {"2020": "Algorithm 1 of Hafner et al. 2020"}
    ALGORITHMS: ClassVar = {"dreamer_v1": OFF_POLICY}
    CANNOT: ClassVar = {"collects_episodes": (True, "the loop collects episodes")}

    steps: PositiveInt = 5_000_000
    """env steps of the run, rounded up to whole episodes."""
    seed_episodes: PositiveInt = 5
    """episodes with random actions before the loop (S)."""
    collect_interval: NonNegativeInt = counts("gradient_steps_per_iteration", 100)
    """gradient steps between two episodes (C)."""
    batch_size: PositiveInt = counts("minibatch_size", 50)
    """sequences in a minibatch (B)."""
    sequence_length: PositiveInt = counts("sequence_length", 50)
    """time steps of a sequence (L)."""
    imagination_horizon: PositiveInt = acts("imagination_horizon", 15)
    """time steps of an imagined trajectory (H)."""
    action_repeat: PositiveInt = counts("action_repeat", 2)
    """env steps one action is held for (R)."""
    episode_length: PositiveInt = 1000
    """env steps of an episode (T)."""

    @property
    def policy_steps_per_episode(self) -> int:
        """Actions of one episode."""
        return -(-self.episode_length // self.action_repeat)

    def interleaved(self) -> StepPlan:
        """The same experiment with the gradient steps spread over the policy steps.

        After the seed episodes come the same ``collect_interval`` gradient steps, as pretraining,
        and then as many for each ``policy_steps_per_episode``, one when it is due.
        """
        return step_by_step(self.to_plan())

    def _plan(self) -> dict[str, Any]:
        """The updates that open the loop are those of the iteration that collected before."""
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
    def _from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
        if plan.episode_length is None:
            why = "leaves open how long an episode is"
            raise SettingError("episode_length", None, why, "give it")
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
            "The updates that open the loop are counted with the collection before them, the seed "
            "episodes at first; an episode after the last updates would train nothing."
        )


# ---------------------------------------------------------------------- how DreamerV3 counts
_EXACT_FLOATS = 2**53


class TransitionRatio(CountingRule):
    """The ratio of DreamerV3, asked once per transition from the one on that fills the replay.

    It answers 1 at first, whatever the ratio, and then carries fractions in floats.

    Args:
        ratio: gradient steps per transition.
        first: number of the first transition that it is asked with.
        before: transitions before the first training iteration.
    """

    STATE = ("transitions", "prev")
    asks_each_step = True

    def __init__(self, ratio: float, first: int, before: int) -> None:
        self.ratio, self.first = ratio, first
        self.transitions = before
        self.prev: float | None = None

    def advance(self, policy_steps: int) -> int:
        """Collect ``policy_steps`` transitions, each of which may make gradient steps due."""
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
        """The gradient steps of ``trainings`` iterations, if floats make no difference."""
        last = self.transitions + trainings * policy_steps
        ratio = Fraction(self.ratio)
        if ratio == 0 or last < self.first:
            return 0
        of_two = ratio.denominator == 1 or (1 / ratio).denominator == 1
        if last >= _EXACT_FLOATS or not of_two or first != policy_steps:
            return None
        return 1 + int((last - self.first) * ratio)


def _transition_ratio(plan: PlannedCounts, argument: str) -> TransitionRatio:
    """``dreamer:24``: the ratio is asked from the 24th transition on."""
    (first,) = rule_numbers(plan, argument, 1, "dreamer:1")
    ratio = float(needed(plan, "replay_ratio"))
    before = (plan.first_training_iteration - 1) * plan.frames_per_batch
    return TransitionRatio(ratio, first, before)


COUNTING_RULES["dreamer"] = _transition_ratio
