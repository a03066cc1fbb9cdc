"""One run of a recipe: its folder, its loggers, its usual hooks, and where it resumes."""

from __future__ import annotations

import random
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torchrl.trainers import TrainerHookBase

from kit.config.settings import RunConfig, check, to_plain
from kit.hooks.console import Console
from kit.hooks.curve import LearningCurve
from kit.hooks.guards import NaNGuard, TimeLimit
from kit.logging.files import make_folder, write_whole
from kit.logging.loggers import RowLogger, make_loggers
from kit.steps import SettingError, StepPlan
from kit.trainer.checkpoint import Checkpoints

# Settings that say how a run is watched, not what it does: free to differ when it is resumed.
_FREE_TO_DIFFER = {"resume", "logger", "progress", "runs", "time_limit", "checkpoint_every"}


class Run:
    """What surrounds a trainer.

    Made first in a recipe's ``build``: it seeds all random numbers and sets PyTorch's threads.

    Args:
        recipe: name of the recipe.
        config: its settings.

    Attributes:
        folder: ``<runs>/<recipe>/<env>/<date>-<time>-s<seed>``, or the one that is resumed.
        checkpoint: where to go on; ``None`` for a new run.
        loggers: for the trainer.
        hooks: for the trainer: console, learning curve, guards.

    Raises:
        SettingError: if the run to resume is not there or was made with other settings.
    """

    def __init__(self, recipe: str, config: RunConfig) -> None:
        check(config)
        _check_device(config.device)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        seed_everything(config.seed)
        self.recipe = recipe
        self.config: dict[str, Any] = {"recipe": recipe, **to_plain(config)}
        self.checkpoint: Path | None = None
        if config.resume is not None:
            self.folder = find_run(config.resume, Path(config.runs), recipe)
            self._go_on()
        else:
            self.folder = new_folder(Path(config.runs), recipe, config.env.id, config.seed)
        self.loggers: list[RowLogger] = make_loggers(
            config.logger, self.folder, run_name=f"{recipe} {config.env.id} s{config.seed}"
        )
        self.hooks: list[TrainerHookBase] = [RunFiles(self), NaNGuard(), LearningCurve(self.folder)]
        if config.time_limit is not None:
            self.hooks.append(TimeLimit(config.time_limit))
        if config.progress:
            self.hooks.append(Console(f"{recipe} on {config.env.id}, seed {config.seed}"))

    def _go_on(self) -> None:
        saved = read_config(self.folder)
        differing = [
            name
            for name in sorted({*_flat(saved), *_flat(self.config)})
            if _flat(saved).get(name) != _flat(self.config).get(name)
            and name.split(".")[0] not in _FREE_TO_DIFFER
        ]
        if differing:
            told = "; ".join(
                f"{n}: {_flat(saved).get(n)} there, {_flat(self.config).get(n)} here"
                for n in differing
            )
            raise SettingError(
                "resume",
                str(self.folder),
                f"was made with other settings ({told})",
                "leave these settings out, or start a new run without resume",
            )
        self.checkpoint = Checkpoints.latest(self.folder / "checkpoints")
        if self.checkpoint is None:
            # Killed before its first checkpoint: it begins anew, in the same folder.
            for name in ("metrics.csv", "times.csv"):
                (self.folder / name).unlink(missing_ok=True)


class RunFiles(TrainerHookBase):
    """Writes the run's settings and plan to its folder when it begins, and its table at the end."""

    name = "run_files"

    def __init__(self, run: Run) -> None:
        self.run = run

    def register(self, trainer: Any, name: str | None = None) -> None:
        """Register at ``setup`` and ``shutdown``."""
        self.trainer = trainer
        trainer.register_module(name or self.name, self)
        trainer.register_op("setup", self.begin)
        trainer.register_op("shutdown", self.end)

    def begin(self) -> None:
        """Make the folder; write ``config.yaml`` and ``plan.txt``."""
        folder = self.run.folder
        make_folder(folder)
        if not (folder / "config.yaml").exists():
            text = yaml.safe_dump(self.run.config, sort_keys=False, allow_unicode=True)
            write_whole(folder / "config.yaml", text)
        plan: StepPlan = self.trainer.plan
        write_whole(folder / "plan.txt", plan.table() + "\n")

    def end(self) -> None:
        """Put what was counted beside the plan."""
        if self.run.folder.is_dir():
            table = self.trainer.plan.table(self.trainer.ledger)
            write_whole(self.run.folder / "plan.txt", table + "\n")

    def state_dict(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is restored."""
        del state_dict


def seed_everything(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and PyTorch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def new_folder(runs: Path, recipe: str, env_id: str, seed: int) -> Path:
    """Return the path of a new run folder, which is made when the run begins."""
    when = datetime.now().strftime("%Y%m%d-%H%M%S")
    base = runs / recipe / env_id.replace("/", "-")
    folder = base / f"{when}-s{seed}"
    number = 2
    while folder.exists():
        folder = base / f"{when}-s{seed}-{number}"
        number += 1
    return folder


def find_run(name: str, runs: Path, recipe: str | None = None, field: str = "resume") -> Path:
    """Return the folder of a run.

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
        raise SettingError(
            field, name, "is not a run folder (it has no config.yaml)", _newest(runs, recipe)
        )
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
    """Return the settings of a run.

    Raises:
        SettingError: if the folder has none, or they cannot be read.
    """
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or error
        raise SettingError(
            "resume", str(folder), f"has no readable config.yaml: {reason}"
        ) from None
    if not isinstance(config, dict):
        raise SettingError("resume", str(folder), "has an empty config.yaml")
    return config


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError("device", device, f"cannot be used: {reason}", ["cpu"]) from None


def _flat(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{path}{name}.")
        else:
            flat[f"{path}{name}"] = value
    return flat
