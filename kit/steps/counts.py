"""The counts of a plan after each of its iterations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kit.steps.counting import counting_rule
from kit.steps.errors import SettingError
from kit.steps.evaluation import EvaluationPlan

Rounding = Literal["error", "down", "up"]

FOLLOWED = 600_000
"""Iterations that are followed one by one at most, where a foreign rule leaves no other way."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts after some iteration; totals over all processes unless named local."""

    iterations: int
    """collections, each followed by one update phase."""
    policy_steps: int
    """actions chosen, over all envs of all processes."""
    random_policy_steps: int
    """policy steps with random actions, part of ``policy_steps``."""
    local_gradient_steps: int
    """optimiser updates of one process."""
    gradient_steps: int
    """optimiser updates of all processes together."""
    samples: int
    """transitions trained on by all processes together, each as often as it was used."""
    evaluations: int
    """evaluation phases, of ``evaluation_episodes`` episodes each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedCounts(EvaluationPlan):
    """All settings of a plan, and the counts that they make."""

    rounding: Rounding = "error"
    """what to do with counts that do not divide: refuse them, or round them ``down`` or ``up``."""
    asked: dict[str, Any] = field(default_factory=dict, repr=False)
    """settings as they were given, where rounding changed them (filled in)."""
    remarks: list[str] = field(default_factory=list, repr=False)
    """sentences under the table: what a run takes from another library's words besides counts."""

    @property
    def length(self) -> int | None:
        """What ``axis`` reaches; ``None`` where only the number of iterations is known."""
        return (
            self.gradient_steps_after(self.iterations) if self.offline else self.total_policy_steps
        )

    def after(self, iteration: int) -> Counts:
        """The counts at the end of ``iteration``; 0 is the start of the run.

        Raises:
            SettingError: if ``iteration`` is not in the plan, or the plan is not exact.
        """
        if not 0 <= iteration <= self.iterations:
            raise SettingError("iteration", iteration, "is not in the plan", [0, self.iterations])
        steps = self.policy_steps_after(iteration)
        gradient_steps = self.gradient_steps_after(iteration)
        return Counts(
            iterations=iteration,
            policy_steps=steps,
            random_policy_steps=self.random_steps_until(steps),
            local_gradient_steps=gradient_steps,
            gradient_steps=gradient_steps * self.world_size,
            samples=self.samples_after(iteration) * self.world_size,
            evaluations=self.evaluations_after(iteration),
        )


def can_count(plan: EvaluationPlan) -> bool:
    """Whether all counts of a plan are known at once, or after a short while."""
    if not plan.is_exact or can_follow(plan, plan.iterations):
        return plan.is_exact
    each = plan.frames_per_batch
    return counting_rule(plan.counting)(plan).total(1, each, each) is not None


def can_follow(plan: EvaluationPlan, iteration: int, most: int = FOLLOWED) -> bool:
    """Whether a foreign rule can be followed, float by float, to ``iteration`` in a short while."""
    rule = counting_rule(plan.counting)(plan)
    asked = plan.policy_steps_per_iteration if rule.asks_each_step else 1
    return iteration * asked <= most
