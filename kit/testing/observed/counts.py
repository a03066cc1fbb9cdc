"""Figures that several libraries are observed by."""

from __future__ import annotations

from typing import Any

from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan

LISTED = 1_000
"""Iterations that are listed one by one; no record lists more."""
FOLLOWED = 1_000_000
"""Iterations of a library's own counting that are followed one by one."""


def listed(plan: StepPlan) -> range:
    """Iterations that are listed one by one: the first ones of a long run."""
    return range(1, min(plan.iterations, LISTED) + 1)


def gradient_steps(plan: StepPlan) -> list[int]:
    """Gradient steps of one process in each listed iteration.

    Raises:
        SettingError: if the run is too long to follow; none was observed.
    """
    if plan.counting != "exact" and plan.iterations > FOLLOWED:
        why = "are more than were ever recorded: is the length of the run missing?"
        raise SettingError("iterations", plan.iterations, why, [FOLLOWED])
    return [plan.gradient_steps(k) for k in listed(plan)]


def of_plan(plan: StepPlan) -> dict[str, Any]:
    """Figures by the names under which most libraries are observed."""
    played = plan.total_policy_steps
    return {
        "iterations": plan.iterations,
        "policy_steps_total": played,
        "random_action_policy_steps": plan.random_steps_until(played),
        "gradient_steps_per_iteration": gradient_steps(plan),
        "gradient_steps_total": plan.gradient_steps_after(plan.iterations),
        "first_iteration_with_gradient_step": first_training(plan),
    }


def first_training(plan: StepPlan) -> int | None:
    """The first iteration that makes a gradient step, if there is one."""
    steps = gradient_steps(plan)
    return next((k for k, due in enumerate(steps, 1) if due), None)


def evaluations(plan: StepPlan) -> list[int]:
    """Iterations whose end is followed by an evaluation, each as often as it is; 0 is the start."""
    return [k for k in (0, *listed(plan)) for _ in range(plan.evaluations(k))]


def renamed(params: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Settings with some of them under the dialect's name."""
    return {names.get(name, name): value for name, value in params.items()}


def known(cls: type, params: dict[str, Any]) -> dict[str, Any]:
    """The settings that are fields of a dialect."""
    return {n: v for n, v in params.items() if n in cls.__dataclass_fields__}  # type: ignore[attr-defined]
