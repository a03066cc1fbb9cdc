"""When a plan collects, trains and evaluates, drawn as text and as a picture."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from kit.steps.counts import FOLLOWED, can_count, can_follow
from kit.steps.plan import StepPlan

_COLUMNS = 60


def timeline(plan: StepPlan) -> str:
    """Draw an exact plan: iterations around the first training one by one, then the whole run."""
    first = min(plan.first_training_iteration, plan.iterations)
    start = max(min(first - 8, plan.iterations - _COLUMNS + 1), 1)
    end = min(start + _COLUMNS - 1, plan.iterations)
    drawn = _lanes(plan, [(k - 1, k) for k in range(start, end + 1)])
    title = f"Timeline, one column per iteration, {start:,} to {end:,}"
    parts = [title, *drawn]
    if plan.iterations > _COLUMNS:
        edges = [plan.iterations * k // _COLUMNS for k in range(_COLUMNS + 1)]
        drawn = _lanes(plan, list(pairwise(edges)))
        title = f"The whole run, {plan.iterations / _COLUMNS:,.4g} iterations per column"
        parts += ["", title, *drawn]
    legend = (
        "r random, m some random, c chosen by the policy; 1-9 gradient steps, + more; E evaluation"
    )
    return "\n".join([*parts, f"  ({legend})"])


def _lanes(plan: StepPlan, spans: list[tuple[int, int]]) -> list[str]:
    """The lanes of a drawing, a column for each span of iterations."""
    one_by_one = all(end - start == 1 for start, end in spans)
    known = can_count(plan) or (one_by_one and can_follow(plan, spans[-1][1], FOLLOWED // 10))
    collects = "".join(_collects(plan, *span) for span in spans)
    updates = "".join(_updates(plan, *span) for span in spans) if known else "not known here"
    done = [(plan.evaluations_after(a) if a else 0, plan.evaluations_after(b)) for a, b in spans]
    evaluates = "".join("E" if after > before else " " for before, after in done)
    lanes = [f"  collect   {collects}", f"  update    {updates}"]
    return [*lanes, f"  evaluate  {evaluates}".rstrip()] if evaluates.strip() else lanes


def _collects(plan: StepPlan, start: int, end: int) -> str:
    before, after = plan.policy_steps_after(start), plan.policy_steps_after(end)
    random = plan.random_steps_until(after) - plan.random_steps_until(before)
    if before == after:
        return "."
    return "r" if random == after - before else "m" if random else "c"


def _updates(plan: StepPlan, start: int, end: int) -> str:
    """Gradient steps of one process in an iteration, on average over the span."""
    steps = plan.gradient_steps_after(end) - plan.gradient_steps_after(start)
    if not steps:
        return "."
    mean = steps / (end - start)
    return "+" if mean > 9 else str(max(round(mean), 1))


def picture(plan: StepPlan, path: str, title: str) -> None:
    """Draw gradient steps over policy steps, and the first iterations, into a file.

    Args:
        plan: an exact plan with at least one iteration.
        path: file to write; its ending says the format.
        title: first line of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    whole, near = figure.subplots(2, 1)
    _draw_whole(plan, whole)
    whole.set_title(title)
    _draw_near(plan, near)
    figure.savefig(path, dpi=120)


def _draw_whole(plan: StepPlan, axes: Any) -> None:
    last = plan.iterations
    points = sorted({last * k // 400 for k in range(401)} | {plan.first_training_iteration - 1})
    points = [k for k in points if 0 <= k <= last]
    steps = [plan.policy_steps_after(k) for k in points]
    axes.plot(steps, [plan.gradient_steps_after(k) * plan.world_size for k in points])
    random = plan.random_steps_until(steps[-1])
    if random:
        axes.axvspan(0, random, alpha=0.15, color="tab:orange", label="random actions")
    evaluated = [k for k in points if k and plan.evaluations(k)]
    if evaluated:
        marks = [plan.policy_steps_after(k) for k in evaluated]
        axes.plot(marks, [0] * len(marks), "|", color="tab:green", label="evaluations")
    if random or evaluated:
        axes.legend(loc="upper left")
    axes.set(xlabel="policy steps", ylabel="gradient steps")
    axes.grid(alpha=0.3)


def _draw_near(plan: StepPlan, axes: Any) -> None:
    """The iterations around the first training: a band for each collection, then its updates."""
    first = min(plan.first_training_iteration, plan.iterations)
    start = max(first - 6, 1)
    end = min(start + 23, plan.iterations)
    for k in range(start, end + 1):
        # The very first band begins where a separate prefill ended.
        before = plan.policy_steps_after(k - 1) if k > 1 or not plan.prefill_is_iteration else 0
        after = plan.policy_steps_after(k)
        random = plan.random_steps_until(after) - plan.random_steps_until(before)
        color = "tab:orange" if random else "tab:blue"
        axes.axvspan(before, after, alpha=0.12 + 0.1 * (k % 2), color=color, linewidth=0)
        steps = plan.gradient_steps(k) * plan.world_size
        axes.vlines(after, 0, steps, color="black", linewidth=2)
        if plan.evaluations(k):
            axes.plot(after, 0, "v", color="tab:green", clip_on=False)
    which = f"Iterations {start:,} to {end:,}" if end > start else f"Iteration {start:,}"
    title = f"{which}: a band is a collection (orange: random), a line the gradient steps then due"
    axes.set(xlabel="policy steps", ylabel="gradient steps", title=title)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
