"""Finding the folders of runs and reading their settings, without PyTorch."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import Any

import yaml

from kit.steps import SettingError

FREE_TO_DIFFER = {
    "recipe", "resume", "logger", "progress", "runs", "time_limit", "checkpoint_every",
    "env.step_timeout", "start_from",
}  # fmt: skip
"""Settings of logging and saving, not of the training: they may differ when a run is resumed."""


def find_run(name: str, runs: Path, recipe: str | None = None, field: str = "resume") -> Path:
    """Find the folder of a run.

    Args:
        name: a run folder, or ``latest``: the newest one of the recipe.
        runs: where run folders are.
        recipe: whose runs ``latest`` means; ``None``: of any.
        field: setting that asks for it, for the error.

    Raises:
        SettingError: if there is no such run.
    """
    if name != "latest":
        folder = Path(name)
        if (folder / "config.yaml").is_file():
            return folder
        why = "is not a run folder (it has no config.yaml)"
        raise SettingError(field, name, why, _newest(runs, recipe))
    found = _newest(runs, recipe)
    if not found:
        raise SettingError(field, "latest", f"finds no run in {runs / (recipe or '')}")
    return Path(found[0])


def _newest(runs: Path, recipe: str | None) -> list[str]:
    """Run folders, the newest first, at most three; W&B writes a config.yaml further below."""
    configs = runs.glob(f"{glob.escape(recipe) if recipe else '*'}/*/*/config.yaml")
    folders = sorted((path.parent for path in configs), key=_naturally, reverse=True)
    return [str(folder) for folder in folders[:3]]


def _naturally(folder: Path) -> list[str | int]:
    """The parts of a name, so that ``-s0-2`` comes before ``-s0-10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", folder.name)]


def read_config(folder: Path) -> dict[str, Any]:
    """Read the settings of a run.

    Raises:
        SettingError: if the folder has none, or they cannot be read.
    """
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or error
        why = f"has no readable config.yaml: {reason}"
        raise SettingError("resume", str(folder), why) from None
    if not isinstance(config, dict):
        raise SettingError("resume", str(folder), "has an empty config.yaml")
    return config
