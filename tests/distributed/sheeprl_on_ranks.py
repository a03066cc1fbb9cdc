"""Run recorded cases of sheeprl on the ranks that torchrun started, and write what was counted.

Usage: torchrun --nproc-per-node N tests/distributed/sheeprl_on_ranks.py CASES COUNTED
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from kit.config.plain import from_plain
from kit.distributed import Ranks
from tests.dialects.recorded.sheeprl import settings_of
from tests.fuzz.random_configs import small_config


def counted(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case and return its figures by the names of the record."""
    name = case["algo"].removesuffix("_decoupled").replace("dreamer_v", "dreamerv")
    recipe = importlib.import_module(f"recipes.{name}")
    small = small_config(recipe.Config)
    del small["env"]["num_envs"]  # the record sets it
    small["env"] |= {"id": "Pendulum-v1", "max_episode_steps": 5}
    config = from_plain(recipe.Config, small)
    config.steps = settings_of(case)
    trainer = recipe.build(config)
    ledger, after, sizes = trainer.ledger, [(0, 0)], list[int]()

    def count() -> None:
        after.append((ledger.policy_steps, ledger.local_gradient_steps))

    trainer.register_op("post_steps", count)
    trainer.register_op("process_optim_batch", lambda batch: sizes.append(batch.numel()))
    trainer.run()
    steps = [now - before for (_, before), (_, now) in itertools.pairwise(after)]
    first = next(number for number, made in enumerate(steps) if made)
    return {
        "iterations": ledger.iterations,
        "policy_steps_per_iteration": after[1][0],
        "policy_steps_total": ledger.policy_steps,
        "random_action_policy_steps": ledger.random_policy_steps,
        "env_steps_total": ledger.env_steps,
        "eval_episodes": ledger.evaluation_episodes,
        "gradient_steps_per_iteration_per_rank": steps,
        "gradient_steps_total_per_rank": ledger.local_gradient_steps,
        "gradient_steps_total_all_ranks": ledger.gradient_steps,
        "first_iteration_with_gradient_step": first + 1,
        "policy_steps_before_first_gradient_step": after[first + 1][0],
        "minibatch_sizes_first_iteration": sizes[: steps[0]],
    }


def main() -> None:
    cases, path = (Path(name) for name in sys.argv[1:])
    found = [counted(case) for case in json.loads(cases.read_text())]
    ranks = Ranks.current or Ranks()
    everyone = ranks.gather_objects(found, "results")
    if ranks.is_first:
        path.write_text(json.dumps(everyone))
    ranks.close()


if __name__ == "__main__":
    main()
