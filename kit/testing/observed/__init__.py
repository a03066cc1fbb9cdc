"""Observed counts of other libraries, compared with their dialects.

A case is one record of a run of a real library: its settings, and the figures that were observed.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kit.steps.errors import SettingError, nearest_first, show, whole_number

_SYSTEMS = {
    "sheeprl": "sheeprl",
    "tianshou": "tianshou",
    "pyrado": "pyrado",
    "nip": "nip",
    "stable-baselines3": "sb3",
    "torchrl": "torchrl",
    "dreamerv3": "dreamer",
}

_CUT = {
    "minibatch_sizes_per_iteration": 4,
    "memory_sample_batch_and_len": 10,
}
"""Entries after which a long list was not recorded; 20 for all others."""


@dataclass
class Expectation:
    """What a dialect says about a case."""

    figures: dict[str, Any] = field(default_factory=dict)
    """figures by the name under which they are observed."""
    refusal: str | None = None
    """why the dialect refuses the settings, if it does."""
    warnings: dict[str, bool] = field(default_factory=dict)
    """beginnings of the warnings that the library has for steps, and whether each is due."""


@dataclass
class Observation:
    """What came of comparing one case."""

    compared: list[str] = field(default_factory=list)
    """names of the observed figures that were compared."""
    differences: list[str] = field(default_factory=list)
    """a sentence for each figure that differs from the dialect's."""
    ignored: list[str] = field(default_factory=list)
    """names of the observed figures that were not understood, or vary from run to run."""

    def __bool__(self) -> bool:
        """Whether all that was compared agrees, and something was."""
        return bool(self.compared) and not self.differences


def check_observed(case: Mapping[str, Any]) -> Observation:
    """Compare the observed figures of a run of a real library with its dialect.

    Args:
        case: one record as it is: ``system``, ``version``, ``algo``, ``params`` (settings by the
            library's names), ``observed`` (figures by name), and optionally ``how`` and
            ``nondeterministic``.

    Raises:
        SettingError: if the case is of no known system, or lacks one of these.

    Examples:
        >>> case = {"system": "stable-baselines3", "version": "2.9.2", "algo": "SAC",
        ...         "params": {"total_timesteps": 60, "num_envs": 4, "learning_starts": 12,
        ...                    "train_freq": 1, "gradient_steps": -1},
        ...         "observed": {"gradient_steps_total": 48}}
        >>> check_observed(case).compared, check_observed(case).differences
        (['gradient_steps_total'], [])
    """
    for name in ("system", "params", "observed"):
        if name not in case:
            raise SettingError("case", show(case)[:60], f"has no {name!r}", "give a whole case")
    for name in ("params", "observed"):
        if not isinstance(case[name], Mapping):
            raise SettingError(name, case[name], "is no mapping of names to values", "give one")
    words = str(case["system"]).lower().split()
    name = words[0] if words else ""
    if name not in _SYSTEMS:
        known = nearest_first(name, [*_SYSTEMS])
        raise SettingError("system", case["system"], "is not known", known)
    return _compare(case, _expectation(_SYSTEMS[name], case))


def _expectation(system: str, case: Mapping[str, Any]) -> Expectation:
    """What the dialect says; settings that say nothing are refused as a dialect refuses its own."""
    module = importlib.import_module(f"kit.testing.observed.{system}")
    params = dict(case["params"])
    try:
        for name in ("episode_length", "terminate_at", "env_max_steps"):
            if params.get(name) is not None:
                params[name] = whole_number(name, params[name], 1)
        made: Expectation = module.expect({**case, "params": params})
    except SettingError as error:
        return Expectation(refusal=str(error))
    return made


def _compare(case: Mapping[str, Any], expected: Expectation) -> Observation:
    made = Observation()
    varying = [str(text) for text in case.get("nondeterministic") or ()]
    observed = dict(case["observed"])
    _compare_errors(observed.pop("error", None), expected.refusal, made)
    for name, value in _flat(observed):
        if name.rpartition(".")[2] == "warnings" and expected.warnings:
            made.compared.append(name)
            made.differences += _missing_warnings(name, expected.warnings, value)
            continue
        if name not in expected.figures or any(text.startswith(name) for text in varying):
            made.ignored.append(name)
            continue
        made.compared.append(name)
        wanted = expected.figures[name]
        if not _agree(wanted, value, _CUT.get(name.rpartition(".")[2], 20)):
            made.differences.append(f"{name}: observed {show(value)}, the dialect {show(wanted)}")
    return made


def _compare_errors(error: str | None, refusal: str | None, made: Observation) -> None:
    """A library that fails must be refused by its dialect, and one that runs must not."""
    if error is not None:
        made.compared.append("error")
        if refusal is None:
            made.differences.append(f"error: the library fails with {error[-120:]!r}")
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
        exact = isinstance(wanted, int) and isinstance(value, int)
        return wanted == value if exact else math.isclose(wanted, value, rel_tol=1e-6, abs_tol=6e-7)
    return bool(wanted == value)
