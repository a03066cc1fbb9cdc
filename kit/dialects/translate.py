"""The same run in the words of another library, and where two runs part."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from kit.dialects.base import ON_POLICY, Dialect
from kit.dialects.explain import explain, plain, plan_text, shown
from kit.dialects.timeline import FOLLOWED, about_gradient_steps, can_count
from kit.steps.plan import StepPlan
from kit.steps.same_run import differing_settings
from kit.steps.table import text_table

Difference = tuple[str, Any, Any]

_COUNTS = (
    ("iterations", "iterations"),
    ("policy_steps", "policy steps"),
    ("random_policy_steps", "  of these random"),
    ("gradient_steps", "gradient steps"),
    ("samples", "transitions trained on"),
    ("evaluations", "evaluations"),
)


@dataclass
class Translation:
    """Settings of one library for the run that settings of another make."""

    source: Dialect | StepPlan
    """settings that were given."""
    target: Dialect
    """the nearest settings of the other library."""
    differences: list[Difference]
    """settings of the plan that could not be said: its name, what is wanted, what can be said."""
    typed: dict[str, Any] = field(default_factory=dict)
    """settings of the source as they were typed, defaults included."""

    def text(self) -> str:
        """Return the translation as text."""
        told, plan = explain(self.source), as_plan(self.source)
        target = self.target.resolved()
        parts = [told.title]
        parts += [f"  {name}={shown(v)}" for name, v in (self.typed or told.settings).items()]
        parts += ["", f"in the words of {target.LIBRARY} {target.version} ({target.algo})"]
        parts += [f"  {name}={shown(value)}" for name, value in self.settings().items()]
        if not self.differences:
            return "\n".join([*parts, "", "The plan that both make", plan_text(plan)])
        parts += ["", "What could not be said"]
        parts += [f"- {sentence}" for sentence in told_differences(self.differences)]
        names = getattr(self.source, "NAME", "kit"), self.target.NAME
        parts += ["", "What both do", counts_table(plan, self.target.to_plan(), names)]
        parted = first_difference(plan, self.target.to_plan(), names)
        return "\n".join([*parts, "", parted] if parted else parts)

    def settings(self) -> dict[str, Any]:
        """Return the settings to type: those that count and are more than nothing, or changed."""
        made, changed = self.target.resolved(), self.target.changed()
        shown = made.applicable_fields(str(made.algo)) - made.FACTS - set(made.CARRIED) | set(
            changed
        )
        told = {
            f.name: getattr(made, f.name)
            for f in fields(made)
            if f.name in shown and f.name != "algo"
        }
        told = {n: v for n, v in told.items() if n in changed or v not in (None, False, 0, 1)}
        if made.version != next(iter(made.VERSIONS)):
            told["version"] = made.version
        return told

    def to_dict(self) -> dict[str, Any]:
        """Return the translation as plain values (JSON)."""
        return {
            "from": explain(self.source).to_dict(0),
            "to": {
                "dialect": self.target.NAME,
                "algo": self.target.resolved().algo,
                "settings": plain(self.settings()),
                "plan": self.target.to_plan().to_dict(),
            },
            "same_run": not self.differences,
            "not_said": [
                {"setting": name, "wanted": _text(wanted), "said": _text(said)}
                for name, wanted, said in self.differences
            ],
        }


def as_plan(settings: Dialect | StepPlan) -> StepPlan:
    """Return the plan that ``settings`` make, or are."""
    return settings if isinstance(settings, StepPlan) else settings.to_plan()


def translate(
    source: Dialect | StepPlan, target: type[Dialect], settings: dict[str, Any] | None = None
) -> Translation:
    """Say a run in the words of another library, as nearly as it can.

    Args:
        source: settings of a library, or a plan.
        target: dialect to say them in.
        settings: settings of the target to keep as they are; the version, for example.

    Raises:
        SettingError: if the target has no words that come near.
    """
    plan = as_plan(source)
    given = dict(settings or {})
    if isinstance(source, Dialect) and "algo" not in given:
        given |= _algorithm(source, target)
    made, differences = target.nearest(plan, **given)
    return Translation(source, made, differences)


def _algorithm(source: Dialect, target: type[Dialect]) -> dict[str, str]:
    """The algorithm of the same name, if the other library has it."""
    algo = str(source.resolved().algo)
    for name in (algo, algo.split("_")[0]):
        if name in target.ALGORITHMS and name != ON_POLICY:
            return {"algo": name}
    return {}


def told_differences(differences: list[Difference]) -> list[str]:
    """Say each difference in a sentence."""
    return [
        f"{name.replace('_', ' ')}: {_text(wanted)} is wanted, {_text(said)} can be said"
        for name, wanted, said in telling(differences)
    ]


def telling(differences: list[Difference]) -> list[Difference]:
    """Leave out how evaluations are made, where only one of two runs makes any."""
    evaluations = {name: (one, other) for name, one, other in differences}.get("evaluations")
    if evaluations is None or 0 not in evaluations:
        return differences
    return [d for d in differences if d[0] == "evaluations" or "evaluation" not in d[0]]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "nothing" if value is None else str(value)


def compare_text(one: StepPlan, other: StepPlan, names: tuple[str, str]) -> str:
    """Say where two runs part: in settings, in totals, and in which iteration first."""
    differences = differing_settings(one, other)
    if not differences:
        return "Both make the same run, count by count.\n\n" + plan_text(one)
    rows = [(n.replace("_", " "), _text(a), _text(b)) for n, a, b in telling(differences)]
    parts = [text_table(("differs in", *names), rows), "", counts_table(one, other, names)]
    parted = first_difference(one, other, names)
    return "\n".join([*parts, "", parted] if parted else parts)


def counts_table(
    one: StepPlan, other: StepPlan, names: tuple[str, str] = ("first", "second")
) -> str:
    """Return the totals of two runs side by side."""
    columns = []
    for plan in (one, other):
        columns.append([_total(plan, count) for count, _ in _COUNTS])
    rows = [(label, a, b) for (_, label), a, b in zip(_COUNTS, *columns, strict=True)]
    return text_table(("", *names), rows)


def _total(plan: StepPlan, count: str) -> str:
    if not plan.is_exact:
        return f"{plan.iterations:,}" if count == "iterations" else "as it comes"
    if can_count(plan):
        return f"{getattr(plan.after(plan.iterations), count):,}"
    if count == "gradient_steps":
        return f"about {about_gradient_steps(plan):,}"
    known = {
        "iterations": plan.iterations,
        "policy_steps": plan.total_policy_steps,
        "random_policy_steps": plan.random_steps_until(plan.total_policy_steps),
        "evaluations": plan.evaluations_after(plan.iterations),
    }
    return f"{known[count]:,}" if count in known else "?"


def first_difference(
    one: StepPlan, other: StepPlan, names: tuple[str, str] = ("first", "second")
) -> str:
    """Say in which iteration the counts of two runs part first; nothing if in none."""
    if not (one.is_exact and other.is_exact):
        return ""
    for k in range(1, min(one.iterations, other.iterations, FOLLOWED // 10) + 1):
        ours, theirs = _reached(one, k), _reached(other, k)
        if ours != theirs:
            return (
                f"They part in iteration {k:,}: {names[0]} {_said(ours)}, {names[1]} "
                f"{_said(theirs)}."
            )
    return ""


def _reached(plan: StepPlan, iteration: int) -> tuple[int, int]:
    steps = plan.gradient_steps_after(iteration) * plan.world_size
    return plan.policy_steps_after(iteration), steps


def _said(reached: tuple[int, int]) -> str:
    return f"has {reached[0]:,} policy steps and {reached[1]:,} gradient steps"
