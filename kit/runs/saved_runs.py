"""Finding the folders of runs and reading their settings, without PyTorch."""

from __future__ import annotations

import csv
import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kit.dialects import DIALECTS, dialect
from kit.dialects.carried import use_of
from kit.steps.errors import SettingError, nearest_first
from kit.steps.values import flat

FREE_TO_DIFFER = {
    "recipe", "resume", "logger", "progress", "log_dir", "time_limit", "checkpoint_every",
    "env.step_timeout", "save_policy",
}  # fmt: skip
"""Settings of logging and saving, not of the training: they may differ when a run is resumed."""
_IN_CHECKPOINTS = {"log_every", "keep_best", "video_every"}
"""Settings of logging that may not differ: their state is in checkpoints."""
SWEEP_TABLE = "sweep.csv"
"""File in the folder of a sweep that lists the runs that have ended, and their folders."""


def find_run(name: str, runs: Path, recipe: str | None = None, field: str = "resume") -> Path:
    """Find the folder of a run.

    Args:
        name: a run folder, or ``latest``.
        runs: folder of runs.
        recipe: recipe of ``latest``; ``None``: any.
        field: setting to name in the error.

    Raises:
        SettingError: if there is no such run.
    """
    folder = Path(name)
    if name != "latest" and (folder / "config.yaml").is_file():
        return folder
    newest = _newest(runs, recipe)
    if name == "latest" and newest:
        return Path(newest[0])
    why = "is not a run folder (it has no config.yaml)"
    if name == "latest":
        why = f"finds no run in {runs / (recipe or '')}"
    raise SettingError(field, name, why, newest)


def _newest(runs: Path, recipe: str | None) -> list[str]:
    """Run folders, the newest first, at most three; W&B writes a config.yaml further below."""
    configs = runs.glob(f"{glob.escape(recipe) if recipe else '*'}/*/*/config.yaml")
    folders = sorted((path.parent for path in configs), key=_by_time, reverse=True)
    return [str(folder) for folder in folders[:3]]


def _by_time(folder: Path) -> tuple[str, int, list[str | int]]:
    """Return a sort key: time in the name, time of the settings, then numbers in the name.

    Renamed folders, which have no time, come first, so that ``latest`` never means them.
    """
    begun = re.match(r"\d{8}-\d{6}", folder.name)
    written = (folder / "config.yaml").stat().st_mtime_ns if begun else 0
    parts = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", folder.name)]
    return begun[0] if begun else "", written, parts


def read_config(folder: Path, field: str = "resume") -> dict[str, Any]:
    """Read the settings of a run, which the setting ``field`` asks for.

    Raises:
        SettingError: if the folder has none, or they cannot be read.
    """
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        return dict(config)
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or error
        why = f"has no readable config.yaml: {reason}"
        raise SettingError(field, str(folder), why) from None


def runs_of(name: str | Path) -> list[Path]:
    """Return run folders, older ones first.

    Args:
        name: a run folder; a folder above runs; or a folder of sweeps, for the runs that ended.

    Raises:
        SettingError: if there is none.
    """
    place = Path(name)
    if (place / "config.yaml").is_file():
        return [place]
    found, sweeps = [], []
    for folder, below, files in os.walk(place):
        if "config.yaml" in files and {"plan.txt", "metrics.csv"} & {*files}:
            found.append(Path(folder))
            below.clear()  # W&B writes a config.yaml there
        elif SWEEP_TABLE in files:
            sweeps.append(Path(folder))
    if not found:  # beside runs, the tables name what has been found
        found = [run for sweep in sweeps for run in _of_sweep(sweep)]
    if not found:
        beside = [str(path) for path in place.parent.glob("*") if path.is_dir()]
        works = _newest(Path("runs"), None) if place.exists() else nearest_first(name, beside)[:3]
        raise SettingError("run", str(name), "has no run in it, or below it", works)
    return sorted(found, key=_by_time)


def _of_sweep(sweep: Path) -> list[Path]:
    """The run folders in the table of a sweep; they may have been moved with it."""
    with (sweep / SWEEP_TABLE).open(newline="", encoding="utf-8") as file:
        told = [Path(row["folder"]) for row in csv.DictReader(file) if row.get("folder")]
    runs = sweep.resolve().parents[2]
    beside = [runs.joinpath(*folder.parts[-3:]) for folder in told]
    return [near if near.is_dir() else far for near, far in zip(beside, told)]


def training_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that say how it trains, by dotted name, without its seed."""
    settings = flat(config)
    seeds = {"seed"}
    if (words := settings.get("steps.dialect")) in DIALECTS:
        seeds |= {f"steps.{name}" for name, _, sets in use_of(dialect(words)) if sets == "seed"}
    free = seeds | (FREE_TO_DIFFER - {"recipe"}) | _IN_CHECKPOINTS
    return {name: value for name, value in settings.items() if name not in free}
