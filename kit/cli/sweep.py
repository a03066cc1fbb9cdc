"""A sweep: settings of all runs checked before the first begins, and a table at its end."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.cli.overrides import Settings, choices, parsed, refuse, split
from kit.cli.signals import Signals, stop_with_parent
from kit.config import RunConfig
from kit.config.plain import from_plain
from kit.config.plan import make_plan
from kit.dialects.base import Dialect
from kit.logging.csv_file import as_csv
from kit.logging.files import WriteError, from_here, write_whole
from kit.runs.recipe import Recipe
from kit.runs.run_folder import SWEEP_JOB, new_sweep
from kit.runs.saved_runs import SWEEP_TABLE, find_run
from kit.steps import SettingError
from kit.steps.table import measured, text_table

_COLUMNS = {"episode/return": "return", "evaluation/return": "evaluation"}
"""Columns of the last row that are shown, and their names here."""


def said(overrides: Sequence[str]) -> str:
    """Return the overrides of a run besides its seed, for its title."""
    values = map(_unescaped, overrides)
    return ", ".join(f"{name}={value}" for name, value in values if name != "seed")


def _unescaped(override: str) -> tuple[str, str]:
    """Return the name and the value of an override without Hydra's escapes."""
    name, value = split(override)
    return name, re.sub(r"\\(.)", r"\1", value)


class Job:
    """A run of a sweep, pickled by name for launchers: ``__main__`` differs in other processes.

    Args:
        recipe: recipe of the runs.
        config_class: class of their settings.
        build: builds their trainers.
        before: their settings without overrides.
    """

    def __init__(
        self, recipe: Recipe, config_class: type[RunConfig], build: Callable[..., Any],
        before: Settings,
    ) -> None:  # fmt: skip
        self.recipe, self.config_class, self.build = recipe, config_class, build
        self.before = before
        self.folder = Path()  # of the sweep
        self.is_elsewhere = False
        self.failed: list[Exception] = []
        self._latest = ""  # run from before the sweep, once a run starts from it

    def __reduce__(self) -> tuple[Any, ...]:
        names = self.config_class.__name__, self.build.__name__
        state = {name: getattr(self, name) for name in ("folder", "_latest")}
        return _job_elsewhere, (self.recipe, *names, self.before, state)

    def settings(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the settings of a run; ``init_from=latest`` is a run from before the sweep."""
        values = self.before.overridden(overrides)
        if values.get("init_from") == "latest":
            if not self._latest:
                runs = Path(values.get("log_dir") or "runs")
                self._latest = str(find_run("latest", runs, self.recipe.name, "init_from"))
            values["init_from"] = self._latest
        return values

    def __call__(self, _: Any) -> None:
        """Run the current job of Hydra and note its results."""
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        number, overrides = hydra.job.num, list(hydra.overrides.task)
        token = SWEEP_JOB.set((number, said(overrides)))
        trainer = failed = None
        try:
            signals = Signals(self.recipe.command)
            with signals.handled():
                trainer = self.build(from_plain(self.config_class, self.settings(overrides)))
                signals.begin(trainer)
                trainer.run()
        except Exception as error:
            failed = error
        finally:
            SWEEP_JOB.reset(token)
        with contextlib.suppress(WriteError):
            _note(self.folder, number, overrides, trainer, failed)
        if failed is not None and self.is_elsewhere:
            raise failed  # Hydra brings it home
        self.failed += [] if failed is None else [failed]  # Hydra would wrap it


def _job_elsewhere(
    recipe: Recipe, config_class: str, build: str, before: Settings, state: dict[str, Any]
) -> Job:
    """Create a job in a process that a launcher started."""
    module = recipe.load()
    job = Job(recipe, getattr(module, config_class), getattr(module, build), before)
    vars(job).update(state, is_elsewhere=True)
    stop_with_parent()
    return job


def run(job: Job, overrides: Sequence[str]) -> None:
    """Let Hydra call ``job`` for each point of a sweep, and print the table of its runs.

    Raises:
        SettingError: if the settings of a run are invalid, or Hydra rejects the overrides.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        _check_points(job, overrides)
        runs = choices(overrides).get("log_dir", job.before.values["log_dir"])
        job.folder = new_sweep(Path(str(runs or tempfile.gettempdir())), job.recipe.name)
        try:
            _call_hydra(job, overrides)
        finally:
            _print_table(job.folder)
        if job.failed:
            raise job.failed[0]
    except (HydraException, OmegaConfBaseException) as error:
        refuse(overrides, error)


def _check_points(job: Job, overrides: Sequence[str]) -> None:
    """Check the settings and the plan of every run of a sweep before the first begins.

    Where another sweeper chooses them, by what earlier runs have reached, they are not known. Plans
    in words of other libraries depend on the algorithm, which ``build`` knows.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    if any(one.startswith(("hydra/sweeper", "hydra.sweeper")) for one in overrides):
        return
    read = [parsed(one) for one in overrides if not one.startswith("hydra")]
    swept = {one.get_key_element() for one in read if one.is_sweep_override()}
    for number, point in enumerate(itertools.chain(*BasicSweeper.split_arguments(read, None))):
        try:
            cfg: Any = from_plain(job.config_class, job.settings(point))
            if hasattr(cfg, "steps") and not isinstance(cfg.steps, Dialect):
                make_plan(cfg, "")
        except SettingError as error:
            told = ", ".join(one for one in point if one.partition("=")[0] in swept)
            run = f"in run {number} of the sweep, {told}; none was begun"
            hint = "; ".join(filter(None, [error.hint, run]))
            raise SettingError(error.field, error.value, error.why, error.works, hint) from None


def _call_hydra(job: Job, overrides: Sequence[str]) -> None:
    """Let Hydra sweep: it knows no settings, so that all overrides are new to it."""
    from hydra import initialize
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    folder = {"dir": str(job.folder), "subdir": "."}
    own = {"run": {"dir": "."}, "output_subdir": None, "sweep": folder, "job": {"chdir": False}}
    logs = [{f"override hydra/{log}": "disabled"} for log in ("job_logging", "hydra_logging")]
    node = {"hydra": own, "defaults": ["_self_", *logs]}
    ConfigStore.instance().store(name="sweep", node=node)
    logging.getLogger("hydra").setLevel(logging.ERROR)
    words = [one if one.startswith("hydra") else f"++{one.lstrip('+')}" for one in overrides]
    with initialize(version_base="1.3", config_path=None, job_name=job.recipe.name):
        GlobalHydra.instance().hydra.multirun("sweep", job, words, with_log_configuration=False)


def _note(
    sweep: Path, number: int, overrides: Sequence[str], trainer: Any, error: Exception | None
) -> None:
    """Write the overrides and the results of a run to a file, until the table is written."""
    latest: Mapping[str, Any] = {} if trainer is None else trainer.journal.latest
    reached = {name: latest[column] for column, name in _COLUMNS.items() if column in latest}
    row = {"run": number, **dict(map(_unescaped, overrides)), **reached}
    if error is not None:
        row["error"] = " ".join(str(error).split())
    folder = getattr(trainer, "folder", None)
    row["folder"] = "" if folder is None else str(from_here(folder))
    sweep.mkdir(parents=True, exist_ok=True)
    write_whole(sweep / f"run-{number}.json", json.dumps(row))


def _print_table(sweep: Path) -> None:
    """Write ``sweep.csv`` and print the differences between the runs that have ended, if any."""
    notes = [*sweep.glob("run-*.json")]
    rows = sorted((json.loads(path.read_text()) for path in notes), key=lambda row: row["run"])
    if not rows:
        with contextlib.suppress(OSError):
            sweep.rmdir()  # unless Hydra has written there
        return
    columns = dict.fromkeys(name for row in rows for name in row if name != "folder")
    names = [*columns, "folder"]
    write_whole(sweep / SWEEP_TABLE, as_csv(names, rows))
    for path in notes:
        path.unlink()
    values = {name: {str(row.get(name, "")) for row in rows} for name in names}
    always = {*_COLUMNS.values(), "error"}
    shown = [name for name in names if len(values[name]) > 1 or name in always]
    for row in rows:
        row["error"] = textwrap.shorten(row.get("error", ""), 60, placeholder=" ...")
    lines = [tuple(_text(row.get(name, "")) for name in shown) for row in rows]
    print(f"\n{text_table(tuple(shown), lines)}\n\nsweep: {sweep / SWEEP_TABLE}")


def _text(value: Any) -> str:
    return measured(value) if isinstance(value, float) else str(value)
