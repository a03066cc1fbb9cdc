"""Counting rules that reproduce sheeprl's float arithmetic.

sheeprl copies ``embodied.core.when.Ratio`` from DreamerV3 and evaluates it with the policy steps of
a single process. The first evaluation permanently drops the fraction of a gradient step. Later
evaluations carry over fractions as floats.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from kit.steps.counting import COUNTING_RULES, CountingRule, KnownTotals, needed, rule_numbers
from kit.steps.errors import SettingError

if TYPE_CHECKING:
    from kit.steps.counts import PlannedCounts

_EXACT_FLOATS = 2**53


class SheeprlRatio(CountingRule):
    """sheeprl's replay ratio, evaluated once per training iteration.

    Args:
        ratio: gradient steps per policy step of one process.
        pretrain: pretraining steps in 0.5.7, which replace the first evaluation; 0 for none.
        start: initial number of policy steps across all processes.
        processes: number of processes that collect.
        divisor: number of processes that share the policy steps.
        prev: policy steps for which gradient steps were taken before the run was resumed.
    """

    STATE = ("steps", "prev")

    def __init__(
        self,
        ratio: float,
        pretrain: int = 0,
        *,
        start: int = 0,
        processes: int = 1,
        divisor: int = 1,
        prev: float | None = None,
    ) -> None:
        self.ratio = ratio
        self.pretrain = pretrain
        self.processes = processes
        self.divisor = divisor
        self.steps = start
        self.prev = prev

    def advance(self, policy_steps: int) -> int:
        """Add ``policy_steps`` per collecting process and return the gradient steps now due."""
        self.steps += policy_steps * self.processes
        return self.ask(self.steps / self.divisor)

    def ask(self, steps: float) -> int:
        """Return the number of gradient steps that become due at ``steps`` policy steps."""
        if self.ratio == 0:
            return 0
        if self.prev is None:
            self.prev = steps
            return int((min(self.pretrain, steps) if self.pretrain else steps) * self.ratio)
        due = int((steps - self.prev) * self.ratio)
        self.prev += due / self.ratio
        return due

    def total(self, trainings: int, policy_steps: int, first: int) -> int | None:
        """Return the total gradient steps, or ``None`` if float rounding prevents a closed form.

        Float arithmetic is exact if the ratio is an integer or a power of two, and all step counts
        are integers.
        """
        each = policy_steps * self.processes
        last = self.steps + trainings * each
        if self.prev is not None or last >= _EXACT_FLOATS or first != policy_steps:
            return None
        if (self.steps + each) % self.divisor or each % self.divisor:
            return None
        ratio = Fraction(self.ratio)
        if ratio and ratio.denominator != 1 and (1 / ratio).denominator != 1:
            return None
        at_first = (self.steps + each) // self.divisor
        asked = min(self.pretrain, at_first) if self.pretrain else at_first
        return int(asked * ratio) + int((last // self.divisor - at_first) * ratio)


def first_due(ratio: float, policy_steps: int) -> int:
    """Return the number of iterations from the start of training to the first gradient step."""
    each = ratio * policy_steps
    if each >= 1:
        return 0
    if each <= 1 / _EXACT_FLOATS:
        return _EXACT_FLOATS
    about = math.ceil(1 / each)  # In float arithmetic, 49 * (1 / 49) is less than 1.
    return next(n for n in range(max(about - 1, 1), about + 3) if n * policy_steps * ratio >= 1)


class _PretrainingRatio(SheeprlRatio):
    """Replay ratio as in sheeprl 0.5.7: the first call returns the pretraining steps."""

    pretrains = True


class TrainEvery(KnownTotals):
    """Counting rule for sheeprl 0.5.0, which takes a fixed number of gradient steps per period.

    Args:
        period: number of iterations from one training iteration to the next.
        first: gradient steps in the first training iteration.
        later: gradient steps in every later training iteration.
    """

    pretrains = True

    def __init__(self, period: int, first: int, later: int) -> None:
        self.period, self.first, self.later = period, first, later

    def after(self, iterations: int) -> int:
        """Return the number of gradient steps in ``iterations`` iterations after training began."""
        return self.first + (iterations - 1) // self.period * self.later if iterations else 0


def _ratio(plan: PlannedCounts) -> float:
    return float(needed(plan, "replay_ratio"))


def _current(plan: PlannedCounts, argument: str) -> SheeprlRatio:
    """Return the sheeprl 0.8.4 rule; ``sheeprl:steps`` or ``sheeprl:steps,prev`` resumes a run."""
    steps, _, prev = argument.partition(",")
    try:
        start, previous = int(steps or 0), float(prev) if prev else None
    except ValueError:
        start, previous = -1, None
    if start < 0 or not math.isfinite(previous or 0):
        reason = "The text after the colon must be one or two step counts"
        raise SettingError("counting", plan.counting, reason, ["sheeprl"])
    return SheeprlRatio(_ratio(plan), start=start, prev=previous)


def _july_2024(plan: PlannedCounts, argument: str) -> SheeprlRatio:
    """Return the sheeprl 0.5.7 rule for all algorithms except SAC."""
    return _PretrainingRatio(_ratio(plan), plan.pretrain_steps)


def _july_2024_sac(plan: PlannedCounts, argument: str) -> SheeprlRatio:
    """Return sheeprl 0.5.7's SAC rule, which subtracts prefill iterations from policy steps."""
    processes = plan.world_size
    each = plan.num_envs * processes
    random = plan.random_steps // each
    before = (max(random, 1) - 1) * each - (random - (random > 0)) + each
    shared = {"start": before, "processes": processes, "divisor": processes}
    return _PretrainingRatio(_ratio(plan), plan.pretrain_steps, **shared)


def _july_2024_decoupled(plan: PlannedCounts, argument: str) -> SheeprlRatio:
    """Return the sheeprl 0.5.7 rule for decoupled SAC, where trainers share the policy steps."""
    (trainers,) = rule_numbers(plan, argument, 1, "sheeprl-0.5.7-decoupled:1")
    return _PretrainingRatio(_ratio(plan), plan.pretrain_steps, divisor=max(trainers, 1))


def _train_every(plan: PlannedCounts, argument: str) -> TrainEvery:
    """Return the rule ``sheeprl-0.5.0:period,first`` for sheeprl's code as of February 2024."""
    period, first = rule_numbers(plan, argument, 2, "sheeprl-0.5.0:1,1")
    return TrainEvery(max(period, 1), first, plan.gradient_steps_per_iteration or 0)


COUNTING_RULES.update(
    {
        "sheeprl": _current,
        "sheeprl-0.5.7": _july_2024,
        "sheeprl-0.5.7-sac": _july_2024_sac,
        "sheeprl-0.5.7-decoupled": _july_2024_decoupled,
        "sheeprl-0.5.0": _train_every,
    }
)
