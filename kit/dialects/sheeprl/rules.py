"""How sheeprl counts the gradient steps that are due, float by float.

Its ratio (after ``embodied.core.when.Ratio`` of DreamerV3) is asked with the policy steps of one
process. The first answer drops its fraction for good: up to one gradient step is lost. Later ones
carry theirs, in floats.
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
    """The ratio of sheeprl, asked once per training iteration.

    Args:
        ratio: gradient steps per policy step of one process.
        pretrain: pretraining as 0.5.7 does it, in place of the first answer; 0 for none.
        start: what the policy steps are counted from, in all processes.
        processes: processes that play.
        divisor: processes that the policy steps are shared out to.
        prev: policy steps that are paid for, of a run that is resumed.
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
        """Take one iteration of ``policy_steps`` in each process that plays."""
        self.steps += policy_steps * self.processes
        return self.ask(self.steps / self.divisor)

    def ask(self, steps: float) -> int:
        """The answer of the library's ratio when asked with ``steps``."""
        if self.ratio == 0:
            return 0
        if self.prev is None:
            self.prev = steps
            return int((min(self.pretrain, steps) if self.pretrain else steps) * self.ratio)
        due = int((steps - self.prev) * self.ratio)
        self.prev += due / self.ratio
        return due

    def total(self, trainings: int, policy_steps: int, first: int) -> int | None:
        """The gradient steps of ``trainings`` iterations, if floats make no difference.

        They make none for whole ratios and for powers of two, as long as all steps are whole.
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
    """Iterations of ``policy_steps`` from the first training to the first gradient step."""
    each = ratio * policy_steps
    if each >= 1:
        return 0
    if each <= 1 / _EXACT_FLOATS:
        return _EXACT_FLOATS
    about = math.ceil(1 / each)  # in floats 49 times 1/49 is less than 1
    return next(n for n in range(max(about - 1, 1), about + 3) if n * policy_steps * ratio >= 1)


class _PretrainingRatio(SheeprlRatio):
    """The ratio of 0.5.7, whose pretraining takes the place of its first answer."""

    pretrains = True


class TrainEvery(KnownTotals):
    """Before ``replay_ratio``: a fixed number of gradient steps every so many iterations.

    Args:
        period: iterations from one training to the next.
        first: gradient steps of the first training.
        later: gradient steps of every other one.
    """

    pretrains = True

    def __init__(self, period: int, first: int, later: int) -> None:
        self.period, self.first, self.later = period, first, later

    def after(self, iterations: int) -> int:
        """The gradient steps of the first ``iterations`` since training began."""
        return self.first + (iterations - 1) // self.period * self.later if iterations else 0


def _ratio(plan: PlannedCounts) -> float:
    return float(needed(plan, "replay_ratio"))


def _current(plan: PlannedCounts, argument: str) -> SheeprlRatio:
    """0.8.4; ``sheeprl:steps`` or ``sheeprl:steps,prev`` continues where a run was saved."""
    steps, _, prev = argument.partition(",")
    try:
        start, paid = int(steps or 0), float(prev) if prev else None
    except ValueError:
        start, paid = -1, None
    if start < 0 or not math.isfinite(paid or 0):
        raise SettingError("counting", plan.counting, "needs a number after the colon", ["sheeprl"])
    return SheeprlRatio(_ratio(plan), start=start, prev=paid)


def _july_2024(plan: PlannedCounts, argument: str) -> SheeprlRatio:
    """0.5.7, all but SAC."""
    return _PretrainingRatio(_ratio(plan), plan.pretrain_steps)


def _july_2024_sac(plan: PlannedCounts, argument: str) -> SheeprlRatio:
    """0.5.7, SAC: the prefill is subtracted in iterations, and one iteration is added."""
    processes = plan.world_size
    each = plan.num_envs * processes
    random = plan.random_steps // each
    before = (max(random, 1) - 1) * each - (random - (random > 0)) + each
    shared = {"start": before, "processes": processes, "divisor": processes}
    return _PretrainingRatio(_ratio(plan), plan.pretrain_steps, **shared)


def _july_2024_decoupled(plan: PlannedCounts, argument: str) -> SheeprlRatio:
    """0.5.7, decoupled SAC: one process plays, the others share its policy steps."""
    (trainers,) = rule_numbers(plan, argument, 1, "sheeprl-0.5.7-decoupled:1")
    return _PretrainingRatio(_ratio(plan), plan.pretrain_steps, divisor=max(trainers, 1))


def _train_every(plan: PlannedCounts, argument: str) -> TrainEvery:
    """February 2024: ``sheeprl-0.5.0:period,first``."""
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
