"""Recording the policy of a saved run to a data set, in Minari's format.

Run it::

    python -m kit record latest --episodes 100 --to datasets/pendulum-expert-v0
    python -m kit record latest --episodes 50 --random 0.3 --to datasets/pendulum-medium-v0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs.utils import ExplorationType

from kit.buffers.datasets import write_dataset
from kit.cli.launch import errors_in_one_line
from kit.collectors import VectorCollector
from kit.evaluate import SavedRun, chosen_run, parser_for
from kit.steps import SettingError


def record(run: SavedRun, folder: Path, *, episodes: int, random: float, seed: int) -> int:
    """Play whole episodes with deterministic actions, and write them; return policy steps.

    Args:
        run: whose policy acts.
        folder: of the data set.
        episodes: to play.
        random: probability of a random action in place of the policy's.
        seed: of the environment and of random actions.

    Raises:
        SettingError: if observations are normalised, or it cannot be written.
    """
    own = run.trainer.evaluate
    if own.env.normalizer is not None:
        why = "is what the policy sees, and a data set holds raw observations"
        raise SettingError("env.normalize_observation", True, why, [False])
    if not 0 <= random <= 1:
        raise SettingError("random", random, "is no probability", [min(max(random, 0.0), 1.0)])
    env = own.env.make_again(num_envs=1, seed=seed)
    collector = VectorCollector(
        env,
        _sometimes_random(own.policy, env.action_spec, random),
        frames_per_batch=1,
        seed=seed,
        device=own.device,
        exploration_type=ExplorationType.DETERMINISTIC,
    )
    batches, ended = [], 0
    while ended < episodes:
        batches.append(collector.collect()[0].exclude("collector"))
        ended += int(batches[-1]["next", "done"].sum())
    collector.shutdown()
    steps = torch.cat(batches).cpu()
    write_dataset(folder, steps, own.env.name, run.name)
    return len(steps)


def _sometimes_random(
    policy: Callable[[TensorDictBase], TensorDictBase], spec: Any, probability: float
) -> Callable[[TensorDictBase], TensorDictBase]:
    def act(rows: TensorDictBase) -> TensorDictBase:
        rows = policy(rows)
        if probability and float(torch.rand(())) < probability:
            rows.set("action", spec.rand().to(rows["action"].device))
        return rows

    return act


def main(words: Sequence[str]) -> int:
    """Run the command ``kit record``.

    Args:
        words: after ``kit record``.

    Returns:
        Exit code: 0.
    """
    parser = parser_for("kit record", __doc__, seed=54321)
    parser.add_argument("--to", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--random", type=float, default=0.0, help="share of random actions")
    given = parser.parse_args(words)
    with errors_in_one_line():
        run = chosen_run(given)
        chosen = {"random": given.random, "seed": given.seed}
        steps = record(run, given.to, episodes=given.episodes, **chosen)
        run.close()
        print(f"{given.to}: {given.episodes} episodes, {steps:,} transitions")
    return 0
