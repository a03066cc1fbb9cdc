"""Sweeps. All settings are checked before the first run, and a table is printed at the end."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import logging
import re
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kit.cli.overrides import Settings, choices, parsed, reject, split
from kit.cli.signals import Signals, stop_with_parent
from kit.config import RunConfig
from kit.config.plain import from_plain
from kit.config.plan import make_plan
from kit.dialects.base import Dialect
from kit.logging.csv_file import as_csv
from kit.logging.files import WriteError, from_here, write_whole
from kit.runs.lock import forget_holder
from kit.runs.recipe import Recipe
from kit.runs.run_folder import SWEEP_JOB, new_sweep
from kit.runs.saved_runs import SWEEP_TABLE, find_run
from kit.steps import SettingError
from kit.steps.errors import one_of
from kit.steps.table import measured, text_table

_COLUMNS = {"episode/return": "return", "evaluation/return": "evaluation"}
"""Metrics from each run's last row that the table shows, with their column names."""
_STARTED = "started-*.txt"
"""Files that contain the folders of a sweep's runs while the sweep is executed."""
_LAUNCHERS = {
    "joblib": "hydra-joblib-launcher", "ray": "'torchrl-kit[ray]'", "rq": "hydra-rq-launcher",
    "submitit_local": "hydra-submitit-launcher", "submitit_slurm": "hydra-submitit-launcher",
}  # fmt: skip
"""Packages of Hydra's launchers."""


def format_overrides(overrides: Sequence[str]) -> str:
    """Format a run's overrides, except for the seed, as a title."""
    values = map(_unescaped, overrides)
    return ", ".join(f"{name}={value}" for name, value in values if name != "seed")


def _unescaped(override: str) -> tuple[str, str]:
    """Return the name and the value of an override without Hydra's escapes."""
    name, value = split(override)
    return name, re.sub(r"\\(.)", r"\1", value)


class Job:
    """Callable that Hydra calls for each run of a sweep.

    The config class and ``build`` are pickled by name, because ``__main__`` is a different module
    in the processes of a launcher.

    Args:
        recipe: recipe of the runs.
        config_class: dataclass of the recipe's settings.
        build: function that builds a trainer.
        before: settings before overrides are applied.
    """

    def __init__(
        self, recipe: Recipe, config_class: type[RunConfig], build: Callable[..., Any],
        before: Settings,
    ) -> None:  # fmt: skip
        self.recipe, self.config_class, self.build = recipe, config_class, build
        self.before = before
        self.folder = Path()  # folder of the sweep; assigned before the first run
        self.is_elsewhere = False
        self.failed: list[Exception] = []
        self._latest = ""  # if init_from=latest: newest run before the sweep

    def __reduce__(self) -> tuple[Any, ...]:
        names = self.config_class.__name__, self.build.__name__
        state = {name: getattr(self, name) for name in ("folder", "_latest")}
        return _job_elsewhere, (self.recipe, *names, self.before, state)

    def settings(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the settings of a run. ``latest`` refers to the newest run before the sweep."""
        values = self.before.overridden(overrides)
        if values.get("init_from") == "latest":
            if not self._latest:
                runs = Path(values.get("log_dir") or "runs")
                self._latest = str(find_run("latest", runs, self.recipe.name, "init_from"))
            values["init_from"] = self._latest
        return values

    def __call__(self, _: Any) -> None:
        """Run Hydra's current job and save the results."""
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        number, overrides = hydra.job.num, list(hydra.overrides.task)
        token = SWEEP_JOB.set((number, format_overrides(overrides)))
        trainer = failed = None
        try:
            signals = Signals(self.recipe)
            with signals.handled():
                settings = self.settings(overrides) | self._interrupted(number)
                trainer = self.build(from_plain(self.config_class, settings))
                if (folder := getattr(trainer, "folder", None)) is not None:
                    write_whole(self._started(number), str(folder))
                signals.begin(trainer)
                trainer.run()
        except Exception as error:
            failed = error
        finally:
            SWEEP_JOB.reset(token)
        self.record(number, overrides, trainer, failed)
        if failed is not None and self.is_elsewhere:
            raise failed  # Hydra re-raises the error in the main process
        self.failed += [] if failed is None else [failed]  # not raised, because Hydra would wrap it

    def record(
        self, number: int, overrides: Sequence[str], trainer: Any, error: Exception | None
    ) -> None:
        """Save a run's overrides and results for the table, unless the disk is full."""
        with contextlib.suppress(WriteError):
            _save_result(self.folder, number, overrides, trainer, error)

    def _started(self, number: int) -> Path:
        """Return the file that contains the folder of a run that was started."""
        return self.folder / _STARTED.replace("*", str(number))

    def _interrupted(self, number: int) -> dict[str, Any]:
        """Return the setting ``resume`` if the launcher executes a run again."""
        note = self._started(number)
        folder = Path(note.read_text()) if note.exists() else None
        if folder is None or not (folder / "config.yaml").exists():
            return {}
        forget_holder(folder)  # the launcher started the run again, so its process has died
        return {"resume": str(folder)}


def _job_elsewhere(
    recipe: Recipe, config_class: str, build: str, before: Settings, state: dict[str, Any]
) -> Job:
    """Recreate a job in a process that was started by a launcher."""
    module = recipe.load()
    job = Job(recipe, getattr(module, config_class), getattr(module, build), before)
    vars(job).update(state, is_elsewhere=True)
    stop_with_parent()
    return job


def run(job: Job, overrides: Sequence[str]) -> None:
    """Call ``job`` for each run of a sweep, and print a table of the runs.

    Raises:
        SettingError: if the settings of a run are invalid, or Hydra rejects the overrides.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        _check_launcher(overrides)
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
        reject(overrides, error)


def _check_launcher(overrides: Sequence[str]) -> None:
    """Raise SettingError if the launcher of a sweep is not installed."""
    from hydra.core.config_store import ConfigStore

    from kit.cli import ray_launcher

    ray_launcher.register()
    files = ConfigStore.instance().list("hydra/launcher")
    installed = [name.removesuffix(".yaml") for name in files]
    if importlib.util.find_spec("ray") is None:
        installed.remove("ray")
    for name in [value for key, value in map(split, overrides) if key == "hydra/launcher"]:
        if name in _LAUNCHERS and name not in installed:
            advice = f"Install it: pip install {_LAUNCHERS[name]}"
            raise SettingError("hydra/launcher", name, "The launcher is not installed", advice)
        one_of("hydra/launcher", name, sorted(installed))


def _check_points(job: Job, overrides: Sequence[str]) -> None:
    """Check the settings and the plan of every run of a sweep before the first run.

    Settings that a custom sweeper selects cannot be checked, because they depend on the results of
    earlier runs. Neither can step settings of other libraries, because these depend on the
    algorithm, which only ``build`` knows.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    if any(word.startswith(("hydra/sweeper", "hydra.sweeper")) for word in overrides):
        return
    parts = [parsed(word) for word in overrides if not word.startswith("hydra")]
    swept = {part.get_key_element() for part in parts if part.is_sweep_override()}
    for number, point in enumerate(itertools.chain(*BasicSweeper.split_arguments(parts, None))):
        try:
            cfg: Any = from_plain(job.config_class, job.settings(point))
            if hasattr(cfg, "steps") and not isinstance(cfg.steps, Dialect):
                make_plan(cfg, "")
        except SettingError as error:
            values = ", ".join(word for word in point if word.partition("=")[0] in swept)
            hint = f"This is run {number} of the sweep ({values}); no run was started"
            hint = f"{error.hint}. {hint}" if error.hint else hint
            raise SettingError(error.field, error.value, error.why, error.works, hint) from None


def _call_hydra(job: Job, overrides: Sequence[str]) -> None:
    """Run the sweep with Hydra. Overrides need ``++``, because Hydra's config has no settings."""
    from hydra import initialize
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    folder = {"dir": str(job.folder), "subdir": "."}
    hydra = {"run": {"dir": "."}, "output_subdir": None, "sweep": folder, "job": {"chdir": False}}
    logs = [{f"override hydra/{log}": "disabled"} for log in ("job_logging", "hydra_logging")]
    node = {"hydra": hydra, "defaults": ["_self_", *logs]}
    ConfigStore.instance().store(name="sweep", node=node)
    logging.getLogger("hydra").setLevel(logging.ERROR)
    words = [w if w.startswith("hydra") else f"++{w.lstrip('+')}" for w in overrides]
    with initialize(version_base="1.3", config_path=None, job_name=job.recipe.name):
        GlobalHydra.instance().hydra.multirun("sweep", job, words, with_log_configuration=False)


def _save_result(
    sweep: Path, number: int, overrides: Sequence[str], trainer: Any, error: Exception | None
) -> None:
    """Save a run's overrides and results to a file, which is read to create the table."""
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
    """Write ``sweep.csv``, and print the varying settings and the results of finished runs."""
    for path in sweep.glob(_STARTED):
        path.unlink()
    notes = [*sweep.glob("run-*.json")]
    rows = sorted((json.loads(path.read_text()) for path in notes), key=lambda row: row["run"])
    if not rows:
        with contextlib.suppress(OSError):
            sweep.rmdir()  # fails if Hydra has written files there
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
    here = from_here(sweep)
    print(f"\n{text_table(tuple(shown), lines)}\n")
    print(f"table:          {here / SWEEP_TABLE}\ncompare seeds:  kit compare {here}")


def _text(value: Any) -> str:
    return measured(value) if isinstance(value, float) else str(value)
