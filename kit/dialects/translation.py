"""Translation of settings between libraries, and comparison of two runs."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kit.dialects import as_plan
from kit.dialects.base import ON_POLICY, Dialect, Difference
from kit.dialects.carried import changed, differing_meanings, uncounted
from kit.dialects.explain import explain, plain, plan_text, shown, totals
from kit.dialects.fields import flat
from kit.dialects.files import make
from kit.steps.counts import FOLLOWED
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan
from kit.steps.same_run import differing_settings
from kit.steps.table import text_table


@dataclass
class Translation:
    """Result of translating settings to another library."""

    source: Dialect | StepPlan
    """Source settings, or a plan."""
    target: Dialect
    """Nearest settings of the target library."""
    differences: list[Difference]
    """Name, source value and nearest value of each plan setting the target cannot express."""
    typed: dict[str, Any] = field(default_factory=dict)
    """Source settings that the user gave, even if they equal their defaults."""
    left_out: dict[str, Any] = field(default_factory=dict)
    """Source settings that differ from their defaults and are not translated."""

    def text(self) -> str:
        """Return the translation as text."""
        source, plan = explain(self.source), as_plan(self.source)
        target = self.target.resolved()
        parts = [source.title]
        parts += [f"  {name}={shown(v)}" for name, v in (self.typed or source.settings).items()]
        parts += ["", f"{target.LIBRARY} {target.version} ({target.algo})"]
        parts += [f"  {name}={shown(value)}" for name, value in self.settings().items()]
        if self.left_out:
            parts += ["", "Not translated, because these settings do not affect step counts"]
            parts += [f"- {name}={shown(value)}" for name, value in self.left_out.items()]
        if other := self.other_settings():
            names = getattr(self.source, "LIBRARY", "kit"), target.LIBRARY
            parts += ["", f"Other settings that differ ({names[0]} / {names[1]})"]
            parts += [f"- {name}: {shown(a)} / {shown(b)}" for name, (a, b) in other.items()]
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
        """Return settings that differ between the libraries but do not affect step counts."""
        if not isinstance(self.source, Dialect):
            return {}
        return differing_meanings(self.source, self.target)

    def settings(self) -> dict[str, Any]:
        """Return the target settings that a user must type to get the nearest plan."""
        resolved, selected = self.target.resolved(), changed(self.target)
        if not self.is_as_given:
            counting = resolved.counting_fields(str(resolved.algo))
            names = selected.keys() | {
                name for name in counting if getattr(resolved, name) not in (None, False, 0, 1)
            }
            selected = {name: value for name, value in flat(resolved).items() if name in names}
        values = {name: value for name, value in selected.items() if name != "algo"}
        if resolved.version != next(iter(resolved.VERSIONS)):
            values["version"] = resolved.version
        implied = make(type(resolved), values).implied_algorithm()
        return values if implied == resolved.algo else {"algo": resolved.algo} | values

    @property
    def is_as_given(self) -> bool:
        """Whether source and target use the same library and have identical settings."""
        same = isinstance(self.source, type(self.target))
        return same and vars(self.source) == vars(self.target)

    def to_dict(self) -> dict[str, Any]:
        """Return the translation as JSON-compatible values."""
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
    """Find the settings of another library whose plan is nearest to the source's plan.

    Args:
        source: settings of a library, or a plan.
        target: target dialect.
        settings: fixed target settings, such as the version.

    Raises:
        SettingError: if the target cannot approximate the plan, or a fixed setting is unknown.
    """
    plan = as_plan(source)
    by_field = target.named(settings or {})
    fixed = {name: getattr(target(**by_field), name) for name in by_field}
    if isinstance(source, target):
        same = copy.copy(source)
        vars(same).update(fixed)
        with suppress(SettingError):
            if not differing_settings(plan, same.to_plan()):
                return Translation(source, same, [])
    if isinstance(source, Dialect) and "algo" not in fixed:
        fixed |= _algorithm(source, target)
    left_out = uncounted(source) if isinstance(source, Dialect) else {}
    if isinstance(source, target):
        names = {name.partition(".")[0] for name in left_out}
        fixed = {name: getattr(source, name) for name in names} | fixed
        left_out = {}
    nearest, differences = target.nearest(plan, **fixed)
    return Translation(source, nearest, differences, left_out=left_out)


def _algorithm(source: Dialect, target: type[Dialect]) -> dict[str, str]:
    """Return the setting ``algo`` if the target library has an algorithm of the same name."""
    algo = str(source.resolved().algo)
    for name in (algo, algo.split("_")[0]):
        if name in target.ALGORITHMS and name != ON_POLICY:
            return {"algo": name}
    return {}


def relevant(differences: list[Difference]) -> list[Difference]:
    """Omit differences in evaluation details if only one of the two runs has evaluations."""
    evaluations = {name: (one, other) for name, one, other in differences}.get("evaluations")
    if evaluations is None or 0 not in evaluations:
        return differences
    return [d for d in differences if d[0] == "evaluations" or "evaluation" not in d[0]]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value)


def compare_text(one: StepPlan, other: StepPlan, names: tuple[str, str]) -> str:
    """Return a comparison of two runs: settings, totals, and the first iteration that differs."""
    differences = differing_settings(one, other)
    if not differences:
        return "Identical runs: all counts agree.\n\n" + plan_text(one)
    rows = [(n.replace("_", " "), _text(a), _text(b)) for n, a, b in relevant(differences)]
    table = text_table(("difference", *names), rows)
    return f"{table}\n\n{_side_by_side(one, other, names)}"


def _side_by_side(one: StepPlan, other: StepPlan, names: tuple[str, str]) -> str:
    """Return a table with two runs' totals, and a sentence about their first difference."""
    ours, theirs = totals(one), totals(other)
    table = text_table(("", *names), [(label, ours[label], theirs[label]) for label in ours])
    first = _first_difference(one, other, names)
    return f"{table}\n\n{first}" if first else table


def _first_difference(one: StepPlan, other: StepPlan, names: tuple[str, str]) -> str:
    """Return a sentence about the first iteration with different counts, or an empty string."""
    if not (one.is_exact and other.is_exact):
        return ""
    for k in range(1, min(one.iterations, other.iterations, FOLLOWED // 10) + 1):
        ours, theirs = _totals_after(one, k), _totals_after(other, k)
        if ours != theirs:
            return f"First difference in iteration {k:,}: {names[0]} {ours}, {names[1]} {theirs}."
    return ""


def _totals_after(plan: StepPlan, iteration: int) -> str:
    steps = plan.gradient_steps_after(iteration) * plan.world_size
    collected = plan.policy_steps_after(iteration)
    return f"has {collected:,} policy steps and {steps:,} gradient steps"
