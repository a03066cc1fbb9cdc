"""The counts of a plan, iteration by iteration and in total."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from textwrap import fill
from typing import Any

from kit.dialects.base import Dialect
from kit.dialects.timeline import (
    FOLLOWED,
    about_gradient_steps,
    can_count,
    can_follow,
    timeline,
)
from kit.steps.plan import StepPlan
from kit.steps.table import plan_table, text_table

_WIDTH = 100


@dataclass
class Explanation:
    """A plan, the settings it comes from, and caveats."""

    plan: StepPlan
    """the run."""
    title: str
    """library, version and algorithm."""
    settings: dict[str, Any] = field(default_factory=dict)
    """settings that are not at their default."""
    notes: list[str] = field(default_factory=list)
    """caveats: what a reader of the settings may not expect."""

    def text(self, iterations: int = 12) -> str:
        """The explanation as text.

        Args:
            iterations: number of iterations to list.
        """
        said = self._said() if self.settings else []
        parts = [self.title, "", *said, plan_text(self.plan)]
        if self.plan.is_exact and self.plan.iterations:
            parts += ["", "Iteration by iteration, then in total: policy steps, gradient steps"]
            parts += [iteration_table(self.plan, iterations)]
            parts += ["", timeline(self.plan)]
        if self.notes:
            parts += ["", "Caveats"]
            parts += [fill(f"- {note}", _WIDTH, subsequent_indent="  ") for note in self.notes]
        return "\n".join(parts)

    def _said(self) -> list[str]:
        said = " ".join(f"{name}={shown(value)}" for name, value in self.settings.items())
        indent = "  "
        return [fill(said, _WIDTH, initial_indent=indent, subsequent_indent=indent), ""]

    def to_dict(self, iterations: int = 12) -> dict[str, Any]:
        """The explanation as plain values (JSON)."""
        exact = self.plan.is_exact and can_count(self.plan)
        return {
            "title": self.title,
            "settings": plain(self.settings),
            "plan": self.plan.to_dict(),
            "totals": asdict(self.plan.after(self.plan.iterations)) if exact else None,
            "iterations": [
                iteration_row(self.plan, k) for k in listed(self.plan, iterations) if k is not None
            ]
            if self.plan.is_exact
            else None,
            "notes": self.notes,
        }


def explain(settings: Dialect | StepPlan) -> Explanation:
    """Explain the settings of a library, or a plan.

    Raises:
        SettingError: if the settings make no plan.
    """
    if isinstance(settings, StepPlan):
        return Explanation(settings, "A plan of the kit")
    plan = settings.to_plan()
    made = settings.resolved()
    family = made.family.replace("_", "-")
    algorithm = family if made.algo == made.family else f"{made.algo} ({family})"
    notes = [
        f"{name}={value} has no effect for {made.algo} in {made.LIBRARY}."
        for name, value in settings.changed().items()
        if name in settings.idle_settings()
    ]
    notes += settings.notes()
    version = made.VERSIONS[made.version]
    if made.version == "documented":
        notes.append(f"Follows the documentation, not the code: {version}.")
    title = f"{made.LIBRARY} {made.version}, {algorithm}"
    return Explanation(plan, title, settings.changed(), notes)


def plan_text(plan: StepPlan) -> str:
    """The table of a plan; a shorter one if it is too long to simulate."""
    if not plan.is_exact or can_count(plan):
        return plan_table(plan)
    rows = [
        ("iterations", f"{plan.iterations:,}"),
        ("policy steps", f"{plan.total_policy_steps:,}"),
        ("  of these random", f"{plan.random_steps_until(plan.total_policy_steps):,}"),
        ("gradient steps", f"about {about_gradient_steps(plan):,}"),
    ]
    why = f"counting={plan.counting} has to be simulated step by step, which is too long here."
    return text_table(("", "planned"), rows) + f"\n{why}"


def listed(plan: StepPlan, most: int) -> list[int | None]:
    """The iterations to list: the first, those around the first training, the last.

    ``None`` stands for a gap.
    """
    last, first = plan.iterations, min(plan.first_training_iteration, plan.iterations)
    if last <= most:
        return list(range(1, last + 1))
    near = max(most - 4, 1)
    chosen = {1, 2, last} | set(range(max(first - 1, 1), min(first + near, last + 1)))
    made: list[int | None] = []
    for k in sorted(chosen):
        before = made[-1] if made else 0
        if before is not None and k > before + 1:
            made.append(None)
        made.append(k)
    return made


def iteration_row(plan: StepPlan, iteration: int) -> dict[str, Any]:
    """The counts of one iteration, and the totals at its end."""
    before = plan.policy_steps_after(iteration - 1) if iteration > 1 else 0
    after = plan.policy_steps_after(iteration)
    near = can_count(plan) or can_follow(plan, iteration, FOLLOWED // 10)
    steps = plan.gradient_steps(iteration) * plan.world_size if near else None
    return {
        "iteration": iteration,
        "policy_steps": after - before,
        "random_policy_steps": plan.random_steps_until(after) - plan.random_steps_until(before),
        "gradient_steps": steps,
        "minibatches": _minibatches(plan, iteration) if near else None,
        "evaluations": plan.evaluations(iteration),
        "total_policy_steps": after,
        "total_gradient_steps": (
            plan.gradient_steps_after(iteration) * plan.world_size if near else None
        ),
    }


def _minibatches(plan: StepPlan, iteration: int) -> dict[int, int]:
    if not plan.on_policy and plan.minibatch_size is None:
        return {}
    return plan.minibatch_counts(iteration)


def iteration_table(plan: StepPlan, most: int) -> str:
    """The iterations to list, as a text table."""
    header = ("iteration", "collects", "random", "updates", "evaluates", "collected", "updated")
    rows: list[list[str]] = []
    if plan.evaluations(0) or plan.policy_steps_after(0):
        start = plan.policy_steps_after(0)
        random = plan.random_steps_until(start)
        rows.append(_cells("start", start, random, 0, plan.evaluations(0), start, 0))
    for k in listed(plan, most):
        if k is None:
            rows.append(["..."] + [""] * 6)
            continue
        row = iteration_row(plan, k)
        collected = row["policy_steps"] - (plan.policy_steps_after(0) if k == 1 else 0)
        random = row["random_policy_steps"]
        if k == 1:
            random -= plan.random_steps_until(plan.policy_steps_after(0))
        rows.append(
            _cells(
                f"{k:,}",
                collected,
                random,
                row["gradient_steps"],
                row["evaluations"],
                row["total_policy_steps"],
                row["total_gradient_steps"],
            )
        )
    return text_table(header, rows)


def _cells(name: str, *values: int | None) -> list[str]:
    shown = ["?" if value is None else f"{value:,}" if value else "-" for value in values]
    return [name, *shown]


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON values."""
    made: dict[str, Any] = {}
    for name, value in settings.items():
        if hasattr(value, "__dataclass_fields__"):
            value = {f.name: getattr(value, f.name) for f in fields(value)}
        made[name] = value if isinstance(value, (int, float, str, dict, list)) else str(value)
    return made


def shown(value: Any) -> str:
    """A setting as one would type it."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 100:
        return str(int(value))
    return str(value)
