"""Recorded gradient steps and shared memory change no run: random settings, fast and plainly."""

from __future__ import annotations

import contextlib
import copy
import importlib
import random
from typing import Any

import pytest
from tensordict import TensorDictBase

from kit.config.plain import from_plain
from kit.steps import SettingError
from kit.trainer import Trainer
from tests.fuzz.__main__ import RECIPES
from tests.fuzz.attempts import is_short
from tests.fuzz.random_configs import leaves_of, sensible, small_config
from tests.stored import read_stored
from tests.tiny import assert_same, weights

WORLD_MODELS = ("dreamerv1", "dreamerv3", "plan2explore")
"""To record their gradient steps takes longer than such runs."""
RUNS = 10
"""Runs of a recipe, each made twice."""
_AROUND = {
    "collector", "collector_kwargs", "compile", "convolutions", "device", "hidden_sizes",
    "imagination_horizon", "kwargs", "logger", "num_particles", "progress", "resume", "runs",
    "size", "start_from", "threads", "time_limit",
}  # fmt: skip
"""Settings of what surrounds a run, and of how long it takes."""


def longer_config(config_class: type, draw: random.Random) -> dict[str, Any]:
    """Plain values of a run long enough that gradient steps are recorded, some settings changed.

    Those of a world model are not recorded, and of a run as short as any.
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


class Watching:
    """Hooks that keep batches, and are given minibatches: nothing may be shared or left out."""

    def __init__(self, trainer: Trainer) -> None:
        self.kept: list[tuple[TensorDictBase, TensorDictBase]] = []
        for stage in ("pre_steps_log", "post_loss", "post_optim"):
            with contextlib.suppress(SettingError):  # there are runs without batches or updates
                trainer.register_op(stage, getattr(self, stage))

    def pre_steps_log(self, batch: TensorDictBase) -> None:
        self.kept.append((batch, batch.clone()))

    def post_loss(self, minibatch: TensorDictBase) -> None:
        """Sees it."""

    def post_optim(self) -> None:
        """May change anything."""

    def check(self) -> None:
        """Batches have what they had."""
        for batch, before in self.kept:
            entries = before.keys(include_nested=True, leaves_only=True)
            assert_same(batch.select(*entries).to_dict(), before.to_dict())


def outcome(recipe: Any, values: dict[str, Any], *, plainly: bool) -> tuple[Any, str] | None:
    """Weights and rows of a run (as text: there may be NaN), or its error; of none that is long."""
    config = from_plain(recipe.Config, copy.deepcopy(values))
    config.compile = False if plainly else "exact"
    trainer = recipe.build(config)
    if not is_short(trainer.plan, 1):
        trainer.shutdown()
        return None
    watching = Watching(trainer) if plainly else None
    rows: list[dict[str, Any]] = []
    trainer.register_op("log_row", lambda row: rows.append(dict(row)))
    try:
        trainer.run()
    except (RuntimeError, ValueError) as error:
        return None, type(error).__name__
    if watching is not None:
        watching.check()
    untimed = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
    return weights(trainer), repr(untimed)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*RECIPES} - {*WORLD_MODELS}))
def test_a_run_is_bitwise_that_of_eager_steps_of_which_hooks_see_everything(name, monkeypatch):
    monkeypatch.setattr("kit.experiment.read_datasets", read_stored)
    recipe = importlib.import_module(f"recipes.{name}")
    made = 0
    for number in range(20 * RUNS):
        values = longer_config(recipe.Config, random.Random(f"{name} {number}"))
        try:
            fast = outcome(recipe, values, plainly=False)
        except SettingError:  # refused when it is built
            continue
        if fast is None:
            continue
        assert_same(fast, outcome(recipe, values, plainly=True), f"{name} {number}")
        made += 1
        if made == RUNS:
            return
    pytest.fail(f"{made} runs of {RUNS}")
