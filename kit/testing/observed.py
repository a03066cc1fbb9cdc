"""Compare a dialect's step counts with counts observed in runs of the original library."""

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
"""Maximum number of iterations for which step counts are listed per iteration."""
_FOLLOWED = 1_000_000
"""Maximum number of iterations that are simulated for library-specific step counts."""
_CUT = 20
"""Number of entries after which a recorded list may have been cut off."""


@dataclass
class Expectation:
    """Values, errors and warnings that a dialect predicts for a run."""

    figures: dict[str, Any] = field(default_factory=dict)
    """Predicted values, keyed by name."""
    refusal: str | None = None
    """Error message if the dialect rejects the settings."""
    warnings: dict[str, bool] = field(default_factory=dict)
    """Whether a library warning about steps is expected, keyed by the warning's prefix."""


@dataclass
class Observation:
    """Result of comparing a dialect with one observed run."""

    compared: list[str] = field(default_factory=list)
    """Names of the observed values that were compared."""
    differences: list[str] = field(default_factory=list)
    """Description of each observed value that differs from its prediction."""
    ignored: list[str] = field(default_factory=list)
    """Names of the observed values that were not predicted or vary between runs."""

    def __bool__(self) -> bool:
        """Return whether any values were compared and all of them agree."""
        return bool(self.compared) and not self.differences


def check_observed(
    dialect: Dialect | Expectation,
    observed: Mapping[str, Any],
    *,
    varying: Sequence[str] = (),
    cut: Mapping[str, int] | None = None,
) -> Observation:
    """Compare the values observed in a library's run with a dialect's predictions.

    Args:
        dialect: dialect with the run's settings, from whose plan :func:`figures_of` computes the
            expected values; or an :class:`Expectation` with custom values.
        observed: observed values, keyed by name. ``error`` means that the library failed, so the
            dialect must reject the settings. A mapping whose name ends with ``_run`` contains the
            values for one of several runs. Their predictions are keyed by ``NAME.VALUE_NAME``.
        varying: names of values that differ between runs and are not compared.
        cut: number of entries after which a recorded list was cut off, keyed by the list's name;
            20 by default.

    Raises:
        SettingError: if the run is too long to list its gradient steps.

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
    """Return a plan's numbers of iterations, policy steps and gradient steps, keyed by name.

    Raises:
        SettingError: if the run's length is unknown or too long to list its gradient steps.
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
    """Return the number of gradient steps per process in each of the first 1000 iterations.

    Raises:
        SettingError: if the run's length is unknown or too long to list its gradient steps.
    """
    if plan.iterations is None:
        reason, hint = "The number depends on episode lengths", "Pass a custom Expectation"
        raise SettingError("iterations", None, reason, hint)
    if plan.counting != "exact" and plan.iterations > _FOLLOWED:
        reason = "The run is too long to simulate. Check that its length is set"
        raise SettingError("iterations", plan.iterations, reason, [_FOLLOWED])
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
    result = Observation()
    _compare_errors(observed.pop("error", None), expected.refusal, result)
    for name, value in _flat(observed):
        figure = name.rpartition(".")[2]
        if figure == "warnings" and expected.warnings:
            result.compared.append(name)
            result.differences += _missing_warnings(name, expected.warnings, value)
        elif name not in expected.figures or name in varying:
            result.ignored.append(name)
        else:
            result.compared.append(name)
            wanted = expected.figures[name]
            if isinstance(value, list) and expected.figures.get("iterations", 0) > LISTED:
                value = value[:LISTED]  # recordings may list more iterations
            if not _agree(wanted, value, cut.get(figure, _CUT)):
                text = f"observed {show(value)}, but the dialect predicts {show(wanted)}"
                result.differences.append(f"{name}: {text}")
    return result


def _compare_errors(error: Any, refusal: str | None, result: Observation) -> None:
    """Check that the dialect rejects the settings if and only if the library fails."""
    if error is not None:
        result.compared.append("error")
        if refusal is None:
            result.differences.append(f"error: the library fails with {str(error)[-120:]!r}")
    elif refusal is not None:
        result.differences.append(f"error: none was observed, and the dialect says {refusal}")


def _missing_warnings(name: str, due: Mapping[str, bool], given: list[str]) -> list[str]:
    """Compare expected warnings about steps with the library's warnings; ignore all others."""
    found = []
    for start, wanted in due.items():
        run, _, start = start.rpartition("|")
        if run in ("", name.rpartition(".")[0]):
            seen = any(str(warning).startswith(start) for warning in given)
            if seen != wanted:
                found.append(f"{name}: {start!r} was {'' if seen else 'not '}emitted")
    return found


def _flat(observed: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Flatten the values of nested runs, with dotted names."""
    figures: list[tuple[str, Any]] = []
    for name, value in observed.items():
        if isinstance(value, Mapping) and str(name).endswith("_run"):
            figures += [(f"{name}.{inner}", figure) for inner, figure in value.items()]
        else:
            figures.append((name, value))
    return figures


def _agree(wanted: Any, value: Any, cut: int) -> bool:
    if hasattr(value, "tolist"):  # NumPy or PyTorch value
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
