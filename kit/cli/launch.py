"""Command line of recipes: help, overrides, sweeps and resumed runs."""

from __future__ import annotations

import atexit
import gc
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit import __version__
from kit.cli import sweep
from kit.cli.errors import errors_in_one_line
from kit.cli.help import help_text
from kit.cli.overrides import (
    choices,
    chosen_settings,
    split,
    step_format,
    with_current_name,
    without_commas,
)
from kit.cli.signals import Signals, hold_saving, stop_with_parent
from kit.config import RunConfig
from kit.config.plain import from_plain
from kit.distributed import Ranks
from kit.logging.files import from_here
from kit.runs.recipe import Recipe
from kit.steps.errors import SettingError

Build = Callable[..., Any]


def main(config_class: type[RunConfig], build: Build, argv: Sequence[str] | None = None) -> None:
    """Run a recipe from the command line.

    Args:
        config_class: dataclass of the recipe's settings. Its module determines the recipe's name.
        build: function that builds a trainer from the settings.
        argv: command-line arguments; ``None``: ``sys.argv[1:]``.
    """
    if is_process := _is_process(config_class):
        # Without this, garbage collection at exit would take more than a second.
        gc.freeze()
        atexit.register(gc.freeze)
        hold_saving()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    with errors_in_one_line():
        words = list(sys.argv[1:] if argv is None else argv)
        if "--version" in words:
            print(f"{Recipe.of(config_class).name} (kit {__version__})")
            return
        if not {"-h", "--help", "--help=all"}.isdisjoint(words):
            print(help_text(config_class, step_format(choices(words)), "--help=all" in words))
            return
        if is_process or argv is None:
            _check_launcher(not {"--multirun", "-m"}.isdisjoint(words))
        _run(config_class, build, words)


def _is_process(config_class: type[RunConfig]) -> bool:
    """Return whether this process runs nothing but the command.

    ``kit train`` and ``python -m recipes.ppo`` are detected by SIGUSR1, which they block before
    they import PyTorch.
    """
    is_script = getattr(sys.modules["__main__"], config_class.__name__, None) is config_class
    return is_script or signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _run(config_class: type[RunConfig], build: Build, words: Sequence[str]) -> None:
    """Run a recipe or a sweep with command-line arguments."""
    recipe = Recipe.of(config_class)
    options = {"--multirun", "-m"}
    sweeps = not options.isdisjoint(words)
    words = [word if sweeps else without_commas(word) for word in words if word not in options]
    words = [with_current_name(word, config_class) for word in words]
    before = chosen_settings(config_class, recipe, words)
    overrides = [w for w in words if "=" not in w or split(w)[0] not in before.applied]
    before.check(overrides, sweeps)
    if sweeps:
        sweep.run(sweep.Job(recipe, config_class, build, before), overrides)
        return
    config = from_plain(config_class, before.overridden(overrides))
    signals = Signals(recipe)
    with signals.handled():
        trainer = build(config)
        signals.begin(trainer)
        trainer.run()
    is_first = Ranks.current is None or Ranks.current.is_first
    if is_first and config.progress and (folder := getattr(trainer, "folder", None)) is not None:
        print(next_commands(recipe, folder, is_complete=not trainer.stop_reason))


def next_commands(recipe: Recipe, folder: Path, *, is_complete: bool) -> str:
    """Return text with a run's folder and the commands to resume, evaluate and compare it."""
    here, siblings = (shlex.quote(str(from_here(path))) for path in (folder, folder.parent))
    lines = [f"run folder:     {here}"]
    lines += [] if is_complete else [f"resume it:      {recipe.command} resume={here}"]
    lines += [f"evaluate it:    kit evaluate {here}", f"compare seeds:  kit compare {siblings}"]
    return "\n".join(lines)


_STARTED = {
    "SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec",
}  # fmt: skip
"""Launchers, keyed by the environment variable for the process count (sbatch sets none)."""


def _check_launcher(sweeps: bool) -> None:
    """Raise SettingError if another launcher than torchrun started several processes."""
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        stop_with_parent()  # torchrun may be killed
        if sweeps:
            reason = "Each process of torchrun would make the whole sweep"
            hint = "Start the sweep without torchrun"
            raise SettingError("--multirun", True, reason, hint)
        return
    for name, launcher in {"WORLD_SIZE": "a launcher", **_STARTED}.items():
        if (count := os.environ.get(name, "1")) in ("", "1"):
            continue
        reason = f"Several processes of {launcher} would each make the whole run"
        advice = "Start one run in several processes with torchrun --nproc-per-node, and several "
        advice += f"runs with --multirun seed=0,1. If the command lines differ, unset {name}"
        raise SettingError(name, count, reason, advice)
