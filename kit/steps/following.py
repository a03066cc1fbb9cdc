"""Plans whose gradient steps are known only by following a foreign rule, float by float."""

from __future__ import annotations

from kit.steps.counting import counting_rule
from kit.steps.evaluation import EvaluationPlan

FOLLOWED = 600_000
"""Iterations that are followed one by one at most, where a foreign rule leaves no other way."""


def can_count(plan: EvaluationPlan) -> bool:
    """Whether all counts of a plan are known at once, or after a short while."""
    if not plan.is_exact or can_follow(plan, plan.iterations):
        return plan.is_exact
    each = plan.frames_per_batch
    return counting_rule(plan.counting)(plan).total(1, each, each) is not None


def can_follow(plan: EvaluationPlan, iteration: int, most: int = FOLLOWED) -> bool:
    """Whether a plan can be followed up to ``iteration`` in a short while."""
    rule = counting_rule(plan.counting)(plan)
    asked = plan.policy_steps_per_iteration if rule.asks_each_step else 1
    return iteration * asked <= most


def about_gradient_steps(plan: EvaluationPlan) -> int:
    """Gradient steps of all processes, nearly, in a plan that is too long to follow."""
    trained = max(plan.iterations - plan.first_training_iteration + 1, 0)
    steps = plan.policy_steps_per_iteration * trained
    return int((plan.replay_ratio or 0) * steps) + plan.pretrain_steps * plan.world_size
