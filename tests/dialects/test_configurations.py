"""Real configurations of other libraries are accepted, and runs count as planned."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from kit.config.plan import make_plan
from kit.dialects import DIALECTS, dialect
from kit.dialects.carried import apply_to_config
from kit.dialects.files import make
from kit.runs.recipe import builtin_recipes
from kit.steps import SettingError

FILE = Path(__file__).parents[1] / "data" / "configurations.json"
CASES = json.loads(FILE.read_text(encoding="utf-8"))
DIALECT_OF = {"rl-baselines3-zoo": "sb3", **{f"{n}": n for n in DIALECTS}}
LEAST = {"tianshou": 1.0, "sb3": 0.95, "sheeprl": 0.9, "pyrado": 0.9}
"""Share of the configurations of each library that must be accepted."""


def dialect_of(case: dict[str, Any]) -> str:
    library = case["library"].split()[0]
    return {"rl-baselines3-zoo": "sb3"}.get(library, library)


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration under the names of its library."""
    settings = dict(case["settings"])
    name = dialect_of(case)
    if case["algorithm"] is not None:
        settings["algo"] = case["algorithm"]
    if name == "sb3":
        settings["env_id"] = case["env"]
    if name == "pyrado":  # the environment of the training script
        settings |= {f"critic.{key}": value for key, value in case["critic"].items()}
        settings |= {"env_max_steps": 50, "min_steps": settings.get("min_steps", 100)}
    return settings


def configure(case: dict[str, Any]) -> tuple[Any, Any]:
    """Return the recipe module and its config for a configuration."""
    steps = make(dialect(dialect_of(case)), settings_of(case))
    recipe = steps.recipe()
    if recipe not in builtin_recipes():
        raise SettingError("algo", recipe, "no recipe")
    module = importlib.import_module(f"recipes.{recipe}")
    config = module.Config(steps=steps, log_dir=None, progress=False)
    apply_to_config(steps, config, recipe, config.FAMILY)
    return module, config


if __name__ == "__main__":
    for case in CASES:
        try:
            module, config = configure(case)
            plan = make_plan(config, module.__name__.rpartition(".")[2])
        except SettingError as error:
            print(
                dialect_of(case),
                case["algorithm"],
                case["env"],
                case["settings"].get("exp", ""),
                "|",
                error,
            )
        except Exception as error:
            print(
                "BUG",
                dialect_of(case),
                case["algorithm"],
                case["env"],
                case["settings"].get("exp", ""),
                type(error),
                error,
            )
