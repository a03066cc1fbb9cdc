"""Text tables for plans and ledgers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from textwrap import fill
from typing import Any

from kit.steps.counts import PlannedCounts, can_count
from kit.steps.ledger import StepLedger

Row = tuple[str, str, str, str]

COUNTS = {
    "iterations": "iterations",
    "policy_steps": "policy steps",
    "random_policy_steps": "  random actions",
    "env_steps": "env steps",
    "gradient_steps": "gradient steps",
    "samples": "transitions trained on",
    "evaluations": "evaluations",
}
"""Table labels for the counters in plans and ledgers."""


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with a left-aligned first column and right-aligned other columns."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = []
    for number, line in enumerate(lines):
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        text.append("  ".join(cells).rstrip())
        if number == 0:
            text.append("  ".join("-" * width for width in widths))
    return "\n".join(text)


_RESTS = {"smaller": "  last of each epoch, partial", "drop": "  left out of each epoch"}
"""Table labels for rows that do not fill a minibatch, keyed by ``last_minibatch``."""


def number(value: Any) -> str:
    """Format an integer with thousands separators, or return an empty string for ``None``."""
    return "" if value is None else f"{value:,}"


def measured(value: float) -> str:
    """Format a mean with one decimal place, or with three significant digits below 1."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.3g}" if 0 < abs(value) < 1 else f"{value:z,.1f}"


def plural(value: int, one: str) -> str:
    """Format a number and its noun, such as ``1 env`` or ``4 envs``."""
    return f"{value:,} {one}{'' if value == 1 else 's'}"


def plan_table(plan: PlannedCounts, ledger: StepLedger | None = None) -> str:
    """Return a table of the requested, planned and, with a ledger, counted values."""
    rows = [*_setting_rows(plan), *_count_rows(plan, ledger)]
    columns = 3 if ledger is None else 4
    header = ("", "asked", "planned", "counted")[:columns]
    table = text_table(header, [row[:columns] for row in rows])
    return "\n".join([table, *(fill(line, 100, subsequent_indent="  ") for line in plan.remarks)])


def _setting_rows(plan: PlannedCounts) -> list[Row]:
    if plan.collects_episodes:
        minima = [("episode", plan.min_episodes), ("policy step", plan.min_steps)]
        asked = " and ".join(plural(value, unit) for unit, value in minima if value)
        batch = ("batch", f"whole episodes, at least {asked}")
    elif plan.offline:
        batch = ("transitions", "stored (offline)")
    else:
        size = f"{plural(plan.num_envs, 'env')} x {plural(plan.steps_per_env or 0, 'step')}"
        processes = f" x {plan.world_size} processes" if plan.world_size > 1 else ""
        batch = ("batch", size + processes)
    rows = [batch]
    if plan.normalization_steps:
        rows.append(("random steps before the run", number(plan.normalization_steps)))
    if plan.update_epochs is not None:
        first = plan.first_training_iteration if plan.is_exact else None
        if first is not None and first <= plan.iterations:
            counts = plan.minibatch_counts(first).items()
            sizes = ", ".join(f"{times:,} x {size:,}" for size, times in counts)
            rows.append(("minibatches per iteration", sizes or "none"))
            rest = plan.rows(first) // (plan.sequence_length or 1) % (plan.minibatch_size or 1)
            if rest and plan.last_minibatch in _RESTS:
                rows.append((_RESTS[plan.last_minibatch], f"{rest:,} of {plan.minibatch_size:,}"))
        else:
            rows.append(("update epochs", number(plan.update_epochs)))
    elif plan.trains:
        if plan.replay_ratio is not None:
            rows.append(("gradient steps per policy step", str(plan.replay_ratio)))
        else:
            rows.append(("gradient steps per iteration", number(plan.gradient_steps_per_iteration)))
        rows.append(("minibatch", number(plan.minibatch_size) or "the whole buffer"))
    if plan.counting != "exact":
        rows.append(("gradient steps counted like", plan.counting))
    given = {"batch": number(plan.asked.get("frames_per_batch"))}
    return [(name, given.get(name, ""), value, "") for name, value in rows]


def planned_counts(plan: PlannedCounts, followed: bool = False) -> dict[str, str]:
    """Return the known counts at the end of a plan as strings, keyed by name.

    Args:
        plan: plan of the run.
        followed: whether a run has completed the plan, so that all planned counts are known.
    """
    steps = plan.total_policy_steps
    known = {"iterations": number(plan.iterations), "policy_steps": number(steps)}
    if not plan.is_exact:
        return known
    if followed or can_count(plan):
        counts = asdict(plan.after(plan.iterations))
        return known | {name: number(value) for name, value in counts.items()}
    trained = max(plan.iterations - plan.first_training_iteration + 1, 0)
    due = int((plan.replay_ratio or 0) * plan.policy_steps_per_iteration * trained)
    return known | {
        "random_policy_steps": number(plan.random_steps_until(steps)),
        "gradient_steps": f"about {due + plan.pretrain_steps * plan.world_size:,}",
        "evaluations": number(plan.evaluations_after(plan.iterations)),
    }


def _count_rows(plan: PlannedCounts, ledger: StepLedger | None) -> list[Row]:
    planned = planned_counts(plan, ledger is not None and ledger.iterations == plan.iterations)
    if plan.is_exact:
        steps = plan.policy_steps_after(plan.iterations)
        low = f"{steps:,} to " if plan.action_repeat > 1 else ""
        planned["env_steps"] = f"{low}{steps * plan.action_repeat:,}"
        if plan.minibatch_size is None and plan.update_epochs is None:
            planned.pop("samples", None)  # this count depends on the buffer size
    asked = {"policy_steps": plan.asked.get("total_policy_steps", plan.total_policy_steps)}
    asked["random_policy_steps"] = plan.asked.get("random_steps", plan.random_steps)
    rows = []
    for name, label in COUNTS.items():
        counted = number(getattr(ledger, name)) if ledger is not None else ""
        rows.append((label, number(asked.get(name)), planned.get(name) or "not planned", counted))
    if ledger is not None:
        rows.append(("episodes", "", "not planned", number(ledger.episodes)))
    return rows
