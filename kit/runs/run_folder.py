"""The folder of a run: its name, its settings, its plan, and where it resumes."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import yaml

from kit.config import OfflineConfig, RunConfig
from kit.config.plain import to_plain
from kit.dialects.base import Dialect
from kit.hooks.base import KitHook
from kit.logging.files import WriteError, half_written, make_folder, not_written, write_whole
from kit.runs.lock import RunLock
from kit.runs.recipe import Recipe
from kit.runs.saved_runs import FREE_TO_DIFFER, find_run, read_config
from kit.steps import SettingError, StepPlan
from kit.steps.values import flat
from kit.trainer.checkpoint import Checkpoints, saved_in

SWEEP_JOB: ContextVar[tuple[int, str] | None] = ContextVar("SWEEP_JOB", default=None)
"""Number of the run in its sweep, and its settings there."""
_WRITTEN_WHOLE = ("config.yaml", "lock", "plan.txt", "metrics.csv", "times.csv", "curve.png")
"""Files of a run that are replaced as a whole; a kill may leave one half-written beside it."""


class RunFolder(KitHook):
    """Writes the settings and the plan of a run to its folder, and its table at the end.

    A new folder is created and locked with the trainer. It stays empty until the run begins, and is
    removed if the run never begins.

    Args:
        recipe: recipe of the run.
        cfg: settings of the run; ``cfg.log_dir`` is not ``None``.

    Attributes:
        folder: ``<runs>/<recipe>/<env>/<date>-<time>-s<seed>``, or the resumed folder.
        checkpoint: checkpoint to resume from, set by :meth:`taken`; ``None`` for a new run.
        config: settings as plain values.

    Raises:
        SettingError: if the run to resume does not exist or was made with other settings.
    """

    operations: ClassVar = {"setup": "begin", "save": "check", "shutdown": "end"}

    def __init__(self, recipe: Recipe, cfg: RunConfig) -> None:
        assert cfg.log_dir is not None
        self.config: dict[str, Any] = {"recipe": recipe.source, **to_plain(cfg)}
        self._defaults = to_plain(type(cfg)())
        self._free = FREE_TO_DIFFER
        self.checkpoint: Path | None = None
        self.is_new = cfg.resume is None
        if cfg.resume is None:
            base = Path(cfg.log_dir).absolute() / recipe.name / cfg.env.id.replace("/", "-")
            of_sweep = SWEEP_JOB.get()
            job = "" if of_sweep is None else f"-{of_sweep[0]}"
            self.folder = base / f"{_now()}{job}-s{cfg.seed}"  # or the next free name
            self._absent = [path for path in self.folder.parents if not path.exists()]
            return
        self.folder = find_run(cfg.resume, Path(cfg.log_dir), recipe.name).absolute()
        _refuse_links(self.folder)
        check_same_recipe(self.folder, recipe)
        if isinstance(cfg, OfflineConfig) and saved_in(self.folder / "checkpoints"):
            self._free = {*FREE_TO_DIFFER, "dataset"}  # checkpoints know what is in it
        self._check_same_settings(getattr(cfg, "steps", None))

    @contextlib.contextmanager
    def taken(self) -> Iterator[Path]:
        """Hold the folder until the end of the run or of this object, or an error inside.

        Raises:
            SettingError: if another process runs the run to resume.
            WriteError: if the folder cannot be made.
        """
        made: list[Path] = []
        if self.is_new:
            self.folder = make_new(self.folder)
            made = [self.folder, *self._absent]
        self.lock = RunLock(self.folder)
        self._give_back = weakref.finalize(self, _give_back, self.lock, made)
        try:
            if not self.is_new:
                self._find_checkpoint()
            yield self.folder
        except BaseException:
            self._give_back()
            raise

    def _find_checkpoint(self) -> None:
        """Remove files half-written at a kill, and find the checkpoint to resume from."""
        for name in _WRITTEN_WHOLE:
            half_written(self.folder / name).unlink(missing_ok=True)
        self.checkpoint = Checkpoints.latest(self.folder / "checkpoints")
        Checkpoints.tidy(self.folder / "checkpoints", self.checkpoint)
        if self.checkpoint is None:
            # Killed before its first checkpoint: it starts again, in the same folder.
            for name in ("metrics.csv", "times.csv"):
                (self.folder / name).unlink(missing_ok=True)

    def _check_same_settings(self, steps: Any) -> None:
        saved = read_config(self.folder)
        given, start = self.config["init_from"], saved.get("init_from")
        if given is None or (start and _is_start(given, start)):
            self.config["init_from"] = start
        if isinstance(steps, (Dialect, StepPlan)):  # the plan will say it
            self.config["env"]["num_envs"] = flat(saved).get("env.num_envs")
        if differing := self._differing(saved):
            why = f"was made with other settings ({differing})"
            works = "leave these settings out, or start a new run without resume"
            raise SettingError("resume", str(self.folder), why, works)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the training, by dotted name."""
        return _of_training(self.config, FREE_TO_DIFFER)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise SettingError if ``config.yaml`` was changed since the checkpoint was written."""
        if differing := self._differing(state_dict):
            why = f"has a config.yaml that is not that of its checkpoint ({differing})"
            works = "put it back, or begin a new run with init_from"
            raise SettingError("resume", str(self.folder), why, works)

    def _differing(self, saved: Mapping[str, Any]) -> str:
        defaults, before, now = (
            _of_training(one, self._free) for one in (self._defaults, saved, self.config)
        )
        # Settings that the version of the saved run did not have were at their defaults.
        known = {name: value for name, value in defaults.items() if name in now}
        return _differing({**known, **before}, now)

    def begin(self) -> None:
        """Write ``config.yaml`` and ``plan.txt``."""
        self.lock.begin()
        if not (self.folder / "config.yaml").exists():
            text = yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True)
            write_whole(self.folder / "config.yaml", text)
        write_whole(self.folder / "plan.txt", self.trainer.plan.table() + "\n")

    def check(self) -> None:
        """Check that the folder exists and belongs to this run.

        Raises:
            WriteError: if the run has not begun, or the folder was removed since.
            SettingError: if another process has resumed the run since.
        """
        if not (self.folder / "config.yaml").is_file():
            what = "was removed while the run was running, or the run has not begun"
            raise WriteError(f"the run folder {self.folder}, or its config.yaml, {what}")
        self.lock.check()

    def end(self) -> None:
        """Write the counts into the plan and unlock the folder; remove one without a run."""
        if not self.lock.begun:
            self._give_back()
            return
        try:
            self.check()
            table = self.trainer.plan.table(self.trainer.ledger)
            write_whole(self.folder / "plan.txt", table + "\n")
        finally:
            self.lock.release()


def _of_training(config: Mapping[str, Any], free: Collection[str]) -> dict[str, Any]:
    """The settings that may not differ when a run is resumed, by dotted name."""
    settings = flat(config)
    return {k: v for k, v in settings.items() if {k, k.split(".")[0]}.isdisjoint(free)}


def _differing(saved: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The settings that are not what they were, and what they are."""
    return "; ".join(
        f"{name}: {saved.get(name)} there, {given.get(name)} here"
        for name in sorted({*saved, *given})
        if saved.get(name) != given.get(name)
    )


def _is_start(name: str, folder: str) -> bool:
    """Return whether ``init_from=name`` may refer to a folder, as ``latest`` always may."""
    return name == "latest" or Path(name).resolve() == Path(folder).resolve()


def _refuse_links(folder: Path) -> None:
    """Raise SettingError for links in a run folder, through which the run would write elsewhere.

    W&B's own links are allowed: within its folder, and to the log of its service.
    """
    of_wandb = folder.resolve() / "wandb"
    for place, folders, files in os.walk(folder):
        for link in (Path(place, name) for name in (*folders, *files)):
            if not link.is_symlink():
                continue
            inside = place != str(folder) and link.resolve().is_relative_to(of_wandb)
            log = link.relative_to(folder).match("wandb/*run-*/logs/debug-core.log")
            if inside or (log and not link.is_dir()):
                continue
            why = f"has a link to elsewhere in it: {link.relative_to(folder)}"
            works = "put what it links to in its place, or link the folder of runs as a whole"
            raise SettingError("resume", str(folder), why, works)


def check_same_recipe(folder: Path, recipe: Recipe) -> None:
    """Refuse to resume a run of another recipe."""
    other = Recipe(str(read_config(folder).get("recipe", recipe.source)))
    if other.name != recipe.name:
        why = f"is a run of {other.name}, not of {recipe.name}"
        raise SettingError("resume", str(folder), why, f"{other.command} resume={folder}")


def _now() -> str:
    return f"{datetime.now():%Y%m%d-%H%M%S}"


def new_sweep(runs: Path, recipe: str) -> Path:
    """Make the folder of a sweep."""
    return make_new(runs / recipe / "sweeps" / _now())


def make_new(first: Path) -> Path:
    """Create a folder of this name, or of this name and the next free number.

    Raises:
        WriteError: if it cannot be created.
    """
    make_folder(first.parent)
    for number in itertools.count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        try:
            folder.mkdir()
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise not_written(folder, error) from error
    return folder


def _give_back(lock: RunLock, made: Sequence[Path]) -> None:
    lock.release()
    with contextlib.suppress(OSError):
        if os.listdir(lock.folder) == [lock.FILE]:
            (lock.folder / lock.FILE).unlink()
        for path in made:
            path.rmdir()  # if it is empty
