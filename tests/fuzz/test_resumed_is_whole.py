"""An interrupted run that is resumed is bitwise the whole one: random settings and moments."""

from __future__ import annotations

import copy
import importlib
import random
from pathlib import Path
from typing import Any

import pytest

from kit.config.plain import from_plain
from kit.steps import SettingError
from tests.fuzz.__main__ import RECIPES
from tests.fuzz.attempts import is_short
from tests.fuzz.test_fast_is_plain import longer_config
from tests.stored import read_stored
from tests.tiny import assert_same, weights

RUNS = 8
"""Runs of a recipe, each made whole and interrupted."""


class Killed(BaseException):
    """Ends a run where nobody expects it."""


def outcome(recipe: Any, values: dict[str, Any], runs: Path, stop: int = 0) -> Any:
    """Weights, rows (as text: there may be NaN) and counts of a run, or its error.

    Args:
        recipe: module.
        values: plain settings.
        runs: folder of run folders.
        stop: iteration in which it is killed, to be resumed from the last checkpoint; 0: none.
    """
    values = {**copy.deepcopy(values), "runs": str(runs)}
    trainer = recipe.build(from_plain(recipe.Config, copy.deepcopy(values)))
    if not is_short(trainer.plan, 1):
        trainer.shutdown()
        return None
    for count in (stop, 0) if stop else (0,):

        def kill(*_: Any, left: list[int] = [count]) -> None:  # noqa: B006
            left[0] -= 1
            if left[0] == 0:
                raise Killed

        trainer.register_op("pre_steps_log", kill)
        try:
            trainer.run()
        except Killed:
            trainer.shutdown()
            values["resume"] = str(trainer.folder)
            trainer = recipe.build(from_plain(recipe.Config, copy.deepcopy(values)))
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return (
        weights(trainer),
        (Path(trainer.folder) / "metrics.csv").read_text(),
        trainer.ledger.state_dict(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_resumed_run_is_bitwise_the_whole_one(name, monkeypatch, tmp_path):
    monkeypatch.setattr("kit.experiment.read_datasets", read_stored)
    recipe = importlib.import_module(f"recipes.{name}")
    made = 0
    for number in range(20 * RUNS):
        draw = random.Random(f"{name} {number}")
        values = longer_config(recipe.Config, draw)
        values |= {
            "checkpoint_every": draw.choice([1, 8, 32]),
            "log_every": draw.choice([None, 16]),
        }
        try:
            whole = outcome(recipe, values, tmp_path / f"{number} whole")
        except SettingError:  # refused when it is built
            continue
        if whole is None:
            continue
        resumed = outcome(recipe, values, tmp_path / f"{number}", stop=draw.randrange(2, 9))
        assert_same(whole, resumed, f"{name} {number}")
        made += 1
        if made == RUNS:
            return
    pytest.fail(f"{made} runs of {RUNS}")
