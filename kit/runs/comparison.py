"""Saved runs in groups: those that differ in their seed alone are one."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from kit.logging.csv_file import read_rows
from kit.runs.recipe import Recipe
from kit.runs.saved_runs import read_config, runs_of, training_settings
from kit.steps.errors import SettingError, nearest_first

COLUMN = "evaluation/return"
TASK = ("env.id", "env.kwargs.", "env.action_repeat", "env.max_episode_steps")
"""Settings that say which task is learnt, or the beginnings of their names."""
FOR_IQM = 4
"""Seeds from which on there is an interquartile mean."""


@dataclass(frozen=True)
class SeedCurve:
    """One run: a column of its rows."""

    seed: int
    """Seed of the run."""
    folder: str
    """Folder of the run."""
    steps: list[int]
    """Steps of the axis at which there is a value."""
    values: list[float]
    """Value at each of these steps; of several at the same step, the last."""
    policy_steps: int
    """Policy steps of the row with the last value."""
    gradient_steps: int
    """Gradient steps of that row."""
    seconds: float | None
    """Seconds until that row, if recorded."""


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone, and statistics over these seeds."""

    name: str
    """Settings in which the group differs from the others; empty if there is no other."""
    runs: list[SeedCurve]
    """One run for each seed, ordered by seed."""
    mean: float
    """Mean over seeds of the last values."""
    std: float | None
    """Population standard deviation of the last values; ``None`` for one seed."""
    greatest: float
    """Mean over seeds of the greatest value of each."""
    interquartile_mean: float | None
    """Mean of the last values without the lowest and highest quarter (number rounded down);
    ``None`` for fewer than four seeds."""


@dataclass(frozen=True)
class Comparison:
    """Groups of runs side by side."""

    column: str
    """Column of the rows that is compared."""
    axis: str
    """``policy_steps``, or ``gradient_steps`` if one of the runs learns from a data set."""
    title: str
    """Recipe and environment, if all runs share them."""
    groups: list[Group]
    """Groups in the order of the runs."""
    remarks: list[str] = field(default_factory=list)
    """Notes on omitted runs, seeds of different lengths and different tasks."""


@dataclass(frozen=True)
class _Run:
    folder: Path
    seed: int
    settings: dict[str, Any]
    rows: list[dict[str, float | int]]

    def values(self, column: str) -> list[dict[str, float | int]]:
        return [row for row in self.rows if column in row]

    @property
    def recipe(self) -> str:
        return str(self.settings.get("recipe", ""))


# ---------------------------------------------------------------------- reading and grouping
def compare(runs: Sequence[Path | str], column: str = COLUMN) -> Comparison:
    """Compare the runs in folders (:func:`~kit.runs.saved_runs.runs_of`), grouped by settings.

    Raises:
        SettingError: if there is no run, or none has the column.
    """
    folders = {folder.resolve(): folder for name in runs for folder in runs_of(name)}
    found = [_read(folder) for folder in folders.values()]
    _check_column(found, column)
    with_values = [run for run in found if run.values(column)]
    remarks = [
        f"{run.folder} has no {column} and is left out." for run in found if run not in with_values
    ]
    ends = [run.rows[-1] for run in with_values]
    offline = any(row.get("gradient_steps") and not row.get("policy_steps") for row in ends)
    axis = "gradient_steps" if offline else "policy_steps"
    seeds, left_out = _by_settings(with_values, column, axis)
    shown = _differing([group[0] for group in seeds])
    groups = [
        _group([_curve(run, column, axis) for run in group], settings)
        for group, settings in zip(seeds, shown)
    ]
    remarks += left_out + _unequal(groups, axis)
    if len({_task(group[0].settings) for group in seeds}) > 1:
        remarks.append("The groups learn different tasks, so their values do not compare.")
    return Comparison(column, axis, _title(with_values), groups, remarks)


def _read(folder: Path) -> _Run:
    config = read_config(folder, "run")
    try:
        rows = read_rows(folder)
    except SettingError:  # it has none yet
        rows = []
    return _Run(folder, config.get("seed", 0), training_settings(config), rows)


def _check_column(runs: Sequence[_Run], column: str) -> None:
    """Refuse a column that no run has."""
    known = sorted({name for run in runs for row in run.rows for name in row})
    if column not in known:
        works = nearest_first(column, known)[:3] or "let a run go on: there are no rows yet"
        raise SettingError("column", column, "is no column of these runs", works)


def _by_settings(
    runs: Sequence[_Run], column: str, axis: str
) -> tuple[list[list[_Run]], list[str]]:
    """Group runs by settings, one per seed; also return remarks on the omitted runs."""
    groups: dict[str, dict[int, _Run]] = {}
    left_out = []
    for run in runs:
        group = groups.setdefault(json.dumps(run.settings, sort_keys=True, default=str), {})
        before = group.get(run.seed)
        if before is not None:
            # A seed twice is one sample: its longest run, the newer one of two as long.
            shorter = run.values(column)[-1][axis] < before.values(column)[-1][axis]
            run, other = (before, run) if shorter else (run, before)
            left_out.append(f"{other.folder} is left out: {run.folder} has the same seed.")
        group[run.seed] = run
    return [[group[seed] for seed in sorted(group)] for group in groups.values()], left_out


def _curve(run: _Run, column: str, axis: str) -> SeedCurve:
    rows = run.values(column)
    last, points = rows[-1], {int(row[axis]): float(row[column]) for row in rows}
    seconds = last.get("time/seconds")
    return SeedCurve(
        seed=run.seed,
        folder=str(run.folder),
        steps=list(points),
        values=list(points.values()),
        policy_steps=int(last.get("policy_steps", 0)),
        gradient_steps=int(last.get("gradient_steps", 0)),
        seconds=None if seconds is None else float(seconds),
    )


def _group(runs: list[SeedCurve], settings: dict[str, Any]) -> Group:
    last = [run.values[-1] for run in runs]
    return Group(
        name=", ".join(f"{name}={as_typed(value)}" for name, value in settings.items()),
        runs=runs,
        mean=statistics.fmean(last),
        std=_deviation(last) if len(last) > 1 else None,
        greatest=statistics.fmean(_greatest(run.values) for run in runs),
        interquartile_mean=_interquartile_mean(last) if len(last) >= FOR_IQM else None,
    )


# Python's own functions fail, or go by the order, where a value is infinite or NaN.
def _deviation(values: Sequence[float]) -> float:
    return statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan


def _greatest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _interquartile_mean(values: Sequence[float]) -> float:
    if any(map(math.isnan, values)):
        return math.nan
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


# ---------------------------------------------------------------------- names
_NOT_SET = "(not set)"
"""In place of a setting that the recipe did not have when the run was made."""


def _differing(runs: Sequence[_Run]) -> list[dict[str, Any]]:
    """Return the settings of each run that differ; between recipes, only names and tasks."""
    sources = sorted({run.recipe for run in runs})
    called = {source: Recipe(source).name for source in sources}
    if len(set(called.values())) < len(sources):
        called = {source: source for source in sources}
    task = _names_that_differ(runs, TASK)
    shown = []
    for run in runs:
        alike = [other for other in runs if other.recipe == run.recipe]
        names = dict.fromkeys([*task, *_names_that_differ(alike)])
        recipe = {"recipe": called[run.recipe]} if len(sources) > 1 else {}
        shown.append(recipe | {name: run.settings.get(name, _NOT_SET) for name in names})
    return shown


def _names_that_differ(runs: Sequence[_Run], begins: tuple[str, ...] = ("",)) -> list[str]:
    names = dict.fromkeys(n for run in runs for n in run.settings if n.startswith(begins))
    values = {name: {as_typed(run.settings.get(name, _NOT_SET)) for run in runs} for name in names}
    return [name for name in names if len(values[name]) > 1]


def _task(settings: Mapping[str, Any]) -> str:
    return str({name: value for name, value in settings.items() if name.startswith(TASK)})


def _title(runs: Sequence[_Run]) -> str:
    """Recipe and environment of the runs, each if it is the same in all."""
    recipes = {Recipe(run.recipe).name for run in runs}
    envs = {str(run.settings.get("env.id")) for run in runs}
    parts = [*(recipes if len(recipes) == 1 else ()), *(envs if len(envs) == 1 else ())]
    return " on ".join(parts)


def as_typed(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), default=str)


# ---------------------------------------------------------------------- lengths
def _unequal(groups: Sequence[Group], axis: str) -> list[str]:
    """Return a line for each group whose seeds have different last steps."""
    lines = []
    for group in groups:
        lengths: dict[int, list[int]] = {}
        for run in group.runs:
            lengths.setdefault(run.steps[-1], []).append(run.seed)
        if len(lengths) > 1:
            told = "; ".join(
                f"{steps:,} (seed{'s' if len(seeds) > 1 else ''} {ranges(seeds)})"
                for steps, seeds in sorted(lengths.items())
            )
            where = f" of {group.name}" if group.name else ""
            lines.append(
                f"Last values{where} come after different {axis.replace('_', ' ')}: {told}."
            )
    return lines


def ranges(seeds: Sequence[int]) -> str:
    """Ascending numbers, those that follow each other as a range: ``0-3, 7``."""
    runs = []
    for _, run in groupby(enumerate(seeds), lambda pair: pair[1] - pair[0]):
        found = [seed for _, seed in run]
        runs.append(f"{found[0]}-{found[-1]}" if len(found) > 2 else ", ".join(map(str, found)))
    return ", ".join(runs)
