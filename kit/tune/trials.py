"""Trials of Ray Tune that are runs of a recipe."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from kit.config.plain import from_plain
from kit.hooks.base import HookedTrainer, KitHook
from kit.runs.lock import forget_holder
from kit.runs.recipe import Recipe
from kit.steps import SettingError

_FILE = "run.txt"
"""File in a Tune checkpoint with the run folder, relative to the folder of all trials."""


def trainable(recipe: str) -> Callable[[dict[str, Any]], None]:
    """Return a function for ``ray.tune.Tuner`` that trains a recipe.

    Keys of ``param_space`` are setting names, nested or dotted. Each row of ``metrics.csv`` is
    reported with the latest value of every column, and the run folder as ``folder``. Returns are
    NaN until the first episode and the first evaluation. The run folder is inside the trial's
    folder. A failed trial that Tune starts again resumes its run from the last checkpoint.

    .. code-block:: python

        from ray import tune
        from kit.tune import trainable

        tuner = tune.Tuner(
            trainable("recipes.ppo"),
            param_space={
                "learning_rate": tune.loguniform(1e-4, 1e-2),
                "steps": {"total_policy_steps": 50_000},
                "env.num_envs": 8,
            },
            tune_config=tune.TuneConfig("evaluation/return", mode="max", num_samples=8),
            run_config=tune.RunConfig(failure_config=tune.FailureConfig(max_failures=2)),
        )
        best = tuner.fit().get_best_result()
        print(best.config, best.metrics["folder"])

    Args:
        recipe: module of the recipe, name of a built-in recipe, or Python file.

    Raises:
        SettingError: if there is no such recipe.
    """
    is_module = "." in recipe and not recipe.endswith(".py")
    source = Recipe(recipe) if is_module else Recipe.named(recipe)
    source.load()

    def train(settings: dict[str, Any]) -> None:
        _train(source, settings)

    train.__name__ = source.name
    return train


def _train(recipe: Recipe, settings: Mapping[str, Any]) -> None:
    """Train or resume the run of the current trial."""
    values = _nested(settings)
    for name in {"log_dir", "resume"} & values.keys():
        reason = "The trial sets it, because its run is written to the trial's folder"
        raise SettingError(name, values[name], reason, "Remove it from param_space")
    trial = _trial_folder()
    own = {"log_dir": str(trial), "resume": _interrupted_run(trial)}
    module = recipe.load()
    trainer = module.build(from_plain(module.Config, {"progress": False, **values, **own}))
    trainer.add(_Report(trial))
    trainer.run()


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with dotted names as nested settings."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        if isinstance(value, Mapping):
            place.setdefault(last, {}).update(_nested(value))
        else:
            place[last] = value
    return nested


def _trial_folder() -> Path:
    """Return the folder of the current trial in Tune's storage."""
    from ray import tune

    storage = tune.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        reason = "Runs cannot be written to remote storage"
        advice = "Use a folder that all machines share"
        raise SettingError("storage_path", storage.storage_fs_path, reason, advice)
    return Path(storage.trial_fs_path)


def _interrupted_run(trial: Path) -> str | None:
    """Return the run folder in the checkpoint that Tune restores; ``None`` for a new trial."""
    from ray import tune

    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as files:
        folder = trial.parent / Path(files, _FILE).read_text()
    if not folder.is_relative_to(trial):
        reason = "Tune passes the checkpoint of one trial to another, but a run keeps its settings"
        raise SettingError("resume", str(folder), reason, "Use another scheduler")
    forget_holder(folder)  # Tune started the trial again, so the earlier process has died
    return str(folder)


class _Report(KitHook):
    """Reports rows to Tune. A row after which a checkpoint is saved is reported with it.

    Args:
        trial: folder of the trial.
    """

    operations: ClassVar = {"log_row": "keep", "post_save": "report", "shutdown": "report"}

    def __init__(self, trial: Path) -> None:
        self.trial = trial
        self._row: dict[str, Any] | None = None

    def register(self, trainer: HookedTrainer, name: str | None = None) -> None:
        """Register the hook. Rows without a checkpoint are reported before the next iteration."""
        super().register(trainer, name)
        offline = trainer.plan.offline
        trainer.register_op("pre_optim_steps" if offline else "pre_collect", self.report)

    def keep(self, _: Mapping[str, Any]) -> None:
        """Store the latest value of every column."""
        returns = dict.fromkeys(("episode/return", "evaluation/return"), math.nan)
        self._row = {**returns, **self.trainer.journal.latest, "folder": str(self.trainer.folder)}

    def report(self, checkpoint: Path | None = None) -> None:
        """Report the stored row, if there is one."""
        from ray import tune

        row, self._row = self._row, None  # Tune may end the process or the thread in report()
        if row is None:
            return
        if checkpoint is None:
            tune.report(row)
            return
        assert self.trainer.folder is not None
        with tempfile.TemporaryDirectory() as files:
            folder = self.trainer.folder.relative_to(self.trial.parent)
            Path(files, _FILE).write_text(str(folder))
            tune.report(row, checkpoint=tune.Checkpoint.from_directory(files))
