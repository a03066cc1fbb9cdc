"""How sheeprl counts the gradient steps that are due, float by float.

Its ratio (after ``embodied.core.when.Ratio`` of DreamerV3) is asked with the policy steps of one
process. The first answer drops its fraction for good: up to one gradient step is lost. Later ones
carry theirs, in floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from kit.steps.counting import COUNTING_RULES
from kit.steps.errors import SettingError

if TYPE_CHECKING:
    from kit.steps.updates import UpdatePlan

_EXACT_FLOATS = 2**53


class SheeprlRatio:
    """The ratio of sheeprl, asked once per training iteration.

    Args:
        ratio: gradient steps per policy step of one process.
        pretrain: pretraining as 0.5.7 does it, in place of the first answer; 0 for none.
        start: what the policy steps are counted from, in all processes.
        processes: processes that play.
        divisor: processes that the policy steps are shared out to.
        prev: policy steps that are paid for, of a run that is resumed.
    """

    pretrains = False

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
        """Play ``policy_steps`` more and return the gradient steps that are newly due."""
        self.steps += policy_steps * self.processes
        return self.ask(self.steps / self.divisor)

    def ask(self, steps: float) -> int:
        """Return what the library's ratio answers when asked with ``steps``."""
        if self.ratio == 0:
            return 0
        if self.prev is None:
            self.prev = steps
            return int((min(self.pretrain, steps) if self.pretrain else steps) * self.ratio)
        due = int((steps - self.prev) * self.ratio)
        self.prev += due / self.ratio
        return due

    def follow(self, times: int, policy_steps: int) -> Iterator[int]:
        """Yield what ``times`` calls of :meth:`advance` return."""
        if self.prev is None or self.ratio == 0:
            yield self.advance(policy_steps)
            times -= 1
        each = policy_steps * self.processes
        ended = self.steps + each * times
        prev, ratio, divisor = self.prev, self.ratio, self.divisor
        for steps in range(self.steps + each, ended + 1, each):
            due = 0 if prev is None else int((steps / divisor - prev) * ratio)
            if due and prev is not None:
                prev += due / ratio
            yield due
        self.prev, self.steps = prev, ended

    def total(self, trainings: int, policy_steps: int) -> int | None:
        """The gradient steps of ``trainings`` iterations, if floats make no difference.

        They make none for whole ratios and for powers of two, as long as all steps are whole.
        """
        each = policy_steps * self.processes
        last = self.steps + trainings * each
        if self.prev is not None or last >= _EXACT_FLOATS or trainings < 1:
            return None
        if (self.steps + each) % self.divisor or each % self.divisor:
            return None
        ratio = Fraction(self.ratio)
        if ratio and ratio.denominator != 1 and (1 / ratio).denominator != 1:
            return None
        first = (self.steps + each) // self.divisor
        asked = min(self.pretrain, first) if self.pretrain else first
        return int(asked * ratio) + int((last // self.divisor - first) * ratio)

    def state_dict(self) -> dict[str, Any]:
        """Return what was played and what of it is paid for."""
        return {"steps": self.steps, "prev": self.prev}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.steps = int(state_dict["steps"])
        prev = state_dict["prev"]
        self.prev = None if prev is None else float(prev)


def first_due(ratio: float, policy_steps: int) -> int:
    """Return how many iterations after the first training the first gradient step is due.

    Args:
        ratio: gradient steps per policy step of one process.
        policy_steps: policy steps of one process in an iteration.
    """
    each = ratio * policy_steps
    if each >= 1:
        return 0
    return math.ceil(1 / each) if each > 1 / _EXACT_FLOATS else _EXACT_FLOATS


class _PretrainingRatio(SheeprlRatio):
    """The ratio of 0.5.7, whose pretraining takes the place of its first answer."""

    pretrains = True


class TrainEvery:
    """Before ``replay_ratio``: a fixed number of gradient steps every so many iterations.

    Args:
        period: iterations from one training to the next.
        first: gradient steps of the first training.
        later: gradient steps of every other one.
    """

    pretrains = True

    def __init__(self, period: int, first: int, later: int) -> None:
        self.period, self.first, self.later = period, first, later
        self.iteration = 0

    def advance(self, policy_steps: int) -> int:
        """The gradient steps of the next iteration since training began."""
        del policy_steps
        self.iteration += 1
        if self.iteration == 1:
            return self.first
        return self.later if (self.iteration - 1) % self.period == 0 else 0

    def total(self, trainings: int, policy_steps: int) -> int:
        """The gradient steps of the first ``trainings`` iterations."""
        del policy_steps
        return self.first + (trainings - 1) // self.period * self.later if trainings else 0

    def state_dict(self) -> dict[str, int]:
        """The iterations since training began."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.iteration = int(state_dict["iteration"])


def _ratio(plan: UpdatePlan) -> float:
    if plan.replay_ratio is None:
        raise SettingError("replay_ratio", None, f"is needed for counting={plan.counting}", [1])
    return float(plan.replay_ratio)


def _numbers(plan: UpdatePlan, argument: str, wanted: int, optional: int = 0) -> list[float]:
    try:
        numbers = [float(text) for text in argument.split(",")] if argument else []
    except ValueError:
        numbers = []
    enough = wanted <= len(numbers) <= wanted + optional
    if not enough or min(numbers[:wanted]) < 0 or not all(map(math.isfinite, numbers)):
        rule = plan.counting.partition(":")[0]
        raise SettingError(
            "counting", plan.counting, f"needs {wanted} numbers after the colon", f"use {rule}:1"
        )
    return numbers


def _current(plan: UpdatePlan, argument: str) -> SheeprlRatio:
    """0.8.4; ``sheeprl:steps`` or ``sheeprl:steps,prev`` continues where a run was saved."""
    if not argument:
        return SheeprlRatio(_ratio(plan))
    steps, *prev = _numbers(plan, argument, 1, optional=1)
    return SheeprlRatio(_ratio(plan), start=int(steps), prev=prev[0] if prev else None)


def _july_2024(plan: UpdatePlan, argument: str) -> SheeprlRatio:
    """0.5.7, all but SAC."""
    del argument
    return _PretrainingRatio(_ratio(plan), plan.pretrain_steps)


def _july_2024_sac(plan: UpdatePlan, argument: str) -> SheeprlRatio:
    """0.5.7, SAC: the prefill is subtracted in iterations, and one iteration is added."""
    del argument
    each = plan.num_envs * plan.world_size
    random = plan.random_steps // each
    before = (max(random, 1) - 1) * each - (random - (random > 0)) + each
    return _PretrainingRatio(
        _ratio(plan),
        plan.pretrain_steps,
        start=before,
        processes=plan.world_size,
        divisor=plan.world_size,
    )


def _july_2024_decoupled(plan: UpdatePlan, argument: str) -> SheeprlRatio:
    """0.5.7, decoupled SAC: one process plays, the others share its policy steps."""
    (trainers,) = _numbers(plan, argument, 1)
    return _PretrainingRatio(_ratio(plan), plan.pretrain_steps, divisor=max(int(trainers), 1))


def _train_every(plan: UpdatePlan, argument: str) -> TrainEvery:
    """February 2024: ``sheeprl-0.5.0:period,first``."""
    period, first = _numbers(plan, argument, 2)
    return TrainEvery(max(int(period), 1), int(first), plan.gradient_steps_per_iteration or 0)


COUNTING_RULES.update(
    {
        "sheeprl": _current,
        "sheeprl-0.5.7": _july_2024,
        "sheeprl-0.5.7-sac": _july_2024_sac,
        "sheeprl-0.5.7-decoupled": _july_2024_decoupled,
        "sheeprl-0.5.0": _train_every,
    }
)
