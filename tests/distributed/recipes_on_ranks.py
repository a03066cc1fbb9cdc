"""Run every recipe briefly on the ranks that torchrun started, and write what each rank saw.

Usage: torchrun --nproc-per-node N tests/distributed/recipes_on_ranks.py FILE [RECIPE ...]
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from kit import experiment
from kit.config.plain import from_plain
from kit.distributed import Ranks
from kit.steps import SettingError
from kit.trainer.meeting import _digest, _tensors
from tests.fuzz.__main__ import RECIPES
from tests.fuzz.random_configs import small_config
from tests.stored import read_stored


def short(recipe: Any) -> Any:
    """Two or three iterations of a recipe with small networks."""
    values = small_config(recipe.Config)
    steps = values["steps"]
    if "gradient_steps" in steps:
        steps |= {"gradient_steps": 6, "gradient_steps_per_iteration": 3}
    elif "learning_starts" in steps:
        steps |= {"total_policy_steps": 96, "learning_starts": 48}
    else:
        steps |= {"total_policy_steps": 96}
    return from_plain(recipe.Config, values)


def digests_of(batch: Any) -> str:
    return " ".join(_digest(value) for value in batch.values(True, True))


def seen(name: str) -> dict[str, Any]:
    recipe = importlib.import_module(f"recipes.{name}")
    try:
        trainer = recipe.build(short(recipe))
        trainer.ranks.log = log = []
        batches: list[str] = []
        if not trainer.plan.offline:
            trainer.register_op("pre_steps_log", lambda batch: batches.append(digests_of(batch)))
        ledger = trainer.run()
    except SettingError as error:
        return {"rejected": error.field}
    ledger.verify(trainer.plan)
    digests = {key: _digest(tensor) for key, tensor in _tensors(trainer.meeting._learned())}
    counts = (ledger.local_env_steps, ledger.local_episodes)
    return {
        "digests": digests, "log": log, "plan": [str(one) for one in ledger.compare(trainer.plan)],
        "counts": counts, "totals": (ledger.env_steps, ledger.episodes),
        "gradient_steps": ledger.local_gradient_steps, "batches": batches,
    }  # fmt: skip


def main() -> None:
    experiment.read_datasets = read_stored
    path, *names = sys.argv[1:]
    found = {name: seen(name) for name in names or RECIPES}
    ranks = Ranks.current or Ranks()
    everyone = ranks.gather_objects(found, "results")
    if ranks.is_first:
        Path(path).write_text(json.dumps(everyone))
    ranks.close()


if __name__ == "__main__":
    main()
