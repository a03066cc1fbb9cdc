"""What the records of several libraries have in common."""

from __future__ import annotations

from kit.testing.observed import LISTED, gradient_steps


def listed(plan):
    """Iterations that are listed one by one: the first ones of a long run."""
    return range(1, min(plan.iterations, LISTED) + 1)


def first_training(plan):
    """The first iteration that makes a gradient step, if there is one."""
    return next((k for k, due in enumerate(gradient_steps(plan), 1) if due), None)


def evaluations(plan):
    """Iterations whose end is followed by an evaluation, each as often as it is; 0 is the start."""
    return [k for k in (0, *listed(plan)) for _ in range(plan.evaluations(k))]


def renamed(params, names):
    """Settings with some of them under the dialect's name."""
    return {names.get(name, name): value for name, value in params.items()}


def known(cls, params):
    """The settings that are fields of a dialect."""
    return {n: v for n, v in params.items() if n in cls.__dataclass_fields__}
