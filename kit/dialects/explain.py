"""Text and JSON explanations of plans: counts per iteration, totals and caveats."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from textwrap import fill
from typing import Any

from kit.dialects.base import Dialect
from kit.dialects.carried import changed
from kit.dialects.fields import flat
from kit.steps.counts import FOLLOWED, can_count, can_follow
from kit.steps.plan import StepPlan
from kit.steps.table import COUNTS, plan_table, planned_counts, text_table

_WIDTH = 100
_COUNTS = {name: label for name, label in COUNTS.items() if name != "env_steps"}


@dataclass
class Explanation:
    """A plan with its settings and caveats."""

    plan: StepPlan
    """Plan for the run."""
    title: str
    """Title with the library, version and algorithm."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from their defaults."""
    notes: list[str] = field(default_factory=list)
    """Caveats that apply to the settings."""

    def text(self, iterations: int = 12) -> str:
        """Return the explanation as text that lists at most ``iterations`` iterations."""
        settings = " ".join(f"{name}={shown(value)}" for name, value in self.settings.items())
        parts = [self.title, ""]
        if settings:
            parts += [fill(settings, _WIDTH, initial_indent="  ", subsequent_indent="  "), ""]
        parts.append(plan_text(self.plan))
        if self.plan.is_exact and self.plan.iterations:
            parts += ["", "Counts per iteration, and cumulative policy and gradient steps"]
            parts += [iteration_table(self.plan, iterations)]
        if self.notes:
            parts += ["", "Caveats"]
            parts += [fill(f"- {note}", _WIDTH, subsequent_indent="  ") for note in self.notes]
        return "\n".join(parts)

    def to_dict(self, iterations: int = 12) -> dict[str, Any]:
        """Return the explanation as JSON-compatible values."""
        plan, rows = self.plan, None
        if plan.is_exact:
            rows = [iteration_row(plan, k) for k in listed(plan, iterations) if k is not None]
        return {
            "title": self.title,
            "settings": plain(self.settings),
            "plan": plan.to_dict(),
            "totals": asdict(plan.after(plan.iterations)) if can_count(plan) else None,
            "iterations": rows,
            "notes": self.notes,
        }


def explain(settings: Dialect | StepPlan) -> Explanation:
    """Explain the settings of a library or a plan.

    Raises:
        SettingError: if the settings are invalid.
    """
    if isinstance(settings, StepPlan):
        return Explanation(settings, "kit plan")
    plan = settings.to_plan()
    resolved = settings.resolved()
    family = resolved.family.replace("_", "-")
    algorithm = family if resolved.algo == resolved.family else f"{resolved.algo} ({family})"
    notes = [
        f"{name}={flat(settings)[name]} has no effect for {resolved.algo} in {resolved.LIBRARY}."
        for name in settings.idle_settings()
    ]
    notes += settings.notes()
    title = f"{resolved.LIBRARY} {resolved.version}, {algorithm}"
    return Explanation(plan, title, changed(settings), notes)


def plan_text(plan: StepPlan) -> str:
    """Return a plan as a text table, with a note if the plan is too long to simulate."""
    if not plan.is_exact or can_count(plan):
        return plan_table(plan)
    note = (
        f"counting={plan.counting} needs a step-by-step simulation; this plan is too long for it."
    )
    return f"{plan_table(plan)}\n{note}"


def totals(plan: StepPlan) -> dict[str, str]:
    """Return a run's totals keyed by label, with ``?`` or a note for unknown totals."""
    counts, unknown = planned_counts(plan), "?" if plan.is_exact else "not known in advance"
    if not plan.is_exact:
        del counts["policy_steps"]
    return {label: counts.get(name, unknown) for name, label in _COUNTS.items()}


def listed(plan: StepPlan, most: int) -> list[int | None]:
    """Return the iterations to list, with ``None`` for gaps.

    These are the first and last iterations, and iterations around the first training iteration.
    """
    last, first = plan.iterations, min(plan.first_training_iteration, plan.iterations)
    if last <= most:
        return list(range(1, last + 1))
    near = max(most - 4, 1)
    chosen = {1, 2, last} | set(range(max(first - 1, 1), min(first + near, last + 1)))
    iterations: list[int | None] = []
    for k in sorted(chosen):
        before = iterations[-1] if iterations else 0
        if before is not None and k > before + 1:
            iterations.append(None)
        iterations.append(k)
    return iterations


def iteration_row(plan: StepPlan, iteration: int) -> dict[str, Any]:
    """Return an iteration's counts and the totals after it. Iteration 0 is the start of the run."""
    before = plan.policy_steps_after(iteration - 1) if iteration > 1 else 0
    after = plan.policy_steps_after(iteration)
    can_simulate = can_count(plan) or can_follow(plan, iteration, FOLLOWED // 10)
    done = plan.gradient_steps_after(iteration) if can_simulate else None
    steps = plan.gradient_steps(iteration) if can_simulate and iteration else done
    whole_buffer = not plan.on_policy and plan.minibatch_size is None
    has_sizes = can_simulate and iteration and not whole_buffer
    sizes = plan.minibatch_counts(iteration) if has_sizes else {}
    return {
        "iteration": iteration,
        "policy_steps": after - before,
        "random_policy_steps": plan.random_steps_until(after) - plan.random_steps_until(before),
        "gradient_steps": None if steps is None else steps * plan.world_size,
        "minibatches": sizes if can_simulate else None,
        "evaluations": plan.evaluations(iteration),
        "total_policy_steps": after,
        "total_gradient_steps": None if done is None else done * plan.world_size,
    }


def iteration_table(plan: StepPlan, most: int) -> str:
    """Return a text table with one row for each listed iteration."""
    header = ("iteration", "collects", "random", "updates", "evaluates", "collected", "updated")
    start = iteration_row(plan, 0)
    begins = start["evaluations"] or start["policy_steps"]
    rows: list[list[str]] = []
    for k in [*([0] if begins else []), *listed(plan, most)]:
        if k is None:
            rows.append(["..."] + [""] * 6)
            continue
        row = iteration_row(plan, k)
        if k == 1:  # Subtract the steps that were collected before the first iteration.
            for count in ("policy_steps", "random_policy_steps"):
                row[count] -= start[count]
        del row["minibatches"]
        _, *counts = row.values()
        shown = ["?" if count is None else f"{count:,}" if count else "-" for count in counts]
        rows.append([f"{k:,}" if k else "start", *shown])
    return text_table(header, rows)


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert settings to JSON-compatible values."""
    types = (int, float, str, dict, list)
    return {n: value if isinstance(value, types) else str(value) for n, value in settings.items()}


def shown(value: Any) -> str:
    """Format a setting's value as a user would type it."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 100:
        return str(int(value))
    return str(value)
