"""From the command line to a run: overrides, sweeps, help, resume."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from kit.cli import sweep
from kit.cli.errors import errors_in_one_line
from kit.cli.overrides import (
    CHOICES,
    choices,
    chosen_settings,
    split,
    vocabulary,
    with_current_name,
    without_commas,
)
from kit.cli.signals import Signals, hold_saving
from kit.config import RunConfig
from kit.config.plain import check, from_plain, settings
from kit.dialects import DIALECTS, dialect
from kit.runs.comparison import as_typed
from kit.runs.recipe import Recipe
from kit.steps.errors import SettingError

Build = Callable[..., Any]


def main(config_class: type[RunConfig], build: Build, argv: Sequence[str] | None = None) -> None:
    """Run a recipe from the command line.

    ``--help`` documents the options and all settings.

    Args:
        config_class: dataclass of the recipe's settings. The recipe is named after its module.
        build: builds a trainer from such a dataclass.
        argv: arguments; ``None``: arguments of the process.
    """
    if getattr(sys.modules["__main__"], config_class.__name__, None) is config_class:
        gc.freeze()  # imports are done; looking through them again takes a second at the end,
        atexit.register(gc.freeze)  # and through what the run has made a seventh of one
        hold_saving()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    with errors_in_one_line():
        words = list(sys.argv[1:] if argv is None else argv)
        if "--help" in words or "-h" in words:
            print(help_text(config_class, vocabulary(choices(words))))
            return
        if argv is None:
            _check_alone()
        _run(config_class, build, words)


def _run(config_class: type[RunConfig], build: Build, words: Sequence[str]) -> None:
    """Run the recipe, or a sweep, with the words of a command line."""
    recipe = Recipe.of(config_class)
    options = {"--multirun", "-m"}
    sweeps = not options.isdisjoint(words)
    words = [word if sweeps else without_commas(word) for word in words if word not in options]
    words = [with_current_name(word, config_class) for word in words]
    before = chosen_settings(config_class, recipe, words)
    overrides = [word for word in words if "=" not in word or split(word)[0] not in CHOICES]
    before.check(overrides, sweeps)
    if sweeps:
        sweep.run(sweep.Job(recipe, config_class, build, before), overrides)
        return
    config = from_plain(config_class, before.overridden(overrides))
    signals = Signals(recipe.command)
    with signals.handled():
        trainer = build(config)
        signals.begin(trainer)
        trainer.run()


_STARTED = {
    "WORLD_SIZE": "torchrun", "SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}  # fmt: skip
"""Variables with the number of processes started by a launcher; ``sbatch`` sets none."""


def _check_alone() -> None:
    """Raise SettingError if a launcher started several processes with this command line."""
    for name, launcher in _STARTED.items():
        if (count := os.environ.get(name, "1")) in ("", "1"):
            continue
        why = "processes were started, and each would make the same run: runs do not train together"
        works = f"start one, without {launcher}; unset {name} where their command lines differ"
        hint = "several runs: --multirun seed=0,1 hydra/launcher=joblib"
        raise SettingError(name, count, why, works, hint)


# ---------------------------------------------------------------------- help
def help_text(config_class: type[RunConfig], steps: str = "kit") -> str:
    """Return all settings of a recipe with defaults and types, and steps in a vocabulary."""
    config: Any = config_class()
    if steps in DIALECTS:
        config.steps = dialect(steps)()
        check(config)
    lines = [
        f"{Recipe.of(config_class).command} [setting=value ...]",
        "",
        "  --multirun setting=1,2,3   sweeps over values",
        "  resume=latest              resumes the newest run (or resume=<run folder>)",
        "  trust=MODULE,...           modules that a resumed run may import, docs/security.md",
        "  preset=NAME                settings from presets/<recipe>/NAME.yaml beside the recipe",
    ]
    if config_class.FAMILY != "offline":
        names = ", ".join(DIALECTS)
        lines.append(f"  steps=NAME                 steps in another vocabulary: {names}")
    lines += ["", "settings:", ""]
    for dotted, default, kind, text in settings(config):
        lines.append(f"  {dotted}={as_typed(default)}  ({kind})")
        wrapped = textwrap.wrap(text.replace("``", ""), 86, break_on_hyphens=False)
        lines += textwrap.indent("\n".join(wrapped), " " * 6).split("\n")
    return "\n".join(lines)
