"""Find run folders and read their settings without importing PyTorch."""

from __future__ import annotations

import csv
import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kit.config.renamed import upgraded
from kit.dialects import DIALECTS, dialect
from kit.dialects.carried import use_of
from kit.steps.errors import SettingError, nearest_first
from kit.steps.values import flat

FREE_TO_DIFFER = {
    "recipe", "resume", "logger", "progress", "log_dir", "time_limit", "checkpoint_every",
    "env.step_timeout", "save_policy", "rank_timeout",
}  # fmt: skip
"""Settings for logging and saving, which may change when a run is resumed."""
_IN_CHECKPOINTS = {"log_every", "keep_best", "video_every"}
"""Settings for logging that must not change, because checkpoints contain their state."""
SWEEP_TABLE = "sweep.csv"
"""Name of the table in a sweep folder that lists finished runs and their folders."""


def find_run(name: str, runs: Path, recipe: str | None = None, field: str = "resume") -> Path:
    """Find the folder of a run.

    Args:
        name: run folder, or ``latest``.
        runs: folder that contains all runs.
        recipe: recipe to which ``latest`` refers; ``None``: any recipe.
        field: name of the setting in error messages.

    Raises:
        SettingError: if there is no such run.
    """
    folder = Path(name)
    if name != "latest" and (folder / "config.yaml").is_file():
        return folder
    newest = _newest(runs, recipe)
    if name == "latest" and newest:
        return Path(newest[0])
    reason = "This is not a run folder, because it has no config.yaml"
    if not folder.exists():
        reason = "There is no such folder"
    if name == "latest":
        reason = f"There is no run in {runs / (recipe or '')}"
    raise SettingError(field, name, reason, newest)


def _newest(runs: Path, recipe: str | None) -> list[str]:
    """Return at most three run folders, newest first."""
    # The depth is fixed, because W&B writes config.yaml files in deeper folders.
    configs = runs.glob(f"{glob.escape(recipe) if recipe else '*'}/*/*/config.yaml")
    folders = sorted((path.parent for path in configs), key=_by_time, reverse=True)
    return [str(folder) for folder in folders[:3]]


def _by_time(folder: Path) -> tuple[str, int, list[str | int]]:
    """Return a sort key: time in the name, time of config.yaml, and numbers in the name.

    Renamed folders without a time sort first, so that ``latest`` prefers other folders.
    """
    begun = re.match(r"\d{8}-\d{6}", folder.name)
    written = (folder / "config.yaml").stat().st_mtime_ns if begun else 0
    parts = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", folder.name)]
    return begun[0] if begun else "", written, parts


def read_config(folder: Path, field: str = "resume") -> dict[str, Any]:
    """Read the settings of a run.

    Args:
        folder: run folder.
        field: name of the setting in error messages.

    Raises:
        SettingError: if the folder has no readable settings.
    """
    try:
        config = dict(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
        # Only runs from version 0.1 lack log_dir.
        return config if "log_dir" in config else upgraded(config, ())
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        cause = getattr(error, "problem", None) or getattr(error, "strerror", None) or error
        reason = f"The folder has no readable config.yaml: {cause}"
        raise SettingError(field, str(folder), reason) from None


def runs_of(name: str | Path) -> list[Path]:
    """Return the run folders in a folder, oldest first.

    Args:
        name: run folder, a folder that contains runs, or a sweep folder.

    Raises:
        SettingError: if there are no runs.
    """
    place = Path(name)
    if (place / "config.yaml").is_file():
        return [place]
    found, sweeps = list[Path](), list[Path]()
    for folder, below, files in os.walk(place):
        if "config.yaml" in files and {"plan.txt", "metrics.csv"} & {*files}:
            found.append(Path(folder))
            below.clear()  # W&B writes another config.yaml in a subfolder
        elif SWEEP_TABLE in files:
            sweeps.append(Path(folder))
    if not found:  # sweep folders contain only a table of their runs
        found = [run for sweep in sweeps for run in _of_sweep(sweep)]
    if not found:
        folders = [str(path) for path in place.parent.glob("*") if path.is_dir()]
        near = _newest(Path("runs"), None) if place.exists() else nearest_first(name, folders)[:3]
        raise SettingError("run", str(name), "The folder contains no runs", near)
    return sorted(found, key=_by_time)


def _of_sweep(sweep: Path) -> list[Path]:
    """Return the run folders that a sweep's table lists, even if the folders were moved."""
    with (sweep / SWEEP_TABLE).open(newline="", encoding="utf-8") as file:
        listed = [Path(row["folder"]) for row in csv.DictReader(file) if row.get("folder")]
    runs = sweep.resolve().parents[2]
    moved = [runs.joinpath(*folder.parts[-3:]) for folder in listed]
    return [new if new.is_dir() else old for new, old in zip(moved, listed)]


def training_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's training settings except for the seed, keyed by dotted name."""
    settings = flat(config)
    seeds = {"seed"}
    if (library := settings.get("steps.dialect")) in DIALECTS:
        uses = use_of(dialect(library))
        seeds |= {f"steps.{name}" for name, _, setting in uses if "seed" in setting.split(", ")}
    free = seeds | (FREE_TO_DIFFER - {"recipe"}) | _IN_CHECKPOINTS
    return {name: value for name, value in settings.items() if name not in free}
