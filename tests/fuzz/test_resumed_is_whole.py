"""An interrupted run that is resumed is bitwise the whole one: random settings and moments."""

from __future__ import annotations

import copy
import importlib
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from kit.config.plain import from_plain
from kit.envs import EnvError
from kit.steps import SettingError
from kit.trainer import Trainer
from tests.fuzz.__main__ import RECIPES
from tests.fuzz.attempts import is_short
from tests.fuzz.random_configs import leaves_of, sensible, small_config
from tests.stored import read_stored
from tests.tiny import assert_same, weights

RUNS = 8
"""Runs of a recipe, each made whole and interrupted; half as many of a world model."""
WORLD_MODELS = ("dreamerv1", "dreamerv3", "plan2explore")
_AROUND = {
    "collector", "collector_kwargs", "compile", "convolutions", "device", "hidden_sizes",
    "imagination_horizon", "kwargs", "log_dir", "logger", "num_particles", "progress", "resume",
    "size", "init_from", "threads", "time_limit",
}  # fmt: skip
"""Settings of what surrounds a run, and of how long it takes."""


def longer_config(config_class: type, draw: random.Random) -> dict[str, Any]:
    """Plain values of a run long enough that gradient steps are traced, some settings changed.

    A run of a world model is short: its gradient steps are not traced.
    """
    values = small_config(config_class)
    if "exploration_steps" in values["steps"]:
        values["steps"]["exploration_steps"] = 48
    if "learning_starts" in values["steps"] and "imagination_horizon" not in values:
        values["steps"]["total_policy_steps"] = draw.choice([160, 240, 320])
    leaves = [leaf for leaf in leaves_of(config_class) if leaf[0][-1] not in _AROUND]
    for (*groups, name), hint in draw.sample(leaves, draw.choice([0, 1, 2, 3, 4, 6])):
        group = values
        for part in groups:
            group = group[part]
        group[name] = sensible(name, hint, draw)
    return values


class Killed(BaseException):
    """Ends a run where nobody expects it."""


def kill_in(trainer: Trainer, stage: str, number: int) -> None:
    """End the run at a stage, without a checkpoint.

    Args:
        trainer: of the run.
        stage: of its loop; ``post_steps`` where the run does not have it.
        number: how often the stage is reached until then; 0: the run does not end there.
    """
    left = itertools.count(number, -1)

    def kill(*_: Any) -> None:
        if next(left) == 1:
            raise Killed

    try:
        trainer.register_op(stage, kill)
    except SettingError:
        trainer.register_op("post_steps", kill)


def outcome(
    recipe: Any, values: dict[str, Any], runs: Path, kill: tuple[str, int] = ("post_steps", 0)
) -> Any:
    """Weights, rows (as text: there may be NaN) and counts of a run, or its error.

    Args:
        recipe: module.
        values: plain settings.
        runs: folder of run folders.
        kill: stage and number of :func:`kill_in`; the run is resumed afterwards.
    """
    values = {**copy.deepcopy(values), "log_dir": str(runs)}
    trainer = recipe.build(from_plain(recipe.Config, copy.deepcopy(values)))
    if not is_short(trainer.plan, 1):
        trainer.shutdown()
        return None
    kill_in(trainer, *kill)
    try:
        try:
            trainer.run()
        except Killed:
            trainer.shutdown()
            values["resume"] = str(trainer.folder)
            trainer = recipe.build(from_plain(recipe.Config, copy.deepcopy(values)))
            kill_in(trainer, kill[0], 0)
            trainer.run()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}".replace(str(trainer.folder), "")
    rows = (Path(trainer.folder) / "metrics.csv").read_text()
    return weights(trainer), rows, trainer.ledger.state_dict()


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_resumed_run_is_bitwise_equal_to_uninterrupted_run(name, monkeypatch, tmp_path):
    monkeypatch.setattr("kit.experiment.read_datasets", read_stored)
    recipe = importlib.import_module(f"recipes.{name}")
    made, wanted = 0, RUNS // 2 if name in WORLD_MODELS else RUNS
    for number in range(20 * RUNS):
        draw = random.Random(f"{name} {number}")
        values = longer_config(recipe.Config, draw)
        values |= {
            "checkpoint_every": draw.choice([1, 8, 32]),
            "log_every": draw.choice([None, 16]),
        }
        try:
            whole = outcome(recipe, values, tmp_path / f"{number} whole")
        except (SettingError, EnvError, OSError):  # rejected by build
            continue
        if whole is None:
            continue
        kill = draw.choice(["pre_steps_log", "post_optim", "post_steps"]), draw.randrange(2, 16)
        resumed = outcome(recipe, values, tmp_path / f"{number}", kill)
        assert_same(whole, resumed, f"{name} {number}")
        made += 1
        if made == wanted:
            return
    pytest.fail(f"{made} runs of {wanted}")
