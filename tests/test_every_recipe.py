"""Every recipe makes two iterations of what its plan says."""

from __future__ import annotations

import importlib

import pytest

from kit.config.plain import from_plain
from tests.fuzz.__main__ import RECIPES
from tests.fuzz.random_configs import small_config
from tests.stored import read_stored


@pytest.mark.guard
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_counts_match_plan(name, monkeypatch):
    monkeypatch.setattr("kit.experiment.read_datasets", read_stored)
    recipe = importlib.import_module(f"recipes.{name}")
    values = small_config(recipe.Config)
    values["compile"] = False  # most of the time of such a run
    steps = values["steps"]
    if "gradient_steps" in steps:
        steps |= {"gradient_steps": 2, "gradient_steps_per_iteration": 1}
    elif "learning_starts" in steps:
        steps |= {"total_policy_steps": 40, "learning_starts": 36}
    else:
        steps |= {"total_policy_steps": 32}
    trainer = recipe.build(from_plain(recipe.Config, values))
    ledger = trainer.run()
    assert ledger.gradient_steps
    assert ledger.compare(trainer.plan) == []
