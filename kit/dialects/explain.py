"""The counts of a plan, iteration by iteration and in total."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from textwrap import fill
from typing import Any

from kit.dialects.base import Dialect
from kit.dialects.carried import changed
from kit.steps.counts import FOLLOWED, can_count, can_follow
from kit.steps.plan import StepPlan
from kit.steps.table import COUNTS, plan_table, planned_counts, text_table

_WIDTH = 100
_COUNTS = {name: label for name, label in COUNTS.items() if name != "env_steps"}


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
    """caveats of the settings."""

    def text(self, iterations: int = 12) -> str:
        """The explanation as text, in which so many ``iterations`` are listed."""
        said = " ".join(f"{name}={shown(value)}" for name, value in self.settings.items())
        parts = [self.title, ""]
        if said:
            parts += [fill(said, _WIDTH, initial_indent="  ", subsequent_indent="  "), ""]
        parts.append(plan_text(self.plan))
        if self.plan.is_exact and self.plan.iterations:
            parts += ["", "Iteration by iteration, then in total: policy steps, gradient steps"]
            parts += [iteration_table(self.plan, iterations)]
        if self.notes:
            parts += ["", "Caveats"]
            parts += [fill(f"- {note}", _WIDTH, subsequent_indent="  ") for note in self.notes]
        return "\n".join(parts)

    def to_dict(self, iterations: int = 12) -> dict[str, Any]:
        """The explanation as plain values (JSON)."""
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
        f"{name}={getattr(settings, name)} has no effect for {made.algo} in {made.LIBRARY}."
        for name in settings.idle_settings()
    ]
    notes += settings.notes()
    title = f"{made.LIBRARY} {made.version}, {algorithm}"
    return Explanation(plan, title, changed(settings), notes)


def plan_text(plan: StepPlan) -> str:
    """The table of a plan, which says so if it is too long to simulate."""
    if not plan.is_exact or can_count(plan):
        return plan_table(plan)
    why = f"counting={plan.counting} has to be simulated step by step, which is too long here."
    return f"{plan_table(plan)}\n{why}"


def totals(plan: StepPlan) -> dict[str, str]:
    """The totals of a run, as far as they are known beforehand."""
    known, other = planned_counts(plan), "?" if plan.is_exact else "not known in advance"
    if not plan.is_exact:
        del known["policy_steps"]
    return {label: known.get(name, other) for name, label in _COUNTS.items()}


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
    """The counts of one iteration, and the totals at its end; 0 is the start of the run."""
    before = plan.policy_steps_after(iteration - 1) if iteration > 1 else 0
    after = plan.policy_steps_after(iteration)
    near = can_count(plan) or can_follow(plan, iteration, FOLLOWED // 10)
    done = plan.gradient_steps_after(iteration) if near else None
    steps = plan.gradient_steps(iteration) if near and iteration else done
    whole_buffer = not plan.on_policy and plan.minibatch_size is None
    counted = near and iteration and not whole_buffer
    sizes = plan.minibatch_counts(iteration) if counted else {}
    return {
        "iteration": iteration,
        "policy_steps": after - before,
        "random_policy_steps": plan.random_steps_until(after) - plan.random_steps_until(before),
        "gradient_steps": None if steps is None else steps * plan.world_size,
        "minibatches": sizes if near else None,
        "evaluations": plan.evaluations(iteration),
        "total_policy_steps": after,
        "total_gradient_steps": None if done is None else done * plan.world_size,
    }


def iteration_table(plan: StepPlan, most: int) -> str:
    """The iterations to list, as a text table."""
    header = ("iteration", "collects", "random", "updates", "evaluates", "collected", "updated")
    start = iteration_row(plan, 0)
    begins = start["evaluations"] or start["policy_steps"]
    rows: list[list[str]] = []
    for k in [*([0] if begins else []), *listed(plan, most)]:
        if k is None:
            rows.append(["..."] + [""] * 6)
            continue
        row = iteration_row(plan, k)
        if k == 1:  # without what is collected before it
            for count in ("policy_steps", "random_policy_steps"):
                row[count] -= start[count]
        del row["minibatches"]
        _, *counts = row.values()
        shown = ["?" if count is None else f"{count:,}" if count else "-" for count in counts]
        rows.append([f"{k:,}" if k else "start", *shown])
    return text_table(header, rows)


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as JSON values."""
    kept = (int, float, str, dict, list)
    return {n: value if isinstance(value, kept) else str(value) for n, value in settings.items()}


def shown(value: Any) -> str:
    """A setting as one would type it."""
    if isinstance(value, float) and value.is_integer() and abs(value) >= 100:
        return str(int(value))
    return str(value)
