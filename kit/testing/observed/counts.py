"""Figures that several libraries are observed by."""

from __future__ import annotations

from typing import Any

from kit.steps.plan import StepPlan


def gradient_steps(plan: StepPlan) -> list[int]:
    """Gradient steps of one process in each iteration."""
    return [plan.gradient_steps(k) for k in range(1, plan.iterations + 1)]


def first_training(plan: StepPlan) -> int | None:
    """The first iteration that makes a gradient step, if there is one."""
    steps = gradient_steps(plan)
    return next((k for k, due in enumerate(steps, 1) if due), None)


def evaluations(plan: StepPlan) -> list[int]:
    """Iterations whose end is followed by an evaluation, each as often as it is; 0 is the start."""
    return [k for k in range(plan.iterations + 1) for _ in range(plan.evaluations(k))]


def renamed(params: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return settings with some of them under the dialect's name."""
    return {names.get(name, name): value for name, value in params.items()}


def known(cls: type, params: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are fields of a dialect."""
    return {n: v for n, v in params.items() if n in cls.__dataclass_fields__}  # type: ignore[attr-defined]
