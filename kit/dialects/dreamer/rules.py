"""How DreamerV3 counts the gradient steps that are due, float by float."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from kit.steps.counting import COUNTING_RULES, CountingRule, rule_numbers
from kit.steps.errors import SettingError

if TYPE_CHECKING:
    from kit.steps.updates import UpdatePlan

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


def _transition_ratio(plan: UpdatePlan, argument: str) -> TransitionRatio:
    """``dreamer:24``: the ratio is asked from the 24th transition on."""
    (first,) = rule_numbers(plan, argument, 1, "dreamer:1")
    if plan.replay_ratio is None:
        raise SettingError("replay_ratio", None, "is needed for counting=dreamer", [1])
    before = (plan.first_training_iteration - 1) * plan.frames_per_batch
    return TransitionRatio(float(plan.replay_ratio), first, before)


COUNTING_RULES["dreamer"] = _transition_ratio
