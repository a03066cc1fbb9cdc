"""The folder of a run: its name, its settings, its plan, and where it resumes."""

from __future__ import annotations

from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import yaml

from kit.cli.recipe import Recipe
from kit.config import RunConfig
from kit.config.plain import flat, to_plain
from kit.hooks import Hook
from kit.logging.files import make_folder, write_whole
from kit.steps import SettingError
from kit.trainer.checkpoint import Checkpoints

# Settings of how a run is watched, not of what it does: they may differ when it is resumed.
_FREE_TO_DIFFER = {
    "recipe", "resume", "logger", "progress", "runs", "time_limit", "checkpoint_every",
}  # fmt: skip

SWEEP_JOB: ContextVar[int | None] = ContextVar("SWEEP_JOB", default=None)
"""Number of the run in a sweep, whose runs may begin at the same time in several processes."""


class RunFolder(Hook):
    """Writes the settings and the plan of a run to its folder, and its table at the end.

    Nothing is written before the run begins.

    Args:
        recipe: that makes the run.
        cfg: its settings; ``cfg.runs`` is not ``None``.

    Attributes:
        folder: ``<runs>/<recipe>/<env>/<date>-<time>-s<seed>``, or the one that is resumed.
        checkpoint: from which the run is resumed; ``None`` for a new run.
        config: settings as plain values.

    Raises:
        SettingError: if the run to resume is not there or was made with other settings.
    """

    operations: ClassVar = {"setup": "begin", "shutdown": "end"}

    def __init__(self, recipe: Recipe, cfg: RunConfig) -> None:
        assert cfg.runs is not None
        self.config: dict[str, Any] = {"recipe": recipe.source, **to_plain(cfg)}
        self.checkpoint: Path | None = None
        if cfg.resume is None:
            self.folder = new_folder(Path(cfg.runs), recipe.name, cfg.env.id, cfg.seed)
            return
        self.folder = find_run(cfg.resume, Path(cfg.runs), recipe.name)
        check_same_recipe(self.folder, recipe)
        self._check_same_settings()
        self.checkpoint = Checkpoints.latest(self.folder / "checkpoints")
        if self.checkpoint is None:
            # Killed before its first checkpoint: it starts again, in the same folder.
            for name in ("metrics.csv", "times.csv"):
                (self.folder / name).unlink(missing_ok=True)

    def _check_same_settings(self) -> None:
        saved, given = flat(read_config(self.folder)), flat(self.config)
        differing = [
            f"{name}: {saved.get(name)} there, {given.get(name)} here"
            for name in sorted({*saved, *given})
            if saved.get(name) != given.get(name) and name.split(".")[0] not in _FREE_TO_DIFFER
        ]
        if differing:
            why = f"was made with other settings ({'; '.join(differing)})"
            works = "leave these settings out, or start a new run without resume"
            raise SettingError("resume", str(self.folder), why, works)

    def begin(self) -> None:
        """Make the folder; write ``config.yaml`` and ``plan.txt``."""
        make_folder(self.folder)
        if not (self.folder / "config.yaml").exists():
            text = yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True)
            write_whole(self.folder / "config.yaml", text)
        write_whole(self.folder / "plan.txt", self.trainer.plan.table() + "\n")

    def end(self) -> None:
        """Write what was counted beside the plan."""
        if self.folder.is_dir():
            table = self.trainer.plan.table(self.trainer.ledger)
            write_whole(self.folder / "plan.txt", table + "\n")


def check_same_recipe(folder: Path, recipe: Recipe) -> None:
    """Refuse to resume a run of another recipe.

    Raises:
        SettingError: if ``folder`` was made by another one.
    """
    other = Recipe(str(read_config(folder).get("recipe", recipe.source)))
    if other.name != recipe.name:
        why = f"is a run of {other.name}, not of {recipe.name}"
        raise SettingError("resume", str(folder), why, f"{other.command} resume={folder}")


def new_folder(runs: Path, recipe: str, env_id: str, seed: int) -> Path:
    """Path of a new run folder, which is made when the run begins."""
    when = datetime.now().strftime("%Y%m%d-%H%M%S")
    job = SWEEP_JOB.get()
    when += "" if job is None else f"-{job}"
    base = runs / recipe / env_id.replace("/", "-")
    folder = base / f"{when}-s{seed}"
    number = 2
    while folder.exists():
        folder = base / f"{when}-s{seed}-{number}"
        number += 1
    return folder


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
    """Run folders, the newest first, at most three."""
    configs = (runs / recipe if recipe else runs).glob("**/config.yaml")
    folders = sorted((path.parent for path in configs), key=lambda f: f.name, reverse=True)
    return [str(folder) for folder in folders[:3]]


def read_config(folder: Path) -> dict[str, Any]:
    """Read the settings of a run.

    Raises:
        SettingError: if the folder has none, or they cannot be read.
    """
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or error
        why = f"has no readable config.yaml: {reason}"
        raise SettingError("resume", str(folder), why) from None
    if not isinstance(config, dict):
        raise SettingError("resume", str(folder), "has an empty config.yaml")
    return config
