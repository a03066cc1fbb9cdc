"""The words of Dreamer: the official code of its third version, and the loop of the first paper.

``Dreamer`` speaks like https://github.com/danijar/dreamerv3, whose unit is the transition of one
copy, the observation after a reset included. Its ``train_ratio`` is in replayed time steps per
transition: a batch of 16 sequences of 64 steps makes it 1,024 times the replay ratio.

``DreamerPaper`` is Algorithm 1 of "Dream to Control" (Hafner et al. 2020): collect a whole episode,
then make ``collect_interval`` update steps. Its method ``interleaved`` returns the same experiment
in the manner of the third version: one policy step, then the gradient steps that are due.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Self

from kit.dialects.base import OFF_POLICY, Dialect, step_by_step, trains
from kit.steps.counting import COUNTING_RULES
from kit.steps.errors import SettingError, real_number
from kit.steps.plan import StepPlan
from kit.steps.ratio import as_fraction
from kit.steps.validation import LARGEST_RATIO

if TYPE_CHECKING:
    from kit.steps.updates import UpdatePlan

_DRIVER_STEPS = 10
"""Transitions that the driver collects at least before the run asks whether it has ended."""
_EXACT_FLOATS = 2**53


class TransitionRatio:
    """The ratio of DreamerV3, asked once per transition from the one on that fills the replay.

    It answers 1 at first, whatever the ratio, and then carries fractions in floats.

    Args:
        ratio: gradient steps per transition.
        first: number of the first transition that it is asked with.
        before: transitions before the first training iteration.
    """

    asks_each_step = True

    def __init__(self, ratio: float, first: int, before: int) -> None:
        self.ratio, self.first = ratio, first
        self.transitions = before
        self.prev: float | None = None

    def advance(self, policy_steps: int) -> int:
        """Collect ``policy_steps`` transitions, and return the gradient steps they make due."""
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

    def total(self, trainings: int, policy_steps: int) -> int | None:
        """Return the gradient steps of ``trainings`` iterations, if floats make no difference."""
        last = self.transitions + trainings * policy_steps
        ratio = Fraction(self.ratio)
        if ratio == 0 or last < self.first:
            return 0
        if last >= _EXACT_FLOATS or (ratio.denominator != 1 and (1 / ratio).denominator != 1):
            return None
        return 1 + int((last - self.first) * ratio)

    def state_dict(self) -> dict[str, Any]:
        """Return the transitions, and those that are paid for."""
        return {"transitions": self.transitions, "prev": self.prev}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.transitions, self.prev = int(state_dict["transitions"]), state_dict["prev"]


def _transition_ratio(plan: UpdatePlan, argument: str) -> TransitionRatio:
    """``dreamer:24``: the ratio is asked from the 24th transition on."""
    if plan.replay_ratio is None or not argument.isdecimal() or len(argument) > 18:
        raise SettingError(
            "counting",
            plan.counting,
            "needs replay_ratio, and the first transition after the colon",
            "use dreamer:1",
        )
    before = (plan.first_training_iteration - 1) * plan.frames_per_batch
    return TransitionRatio(float(plan.replay_ratio), int(argument), before)


COUNTING_RULES["dreamer"] = _transition_ratio


@dataclass
class Dreamer(Dialect):
    """Settings of the official DreamerV3: those of ``run``, and of its replay."""

    NAME: ClassVar[str] = "dreamer"
    LIBRARY: ClassVar[str] = "DreamerV3"
    VERSIONS: ClassVar[Mapping[str, str]] = {
        "e3f0224": "the code of e3f0224; its ratio answers 1 at first, and is asked per transition",
        "documented": "train_ratio as it is described: replayed steps per step, in exact fractions",
    }
    ALGORITHMS: ClassVar[Mapping[str, str]] = {"dreamer_v3": OFF_POLICY}
    FACTS: ClassVar[frozenset[str]] = Dialect.FACTS | {"max_episode_steps"}
    AT_LEAST: ClassVar[Mapping[str, int]] = {
        "steps": 0,
        "batch_size": 1,
        "batch_length": 1,
        "envs": 1,
        "replay_context": 0,
        "consec_train": 1,
        "repeat": 1,
        "replay_size": 1,
        "max_episode_steps": 1,
    }
    CARRIED: ClassVar[frozenset[str]] = frozenset({"replay_size"})

    SECTIONS: ClassVar[frozenset[str]] = frozenset({"", "run", "defaults", "defaults.run"})
    PATHS: ClassVar[Mapping[str, str]] = {"replay.size": "replay_size"}

    steps: int = 10**10
    """transitions of the run, rounded up to chunks of at least ten (``run.steps``)."""
    train_ratio: float = 32.0
    """replayed time steps per transition (``run.train_ratio``): ``batch_size * batch_length`` times
    the replay ratio; 0: never train, negative: one gradient step per transition."""
    batch_size: int = 16
    """sequences in a minibatch."""
    batch_length: int = 64
    """time steps of a sequence."""
    envs: int = 16
    """environment copies (``run.envs``)."""
    replay_context: int = 1
    """time steps before each sequence that give it its first state."""
    consec_train: int = 1
    """consecutive sequences that are read one after the other."""
    repeat: int = 1
    """env steps one action is held for (``env.*.repeat``): 4 for Atari."""
    replay_size: int = 5_000_000
    """transitions in the replay (``replay.size``)."""
    max_episode_steps: int | None = field(default=None, kw_only=True)
    """policy steps after which an episode is truncated; the environment's business."""
    version: str = field(default="e3f0224", kw_only=True)
    """behaviour that is meant; see ``VERSIONS``."""

    def _guess(self) -> str:
        return "dreamer_v3"

    @property
    def stored_length(self) -> int:
        """Time steps of what the replay stores as one item."""
        return self.consec_train * self.batch_length + self.replay_context

    @property
    def first_transition(self) -> int:
        """Number of the transition that puts enough items into the replay to train."""
        return self.batch_size * self.batch_length + self.envs * (self.stored_length - 1)

    @property
    def transitions(self) -> int:
        """Transitions of the run: whole chunks of the driver."""
        chunk = self.envs if self.version == "documented" else -(-_DRIVER_STEPS // self.envs)
        if self.version != "documented":
            chunk *= self.envs
        return -(-self.steps // chunk) * chunk

    def _plan(self) -> StepPlan:
        replayed = real_number("train_ratio", self.train_ratio)
        ratio = replayed / (self.batch_size * self.batch_length)
        if ratio > LARGEST_RATIO:
            most = LARGEST_RATIO * self.batch_size * self.batch_length
            raise SettingError("train_ratio", self.train_ratio, "is more than any run does", [most])
        if ratio < 0:
            ratio = 1.0
        if self.batch_size * self.stored_length > self.replay_size:
            raise SettingError(
                "replay_size",
                self.replay_size,
                "does not hold one batch of sequences",
                [self.batch_size * self.stored_length],
            )
        first = self.first_transition
        trains = -(-first // self.envs)
        exact = self.version == "documented" or ratio == 0
        plan = StepPlan(
            iterations=self.transitions // self.envs,
            num_envs=self.envs,
            action_repeat=self.repeat,
            max_episode_steps=self.max_episode_steps,
            learning_starts=trains * self.envs if trains > 1 else 0,
            random_steps=0,
            replay_ratio=as_fraction("train_ratio", ratio),
            counting="exact" if exact else f"dreamer:{first}",
            minibatch_size=self.batch_size,
            sequence_length=self.batch_length,
            final_evaluation=False,
        )
        if plan.total_policy_steps != self.steps:
            plan.asked["total_policy_steps"] = self.steps
        return plan

    @classmethod
    def _from(cls, plan: StepPlan, settings: Mapping[str, Any]) -> Self:
        for name, wanted in (("on_policy", False), ("world_size", 1)):
            if getattr(plan, name) != wanted:
                why = "cannot be said in DreamerV3: one process trains from a replay"
                raise SettingError(name, getattr(plan, name), why, [wanted])
        del settings
        plan = step_by_step(plan)
        size, length = plan.minibatch_size or 16, plan.sequence_length or 1
        ratio = plan.replay_ratio
        if ratio is None:
            each = max(plan.frames_per_batch, 1)
            ratio = Fraction(plan.gradient_steps_per_iteration or 0, each)
        # What the first training waits for beyond a batch is the context of the sequences.
        _, _, told = plan.counting.partition(":")
        vector_steps = -(-plan.learning_starts // plan.num_envs)
        first = int(told) if told.isdecimal() else vector_steps * plan.num_envs
        stored = (first - size * length) // plan.num_envs + 1
        context = max(stored - length, 0)
        return cls(
            steps=plan.total_policy_steps,
            train_ratio=float(ratio * size * length) if trains(plan) else 0.0,
            replay_context=context,
            batch_size=size,
            batch_length=length,
            envs=plan.num_envs,
            repeat=plan.action_repeat,
            max_episode_steps=plan.max_episode_steps,
            replay_size=max(5_000_000, size * (length + context)),
            version="e3f0224" if plan.counting.startswith("dreamer") else "documented",
        )

    def notes(self) -> list[str]:
        """Return what a reader of these settings would not expect, a sentence each."""
        made, plan = self.resolved(), self.to_plan()
        assert plan.replay_ratio is not None
        batch = made.batch_size * made.batch_length
        found = [
            f"train_ratio={made.train_ratio:g} counts replayed time steps: with "
            f"{made.batch_size} x {made.batch_length} of them in a minibatch it is a replay ratio "
            f"of {made.train_ratio / batch:.6g}."
        ]
        if plan.total_policy_steps != made.steps:
            found.append(
                f"steps is rounded up to {plan.total_policy_steps:,}: whole driver chunks."
            )
        found.append(
            "The observation after a reset is counted as a step there; here a reset costs none."
        )
        found.append(
            f"No action is random by plan; training begins with transition "
            f"{made.first_transition:,}, when the replay holds {batch:,} sequence starts."
        )
        if plan.counting.startswith("dreamer"):
            found.append(
                "Its ratio answers 1 at first, and gradient steps come between the copies of one "
                "vector step; here they follow the vector step."
            )
        return found


@dataclass
class DreamerPaper(Dialect):
    """Algorithm 1 of the first paper: a whole episode, then ``collect_interval`` updates."""

    NAME: ClassVar[str] = "dreamer-paper"
    LIBRARY: ClassVar[str] = "the first Dreamer paper"
    VERSIONS: ClassVar[Mapping[str, str]] = {"2020": "Algorithm 1 of Hafner et al. 2020"}
    ALGORITHMS: ClassVar[Mapping[str, str]] = {"dreamer_v1": OFF_POLICY}
    AT_LEAST: ClassVar[Mapping[str, int]] = {
        "steps": 1,
        "seed_episodes": 1,
        "collect_interval": 0,
        "batch_size": 1,
        "sequence_length": 1,
        "imagination_horizon": 1,
        "action_repeat": 1,
        "episode_length": 1,
    }
    CARRIED: ClassVar[frozenset[str]] = frozenset({"imagination_horizon"})

    steps: int = 5_000_000
    """env steps of the run, rounded up to whole episodes."""
    seed_episodes: int = 5
    """episodes with random actions before the loop (S)."""
    collect_interval: int = 100
    """gradient steps between two episodes (C)."""
    batch_size: int = 50
    """sequences in a minibatch (B)."""
    sequence_length: int = 50
    """time steps of a sequence (L)."""
    imagination_horizon: int = 15
    """time steps of an imagined trajectory (H)."""
    action_repeat: int = 2
    """env steps one action is held for (R)."""
    episode_length: int = 1000
    """env steps of an episode (T)."""
    version: str = field(default="2020", kw_only=True)
    """behaviour that is meant; see ``VERSIONS``."""

    def _guess(self) -> str:
        return "dreamer_v1"

    @property
    def policy_steps_per_episode(self) -> int:
        """Actions of one episode."""
        return -(-self.episode_length // self.action_repeat)

    def _plan(self) -> StepPlan:
        """The updates that open the loop are those of the iteration that collected before."""
        episodes = -(-self.steps // self.episode_length)
        return StepPlan(
            iterations=max(episodes - self.seed_episodes, 0) + 1,
            min_episodes=1,
            episode_length=self.policy_steps_per_episode,
            action_repeat=self.action_repeat,
            prefill_steps=self.seed_episodes * self.policy_steps_per_episode,
            prefill_is_iteration=True,
            random_steps=0,
            gradient_steps_per_iteration=self.collect_interval,
            minibatch_size=self.batch_size,
            sequence_length=self.sequence_length,
            final_evaluation=False,
        )

    def interleaved(self) -> StepPlan:
        """Return the same experiment with the gradient steps spread over the policy steps.

        After the seed episodes come the same ``collect_interval`` gradient steps, as pretraining,
        and then as many for each ``policy_steps_per_episode``, one when it is due.
        """
        return step_by_step(self.to_plan())

    @classmethod
    def _from(cls, plan: StepPlan, settings: Mapping[str, Any]) -> Self:
        del settings
        if not plan.collects_episodes or plan.episode_length is None:
            raise SettingError(
                "steps_per_env", plan.steps_per_env, "cannot be said here: it collects episodes"
            )
        length = plan.episode_length * plan.action_repeat
        return cls(
            steps=plan.total_policy_steps * plan.action_repeat,
            seed_episodes=max(plan.local_prefill_steps // plan.episode_length, 1),
            collect_interval=plan.gradient_steps_per_iteration or 0,
            batch_size=plan.minibatch_size or 50,
            sequence_length=plan.sequence_length or 50,
            action_repeat=plan.action_repeat,
            episode_length=length,
        )

    def notes(self) -> list[str]:
        """Return what a reader of these settings would not expect, a sentence each."""
        made = self.resolved()
        ratio = Fraction(made.collect_interval, made.policy_steps_per_episode)
        return [
            f"C={made.collect_interval} updates per episode of {made.policy_steps_per_episode} "
            f"policy steps are a replay ratio of {ratio}.",
            "The updates that open the loop are counted with the collection before them, the seed "
            "episodes at first; an episode after the last updates would train nothing.",
        ]
