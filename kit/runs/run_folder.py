"""Run folder: its name, settings and plan, and the checkpoint to resume from."""

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
from kit.config.renamed import upgraded
from kit.dialects.base import Dialect
from kit.distributed import Ranks
from kit.hooks.base import KitHook
from kit.logging.files import WriteError, half_written, make_folder, not_written, write_whole
from kit.runs.lock import RunLock
from kit.runs.recipe import Recipe
from kit.runs.saved_runs import FREE_TO_DIFFER, find_run, read_config
from kit.steps import SettingError, StepPlan
from kit.steps.values import flat
from kit.trainer.checkpoint import Checkpoints, saved_in

SWEEP_JOB: ContextVar[tuple[int, str] | None] = ContextVar("SWEEP_JOB", default=None)
"""The run's number in its sweep and its swept settings; ``None`` outside a sweep."""
_REPLACED_FILES = ("config.yaml", "lock", "plan.txt", "metrics.csv", "times.csv", "curve.png")
"""Files that are replaced atomically. A killed run may leave half-written temporary copies."""


class RunFolder(KitHook):
    """Writes a run's settings and plan to its folder, and the step counts when the run ends.

    A new folder is created and locked when the trainer is built. The folder contains only lock
    files until the run starts, and is removed if the run never starts.

    Args:
        recipe: recipe of the run.
        cfg: settings of the run. ``cfg.log_dir`` must not be ``None``.

    Attributes:
        folder: ``<log_dir>/<recipe>/<env>/<date>-<time>-s<seed>``, or the resumed folder.
        checkpoint: checkpoint to resume from; set by :meth:`locked`. ``None`` for a new run.
        config: settings as plain values.

    Raises:
        SettingError: if the run to resume does not exist or has other settings.
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
            job = SWEEP_JOB.get()
            number = "" if job is None else f"-{job[0]}"
            self.folder = base / f"{_now()}{number}-s{cfg.seed}"  # or the next free name
            self._absent = [path for path in self.folder.parents if not path.exists()]
            return
        self.folder = find_run(cfg.resume, Path(cfg.log_dir), recipe.name).absolute()
        _reject_links(self.folder)
        check_same_recipe(self.folder, recipe)
        if isinstance(cfg, OfflineConfig) and saved_in(self.folder / "checkpoints"):
            self._free = {*FREE_TO_DIFFER, "dataset"}  # checkpoints record which dataset was used
        self._check_same_settings(getattr(cfg, "steps", None))

    @contextlib.contextmanager
    def locked(self) -> Iterator[Path]:
        """Create and lock the folder. The lock is released when the run ends or fails.

        Raises:
            SettingError: if another process uses the run to resume.
            WriteError: if the folder cannot be created.
        """
        created: list[Path] = []
        if self.is_new:
            self.folder = make_new(self.folder)
            created = [self.folder, *self._absent]
        self.lock = RunLock(self.folder)
        self._release = weakref.finalize(self, _release, self.lock, created)
        try:
            if not self.is_new:
                self._find_checkpoint()
            yield self.folder
        except BaseException:
            self._release()
            raise

    @contextlib.contextmanager
    def shared(self, ranks: Ranks) -> Iterator[Path]:
        """Lock the folder on rank 0, and use its folder and checkpoint on all ranks.

        Raises:
            SettingError: if another process uses the run, or a rank cannot see the folder.
            WriteError: if the folder cannot be created.
        """
        with self.locked() if ranks.is_first else contextlib.nullcontext():
            mine = self.folder, self.checkpoint
            self.folder, self.checkpoint = ranks.gather_objects(mine, "run folder")[0]
            sees = ranks.gather_objects(self.folder.is_dir(), "run folder")
            if not all(sees):
                reason = f"Rank {sees.index(False)} cannot see the folder that rank 0 created"
                hint = "Use a folder that all machines share"
                raise SettingError("log_dir", str(self.folder), reason, hint)
            ranks.remember("folder", str(self.folder))
            yield self.folder

    def _find_checkpoint(self) -> None:
        """Remove half-written files of a killed run, and find the checkpoint to resume from."""
        for name in _REPLACED_FILES:
            half_written(self.folder / name).unlink(missing_ok=True)
        self.checkpoint = Checkpoints.latest(self.folder / "checkpoints")
        Checkpoints.tidy(self.folder / "checkpoints", self.checkpoint)
        if self.checkpoint is None:
            # The run was killed before its first checkpoint, so it starts again.
            for name in ("metrics.csv", "times.csv"):
                (self.folder / name).unlink(missing_ok=True)

    def _check_same_settings(self, steps: Any) -> None:
        saved = read_config(self.folder)
        requested, start = self.config["init_from"], saved.get("init_from")
        if requested is None or (start and _is_same_run(requested, start)):
            self.config["init_from"] = start
        if isinstance(steps, (Dialect, StepPlan)):  # the plan sets num_envs
            self.config["env"]["num_envs"] = flat(saved).get("env.num_envs")
        if differing := self._differing(saved):
            reason = f"The run has other settings ({differing})"
            advice = "Remove these settings, or start a new run without resume"
            raise SettingError("resume", str(self.folder), reason, advice)

    def state_dict(self) -> dict[str, Any]:
        """Return the training settings, keyed by dotted name."""
        return _of_training(self.config, FREE_TO_DIFFER)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise SettingError if ``config.yaml`` was changed since the checkpoint was written."""
        if differing := self._differing(upgraded(state_dict, self.config)):
            reason = (
                f"The file config.yaml differs from the settings in the checkpoint ({differing})"
            )
            advice = "Restore the file, or start a new run with init_from"
            raise SettingError("resume", str(self.folder), reason, advice)

    def _differing(self, saved: Mapping[str, Any]) -> str:
        defaults, before, now = (
            _of_training(one, self._free) for one in (self._defaults, saved, self.config)
        )
        # Runs from older versions may lack settings, which then had their default values.
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
        """Check that the folder exists and that this process holds its lock.

        Raises:
            WriteError: if the run has not started, or the folder was removed.
            SettingError: if another process has resumed the run.
        """
        if not (self.folder / "config.yaml").is_file():
            text = "does not exist: it was removed, or the run has not started"
            raise WriteError(f"{self.folder / 'config.yaml'} {text}")
        self.lock.check()

    def end(self) -> None:
        """Write the step counts and unlock the folder. Remove it if the run never started."""
        if not self.lock.begun:
            self._release()
            return
        try:
            self.check()
            table = self.trainer.plan.table(self.trainer.ledger)
            write_whole(self.folder / "plan.txt", table + "\n")
        finally:
            self.lock.release()


def _of_training(config: Mapping[str, Any], free: Collection[str]) -> dict[str, Any]:
    """Return the settings that must not change on resume, keyed by dotted name."""
    settings = flat(config)
    return {k: v for k, v in settings.items() if {k, k.split(".")[0]}.isdisjoint(free)}


def _differing(saved: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the differing settings as text."""
    return "; ".join(
        f"{name}: saved {saved.get(name)}, now {new.get(name)}"
        for name in sorted({*saved, *new})
        if saved.get(name) != new.get(name)
    )


def _is_same_run(name: str, folder: str) -> bool:
    """Return whether ``name`` is the run folder ``folder``, or ``latest``."""
    return name == "latest" or Path(name).resolve() == Path(folder).resolve()


def _reject_links(folder: Path) -> None:
    """Raise SettingError if a run could write outside its folder through symbolic links.

    Links from subfolders into W&B's folder are allowed, as is W&B's link to its service log.
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
            reason = f"The folder has a link to a file elsewhere: {link.relative_to(folder)}"
            advice = "Replace the link with its target, or make log_dir itself a link"
            raise SettingError("resume", str(folder), reason, advice)


def check_same_recipe(folder: Path, recipe: Recipe) -> None:
    """Raise SettingError if a run belongs to another recipe."""
    other = Recipe(str(read_config(folder).get("recipe", recipe.source)))
    if other.name != recipe.name:
        reason = f"This is a run of {other.name}, not of {recipe.name}"
        raise SettingError("resume", str(folder), reason, f"Use: {other.command} resume={folder}")


def _now() -> str:
    return f"{datetime.now():%Y%m%d-%H%M%S}"


def new_sweep(runs: Path, recipe: str) -> Path:
    """Create the folder of a sweep."""
    return make_new(runs / recipe / "sweeps" / _now())


def make_new(first: Path) -> Path:
    """Create a folder with this name, or with this name and the next free number.

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


def _release(lock: RunLock, created: Sequence[Path]) -> None:
    lock.release()
    with contextlib.suppress(OSError):
        if os.listdir(lock.folder) == [lock.FILE]:
            (lock.folder / lock.FILE).unlink()
        for path in created:
            path.rmdir()  # raises OSError if the folder is not empty
