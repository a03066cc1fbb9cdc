"""A dialect against the counts that were observed in runs of the library whose words it takes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kit.dialects.base import Dialect
from kit.steps.errors import SettingError, show
from kit.steps.plan import StepPlan

LISTED = 1_000
"""Iterations of which figures are listed one by one."""
_FOLLOWED = 1_000_000
"""Iterations of a library's own counting that are followed one by one."""
_CUT = 20
"""Entries after which a long list may not have been recorded."""


@dataclass
class Expectation:
    """What a dialect says about a run."""

    figures: dict[str, Any] = field(default_factory=dict)
    """figures by the name under which they are observed."""
    refusal: str | None = None
    """why the dialect refuses the settings, if it does."""
    warnings: dict[str, bool] = field(default_factory=dict)
    """beginnings of the warnings that the library has for steps, and whether each is due."""


@dataclass
class Observation:
    """What came of comparing one run."""

    compared: list[str] = field(default_factory=list)
    """names of the observed figures that were compared."""
    differences: list[str] = field(default_factory=list)
    """a sentence for each figure that differs from the dialect's."""
    ignored: list[str] = field(default_factory=list)
    """names of the observed figures that were not expected, or vary from run to run."""

    def __bool__(self) -> bool:
        """Whether all that was compared agrees, and something was."""
        return bool(self.compared) and not self.differences


def check_observed(
    dialect: Dialect | Expectation,
    observed: Mapping[str, Any],
    *,
    varying: Sequence[str] = (),
    cut: Mapping[str, int] | None = None,
) -> Observation:
    """Compare what was observed in a run of a real library with what a dialect says about it.

    Args:
        dialect: with the settings of the run, which says :func:`figures_of` its plan; or what is
            expected, which may be further figures, by any name.
        observed: figures by name. ``error``, if the library failed: the dialect must refuse these
            settings. A mapping whose name ends with ``_run`` has the figures of one of several
            runs, which are expected as ``NAME.FIGURE``.
        varying: names of figures that differ from run to run, which are not compared.
        cut: entries after which a list was not recorded, by name; 20 for others.

    Raises:
        SettingError: if a run is too long to follow its gradient steps one by one.

    Examples:
        >>> from kit.dialects import SB3
        >>> sac = SB3(algo="sac", total_timesteps=60, n_envs=4, learning_starts=12, train_freq=1,
        ...           gradient_steps=-1)
        >>> seen = check_observed(sac, {"gradient_steps_total": 48})
        >>> seen.compared, seen.differences
        (['gradient_steps_total'], [])
    """
    expected = dialect if isinstance(dialect, Expectation) else _expectation(dialect)
    return _compare(expected, dict(observed), varying, cut or {})


def figures_of(plan: StepPlan) -> dict[str, Any]:
    """Figures of a plan by name: iterations, policy steps and gradient steps.

    Raises:
        SettingError: if the run is too long to follow its gradient steps one by one, or it is not
            known how long it is.
    """
    steps = gradient_steps(plan)
    return {
        "iterations": plan.iterations,
        "policy_steps_total": plan.total_policy_steps,
        "random_action_policy_steps": plan.random_steps_until(plan.total_policy_steps),
        "gradient_steps_per_iteration": steps,
        "gradient_steps_total": plan.gradient_steps_after(plan.iterations),
        "first_iteration_with_gradient_step": next((k for k, n in enumerate(steps, 1) if n), None),
    }


def gradient_steps(plan: StepPlan) -> list[int]:
    """Gradient steps of one process in each of the first thousand iterations.

    Raises:
        SettingError: if the run is too long to follow, or it is not known how long it is.
    """
    if plan.iterations is None:
        why, works = "follows from the length of whole episodes", "give an Expectation of your own"
        raise SettingError("iterations", None, why, works)
    if plan.counting != "exact" and plan.iterations > _FOLLOWED:
        why = "are too many to follow one by one: is the length of the run missing?"
        raise SettingError("iterations", plan.iterations, why, [_FOLLOWED])
    return [plan.gradient_steps(k) for k in range(1, min(plan.iterations, LISTED) + 1)]


def _expectation(dialect: Dialect) -> Expectation:
    try:
        plan = dialect.to_plan()
    except SettingError as error:
        return Expectation(refusal=str(error))
    return Expectation(figures_of(plan))


def _compare(
    expected: Expectation, observed: dict[str, Any], varying: Sequence[str], cut: Mapping[str, int]
) -> Observation:
    made = Observation()
    _compare_errors(observed.pop("error", None), expected.refusal, made)
    for name, value in _flat(observed):
        figure = name.rpartition(".")[2]
        if figure == "warnings" and expected.warnings:
            made.compared.append(name)
            made.differences += _missing_warnings(name, expected.warnings, value)
        elif name not in expected.figures or name in varying:
            made.ignored.append(name)
        else:
            made.compared.append(name)
            wanted = expected.figures[name]
            if isinstance(value, list) and expected.figures.get("iterations", 0) > LISTED:
                value = value[:LISTED]  # of a library that lists more
            if not _agree(wanted, value, cut.get(figure, _CUT)):
                text = f"observed {show(value)}, the dialect {show(wanted)}"
                made.differences.append(f"{name}: {text}")
    return made


def _compare_errors(error: Any, refusal: str | None, made: Observation) -> None:
    """A library that fails must be refused by its dialect, and one that runs must not."""
    if error is not None:
        made.compared.append("error")
        if refusal is None:
            made.differences.append(f"error: the library fails with {str(error)[-120:]!r}")
    elif refusal is not None:
        made.differences.append(f"error: none was observed, and the dialect says {refusal}")


def _missing_warnings(name: str, due: Mapping[str, bool], given: list[str]) -> list[str]:
    """Compare the warnings about steps; a library has others, which mean nothing here."""
    found = []
    for start, wanted in due.items():
        run, _, start = start.rpartition("|")
        if run in ("", name.rpartition(".")[0]):
            seen = any(str(warning).startswith(start) for warning in given)
            if seen != wanted:
                found.append(f"{name}: {start!r} was {'' if seen else 'not '}given")
    return found


def _flat(observed: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Figures of runs within a case (a first run, a resumed one) get dotted names."""
    figures: list[tuple[str, Any]] = []
    for name, value in observed.items():
        if isinstance(value, Mapping) and str(name).endswith("_run"):
            figures += [(f"{name}.{inner}", figure) for inner, figure in value.items()]
        else:
            figures.append((name, value))
    return figures


def _agree(wanted: Any, value: Any, cut: int) -> bool:
    if hasattr(value, "tolist"):  # of NumPy or PyTorch
        value = value.tolist()
    if isinstance(wanted, Mapping) and isinstance(value, Mapping):
        same = {str(name) for name in wanted} == {str(name) for name in value}
        return same and all(_agree(wanted[name], value[str(name)], cut) for name in wanted)
    if isinstance(wanted, (list, tuple)) and isinstance(value, (list, tuple)):
        was_cut = cut <= len(value) < len(wanted)
        entries = wanted[: len(value)] if was_cut else wanted
        return len(entries) == len(value) and all(
            _agree(a, b, cut) for a, b in zip(entries, value, strict=True)
        )
    if isinstance(wanted, bool) or isinstance(value, bool) or wanted is None or value is None:
        return wanted is value
    if isinstance(wanted, (int, float)) and isinstance(value, str):
        return wanted in [float(text) for text in re.findall(r"-?\d+\.?\d*", value)]
    if isinstance(wanted, (int, float)) and isinstance(value, (int, float)):
        # Observed ratios and learning rates are rounded to four to six digits.
        exact = isinstance(wanted, int) and float(value).is_integer()
        return wanted == value if exact else math.isclose(wanted, value, rel_tol=1e-6, abs_tol=6e-7)
    return bool(wanted == value)
