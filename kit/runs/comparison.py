"""Comparison of saved runs, grouped by settings. Runs in a group differ only in their seed."""

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
"""Names and name prefixes of the settings that define the task."""
FOR_IQM = 4
"""Minimum number of seeds for the interquartile mean."""


@dataclass(frozen=True)
class SeedCurve:
    """Values of one metric in a run."""

    seed: int
    """Seed of the run."""
    folder: str
    """Folder of the run."""
    steps: list[int]
    """Policy or gradient steps at which the values were logged."""
    values: list[float]
    """Value at each step; the last value if a step has several."""
    policy_steps: int
    """Number of policy steps at the last value."""
    gradient_steps: int
    """Number of gradient steps at the last value."""
    seconds: float | None
    """Seconds until the last value; ``None`` if not recorded."""


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, and statistics over seeds."""

    name: str
    """Settings that differ from the other groups; empty for a single group."""
    runs: list[SeedCurve]
    """One run per seed, ordered by seed."""
    mean: float
    """Mean over seeds of each run's last value."""
    std: float | None
    """Population standard deviation of the last values; ``None`` for one seed."""
    greatest: float
    """Mean over seeds of each run's maximum value."""
    interquartile_mean: float | None
    """Mean of the last values without the lowest and the highest quarter (each rounded down);
    ``None`` for fewer than :data:`FOR_IQM` seeds."""


@dataclass(frozen=True)
class Comparison:
    """Groups of runs and notes about them."""

    column: str
    """Name of the compared metric, a column of metrics.csv."""
    axis: str
    """``policy_steps``, or ``gradient_steps`` if one of the runs is offline."""
    title: str
    """Recipe and environment, if all runs share them."""
    groups: list[Group]
    """Groups in the order of their first run."""
    remarks: list[str] = field(default_factory=list)
    """Notes on omitted runs, and on runs that differ in length or task."""


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
    """Compare the runs that :func:`~kit.runs.saved_runs.runs_of` finds, grouped by settings.

    Raises:
        SettingError: if there are no runs, or no run has the column.
    """
    folders = {folder.resolve(): folder for name in runs for folder in runs_of(name)}
    found = [_read(folder) for folder in folders.values()]
    _check_column(found, column)
    with_values = [run for run in found if run.values(column)]
    remarks = [
        f"{run.folder} has no {column} and is omitted." for run in found if run not in with_values
    ]
    ends = [run.rows[-1] for run in with_values]
    offline = any(row.get("gradient_steps") and not row.get("policy_steps") for row in ends)
    axis = "gradient_steps" if offline else "policy_steps"
    seeds, duplicates = _by_settings(with_values, column, axis)
    shown = _differing([group[0] for group in seeds])
    groups = [
        _group([_curve(run, column, axis) for run in group], settings)
        for group, settings in zip(seeds, shown)
    ]
    remarks += duplicates + _unequal(groups, axis)
    if len({_task(group[0].settings) for group in seeds}) > 1:
        remarks.append("The groups have different tasks, so their values are not comparable.")
    return Comparison(column, axis, _title(with_values), groups, remarks)


def _read(folder: Path) -> _Run:
    config = read_config(folder, "run")
    try:
        rows = read_rows(folder)
    except SettingError:  # the run has no rows yet
        rows = []
    settings = {**training_settings(config), "ranks": _ranks(rows)}
    return _Run(folder, config.get("seed", 0), settings, rows)


def _ranks(rows: Sequence[Mapping[str, float | int]]) -> int:
    """Return the number of processes that trained together. One process logs no local counts."""
    last = rows[-1] if rows else {}
    for name in ("policy_steps", "gradient_steps"):
        if local := last.get(f"local_{name}"):
            return int(last[name]) // int(local)
    return 1


def _check_column(runs: Sequence[_Run], column: str) -> None:
    """Raise SettingError if no run has the column."""
    known = sorted({name for run in runs for row in run.rows for name in row})
    if column not in known:
        advice = nearest_first(column, known)[:3] or "Continue a run, since there are no rows yet"
        raise SettingError("column", column, "These runs have no such column", advice)


def _by_settings(
    runs: Sequence[_Run], column: str, axis: str
) -> tuple[list[list[_Run]], list[str]]:
    """Group runs by settings, with one run per seed; also return notes on omitted runs."""
    groups: dict[str, dict[int, _Run]] = {}
    notes = []
    for run in runs:
        group = groups.setdefault(json.dumps(run.settings, sort_keys=True, default=str), {})
        before = group.get(run.seed)
        if before is not None:
            # Runs with the same seed are not independent, so keep only the longest (or newest).
            is_shorter = run.values(column)[-1][axis] < before.values(column)[-1][axis]
            run, other = (before, run) if is_shorter else (run, before)
            notes.append(f"{other.folder} is omitted: {run.folder} has the same seed.")
        group[run.seed] = run
    return [[group[seed] for seed in sorted(group)] for group in groups.values()], notes


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


# With infinite or NaN values, statistics.pstdev and max fail or depend on the order.
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
"""Shown for settings that the recipe did not have when the run was created."""


def _differing(runs: Sequence[_Run]) -> list[dict[str, Any]]:
    """Return each run's task settings that differ, and others that differ within its recipe."""
    sources = sorted({run.recipe for run in runs})
    names = {source: Recipe(source).name for source in sources}
    if len(set(names.values())) < len(sources):
        names = {source: source for source in sources}
    task = _names_that_differ(runs, TASK)
    shown = []
    for run in runs:
        same_recipe = [other for other in runs if other.recipe == run.recipe]
        differing = dict.fromkeys([*task, *_names_that_differ(same_recipe)])
        recipe = {"recipe": names[run.recipe]} if len(sources) > 1 else {}
        shown.append(recipe | {name: run.settings.get(name, _NOT_SET) for name in differing})
    return shown


def _names_that_differ(runs: Sequence[_Run], prefixes: tuple[str, ...] = ("",)) -> list[str]:
    names = dict.fromkeys(n for run in runs for n in run.settings if n.startswith(prefixes))
    values = {name: {as_typed(run.settings.get(name, _NOT_SET)) for run in runs} for name in names}
    return [name for name in names if len(values[name]) > 1]


def _task(settings: Mapping[str, Any]) -> str:
    return str({name: value for name, value in settings.items() if name.startswith(TASK)})


def _title(runs: Sequence[_Run]) -> str:
    """Return the recipe and the environment, omitting either if it differs between runs."""
    recipes = {Recipe(run.recipe).name for run in runs}
    envs = {str(run.settings.get("env.id")) for run in runs}
    parts = [*(recipes if len(recipes) == 1 else ()), *(envs if len(envs) == 1 else ())]
    return " on ".join(parts)


def as_typed(value: Any) -> str:
    """Format a value as it would be typed on the command line."""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), default=str)


# ---------------------------------------------------------------------- lengths
def _unequal(groups: Sequence[Group], axis: str) -> list[str]:
    """Return a note for each group whose seeds end after different numbers of steps."""
    lines = []
    for group in groups:
        lengths: dict[int, list[int]] = {}
        for run in group.runs:
            lengths.setdefault(run.steps[-1], []).append(run.seed)
        if len(lengths) > 1:
            text = "; ".join(
                f"{steps:,} (seed{'s' if len(seeds) > 1 else ''} {ranges(seeds)})"
                for steps, seeds in sorted(lengths.items())
            )
            where = f" of {group.name}" if group.name else ""
            lines.append(f"Last values{where} are at different {axis.replace('_', ' ')}: {text}.")
    return lines


def ranges(seeds: Sequence[int]) -> str:
    """Format ascending numbers with ranges, such as ``0-3, 7``."""
    runs = []
    for _, run in groupby(enumerate(seeds), lambda pair: pair[1] - pair[0]):
        found = [seed for _, seed in run]
        runs.append(f"{found[0]}-{found[-1]}" if len(found) > 2 else ", ".join(map(str, found)))
    return ", ".join(runs)
