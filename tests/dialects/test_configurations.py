"""Real configurations of other libraries are accepted, and their runs count as planned."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.config.plan import make_plan
from kit.dialects import dialect
from kit.dialects.base import ratio_of
from kit.dialects.carried import apply_to_config
from kit.dialects.files import make
from kit.runs.recipe import builtin_recipes
from kit.steps import SettingError

FILE = Path(__file__).parents[1] / "data" / "configurations.json"
CASES = json.loads(FILE.read_text(encoding="utf-8"))
DIALECTS = {
    "rl-baselines3-zoo": "sb3",
    "sheeprl": "sheeprl",
    "tianshou": "tianshou",
    "pyrado": "pyrado",
}
LEAST = {"sb3": 0.95, "sheeprl": 0.9, "tianshou": 1.0, "pyrado": 0.9}
"""Share of each library's configurations, with an algorithm that has a recipe, that must run."""


def dialect_of(case: dict[str, Any]) -> str:
    return DIALECTS[case["library"].split()[0]]


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration under the names of its library."""
    settings = dict(case["settings"])
    if case["algorithm"] is not None:
        settings["algo"] = case["algorithm"]
    if dialect_of(case) == "sb3":
        settings["env"] = case["env"]
    if dialect_of(case) == "pyrado":
        settings |= {f"critic.{name}": value for name, value in case["critic"].items()}
        settings["env_max_steps"] = 100
        if case["algorithm"] != "SVPG":  # whose particles collect equally many steps
            settings["episode_length"] = "varies"
    return settings


def configure(case: dict[str, Any]) -> tuple[Any, Any]:
    """Return the recipe module and the config for a configuration."""
    steps = make(dialect(dialect_of(case)), settings_of(case))
    recipe = steps.recipe()
    if recipe not in builtin_recipes():
        raise NotImplementedError(recipe)
    module = importlib.import_module(f"recipes.{recipe}")
    config = module.Config(steps=steps, log_dir=None, progress=False)
    apply_to_config(config.steps, config, recipe, config.FAMILY)
    return module, config


def name_of(case: dict[str, Any]) -> str:
    parts = dialect_of(case), case["algorithm"], case["env"], case["settings"].get("exp")
    return "-".join(str(part) for part in parts if part is not None)


def is_readable(case: dict[str, Any]) -> bool:
    return dialect_of(case) != "sheeprl" or importlib.util.find_spec("sheeprl") is not None


READABLE = [case for case in CASES if is_readable(case)]


@pytest.mark.parametrize("library", LEAST)
def test_configurations_of_library_are_accepted(library):
    outcomes: Counter[str] = Counter()
    for case in READABLE:
        if dialect_of(case) != library:
            continue
        try:
            module, config = configure(case)
            make_plan(config, module.__name__.rpartition(".")[2])
        except NotImplementedError:
            outcomes["no recipe"] += 1
        except SettingError as error:
            print(name_of(case), error)
            outcomes["rejected"] += 1
        else:
            outcomes["accepted"] += 1
    print(library, outcomes)
    assert outcomes["accepted"] >= LEAST[library] * (outcomes["accepted"] + outcomes["rejected"])


DISCRETE = ("Acrobot", "CartPole", "LunarLander-v", "MiniGrid", "MountainCar-v", "Pong", "atari")
SAMPLE = random.Random(57).sample(READABLE, 40)


@pytest.mark.nightly
@pytest.mark.parametrize("case", SAMPLE, ids=name_of)
def test_first_two_iterations_count_as_planned(case):
    try:
        module, config = configure(case)
    except (SettingError, NotImplementedError) as error:
        pytest.skip(f"not accepted: {error}")
    recipe = module.__name__.rpartition(".")[2]
    is_discrete = recipe == "dqn" or str(case["env"]).startswith(DISCRETE)
    config.env = replace(
        config.env, id="CartPole-v1" if is_discrete else "Pendulum-v1", wrappers=[]
    )
    plan = make_plan(config, recipe)
    if plan.sequence_length:  # training cannot start before a sequence is stored
        iterations = plan.first_training_iteration + 2 * math.ceil(1 / ratio_of(plan))
        config.steps = plan.replace(iterations=iterations)
    else:
        iterations = 2
        config.steps = plan.replace(iterations=2, learning_starts=0, random_steps=0)
    for name, value in {"size": "nano", "buffer_size": 10_000}.items():  # no effect on counts
        if hasattr(config, name):
            setattr(config, name, value)
    trainer = module.build(config)
    trainer.run()
    assert trainer.ledger.iterations == iterations
    assert trainer.ledger.compare(trainer.plan) == []
    assert trainer.ledger.gradient_steps > 0


if __name__ == "__main__":
    for case in READABLE:
        try:
            module, config = configure(case)
            make_plan(config, module.__name__.rpartition(".")[2])
        except Exception as error:
            print(name_of(case), "|", type(error).__name__, error)
