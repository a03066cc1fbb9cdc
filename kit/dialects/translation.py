"""Equivalent settings of another library, and the differences between two runs."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kit.dialects import as_plan
from kit.dialects.base import ON_POLICY, Dialect, Difference
from kit.dialects.carried import changed, differing_meanings, flat, uncounted
from kit.dialects.explain import explain, plain, plan_text, shown, totals
from kit.dialects.files import make
from kit.steps.counts import FOLLOWED
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan
from kit.steps.same_run import differing_settings
from kit.steps.table import text_table


@dataclass
class Translation:
    """Settings of one library for the run that settings of another make."""

    source: Dialect | StepPlan
    """settings that were given."""
    target: Dialect
    """the nearest settings of the other library."""
    differences: list[Difference]
    """settings of the plan that the target cannot express: name, wanted value, nearest value."""
    typed: dict[str, Any] = field(default_factory=dict)
    """settings of the source as typed, defaults included."""
    left_out: dict[str, Any] = field(default_factory=dict)
    """changed settings of the source that do not count, which are not translated."""

    def text(self) -> str:
        """The translation as text."""
        source, plan = explain(self.source), as_plan(self.source)
        target = self.target.resolved()
        parts = [source.title]
        parts += [f"  {name}={shown(v)}" for name, v in (self.typed or source.settings).items()]
        parts += ["", f"{target.LIBRARY} {target.version} ({target.algo})"]
        parts += [f"  {name}={shown(value)}" for name, value in self.settings().items()]
        if self.left_out:
            parts += ["", "Does not count, and is not translated"]
            parts += [f"- {name}={shown(value)}" for name, value in self.left_out.items()]
        if other := self.other_settings():
            parts += ["", f"Does not count, and is otherwise in {target.LIBRARY}"]
            parts += [f"- {name}: {shown(a)}, there {shown(b)}" for name, (a, b) in other.items()]
        if not self.differences:
            return "\n".join([*parts, "", "The same plan", plan_text(plan)])
        parts += ["", f"Not expressible in {target.LIBRARY}"]
        parts += [
            f"- {name.replace('_', ' ')}: {_text(wanted)} wanted, {_text(nearest)} is nearest"
            for name, wanted, nearest in relevant(self.differences)
        ]
        names = getattr(self.source, "NAME", "kit"), self.target.NAME
        return "\n".join([*parts, "", "Totals", _side_by_side(plan, self.target.to_plan(), names)])

    def other_settings(self) -> dict[str, tuple[Any, Any]]:
        """Settings that do not count and differ, at their defaults in most cases, by name."""
        if not isinstance(self.source, Dialect):
            return {}
        return differing_meanings(self.source, self.target)

    def settings(self) -> dict[str, Any]:
        """The settings to type: those that count and are not trivial, and changed ones."""
        made, given = self.target.resolved(), changed(self.target)
        if not self.is_as_given:
            counting = made.counting_fields(str(made.algo))
            names = given.keys() | {
                name for name in counting if getattr(made, name) not in (None, False, 0, 1)
            }
            given = {name: value for name, value in flat(made).items() if name in names}
        values = {name: value for name, value in given.items() if name != "algo"}
        if made.version != next(iter(made.VERSIONS)):
            values["version"] = made.version
        implied = make(type(made), values).implied_algorithm()
        return values if implied == made.algo else {"algo": made.algo} | values

    @property
    def is_as_given(self) -> bool:
        """Whether the target has all settings of the source as they are, in the same library."""
        same = isinstance(self.source, type(self.target))
        return same and vars(self.source) == vars(self.target)

    def to_dict(self) -> dict[str, Any]:
        """The translation as plain values (JSON)."""
        return {
            "from": explain(self.source).to_dict(0),
            "to": {
                "dialect": self.target.NAME,
                "algo": self.target.resolved().algo,
                "settings": plain(self.settings()),
                "plan": self.target.to_plan().to_dict(),
            },
            "same_run": not self.differences,
            "not_translated": plain(self.left_out),
            "otherwise": plain({n: list(pair) for n, pair in self.other_settings().items()}),
            "not_expressible": [
                {"setting": name, "wanted": _text(wanted), "nearest": _text(nearest)}
                for name, wanted, nearest in self.differences
            ],
        }


def translate(
    source: Dialect | StepPlan, target: type[Dialect], settings: dict[str, Any] | None = None
) -> Translation:
    """Find the settings of another library with the nearest run.

    Args:
        source: settings of a library, or a plan.
        target: dialect to translate into.
        settings: settings of the target to fix, such as the version.

    Raises:
        SettingError: if no settings of the target come near, or a setting to fix is unknown.
    """
    plan = as_plan(source)
    fixed = target.named(settings or {})
    given = {name: getattr(target(**fixed), name) for name in fixed}
    if isinstance(source, target):
        same = copy.copy(source)
        vars(same).update(given)
        with suppress(SettingError):
            if not differing_settings(plan, same.to_plan()):
                return Translation(source, same, [])
    if isinstance(source, Dialect) and "algo" not in given:
        given |= _algorithm(source, target)
    left_out = uncounted(source) if isinstance(source, Dialect) else {}
    if isinstance(source, target):
        names = {name.partition(".")[0] for name in left_out}
        given = {name: getattr(source, name) for name in names} | given
        left_out = {}
    made, differences = target.nearest(plan, **given)
    return Translation(source, made, differences, left_out=left_out)


def _algorithm(source: Dialect, target: type[Dialect]) -> dict[str, str]:
    """The algorithm of the same name, if the other library has it."""
    algo = str(source.resolved().algo)
    for name in (algo, algo.split("_")[0]):
        if name in target.ALGORITHMS and name != ON_POLICY:
            return {"algo": name}
    return {}


def relevant(differences: list[Difference]) -> list[Difference]:
    """The differences without details of evaluations that only one of two runs makes."""
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
    """Compare two runs: settings, totals, and the first iteration in which they differ."""
    differences = differing_settings(one, other)
    if not differences:
        return "Identical runs, count by count.\n\n" + plan_text(one)
    rows = [(n.replace("_", " "), _text(a), _text(b)) for n, a, b in relevant(differences)]
    table = text_table(("difference", *names), rows)
    return f"{table}\n\n{_side_by_side(one, other, names)}"


def _side_by_side(one: StepPlan, other: StepPlan, names: tuple[str, str]) -> str:
    """The totals of two runs, and the first iteration in which they differ, if it is known."""
    ours, theirs = totals(one), totals(other)
    table = text_table(("", *names), [(label, ours[label], theirs[label]) for label in ours])
    first = _first_difference(one, other, names)
    return f"{table}\n\n{first}" if first else table


def _first_difference(one: StepPlan, other: StepPlan, names: tuple[str, str]) -> str:
    """A sentence on the first iteration with other counts; empty if there is none."""
    if not (one.is_exact and other.is_exact):
        return ""
    for k in range(1, min(one.iterations, other.iterations, FOLLOWED // 10) + 1):
        ours, theirs = _reached(one, k), _reached(other, k)
        if ours != theirs:
            return f"First difference in iteration {k:,}: {names[0]} {ours}, {names[1]} {theirs}."
    return ""


def _reached(plan: StepPlan, iteration: int) -> str:
    steps = plan.gradient_steps_after(iteration) * plan.world_size
    played = plan.policy_steps_after(iteration)
    return f"has {played:,} policy steps and {steps:,} gradient steps"
