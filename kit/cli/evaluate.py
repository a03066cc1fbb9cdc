"""Evaluate the policy of a saved run, or record a video of it.

Run it::

    kit evaluate runs/ppo/CartPole-v1/20250101-120000-s0
    kit evaluate latest --episodes 100 --seed 7
    kit evaluate latest --best
    kit evaluate latest --video pendulum.mp4
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from torchrl.envs.utils import ExplorationType

from kit.cli.errors import errors_in_one_line
from kit.runs.saved_policy import SavedRun
from kit.runs.saved_runs import find_run
from kit.runs.trust import trusted_names
from kit.steps.errors import whole_number
from kit.steps.table import measured


def parser_for(command: str, text: str, seed: int | None = None) -> argparse.ArgumentParser:
    """Create an argument parser for a command that loads a saved run.

    Args:
        command: name of the command.
        text: module docstring, whose first line describes the command.
        seed: default seed; ``None``: omit the arguments ``--episodes`` and ``--seed``.
    """
    parser = argparse.ArgumentParser(prog=command, description=text.split("\n")[0])
    parser.add_argument("run", help='run folder, or "latest"')
    parser.add_argument(
        "--log-dir",
        "--runs",
        dest="log_dir",
        default="runs",
        help="folder of the run folders (default: runs)",
    )
    if seed is not None:
        parser.add_argument(
            "--episodes", type=int, default=100, help="number of episodes (default: 100)"
        )
        parser.add_argument(
            "--seed", type=int, default=seed, help=f"seed of the environments (default: {seed})"
        )
    parser.add_argument("--best", action="store_true", help="use the policy of the best evaluation")
    parser.add_argument("--trust", help="modules that the run may import, comma-separated")
    return parser


def chosen_run(given: argparse.Namespace, device: str | None = None) -> SavedRun:
    """Check arguments parsed by :func:`parser_for`, and load the run."""
    if "episodes" in given:
        given.episodes = whole_number("episodes", given.episodes, at_least=1)
        given.seed = whole_number("seed", given.seed)
    folder = find_run(given.run, Path(given.log_dir), field="run")
    trust = trusted_names(given.trust)
    return SavedRun(folder, trust, how="--trust ", best=given.best, device=device)


_RETURN_METRICS = ("return", "return_std", "return_min", "return_max", "length")
"""Metrics that are printed on one line. Metrics from ``info`` follow on the next line."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command ``kit evaluate``."""
    parser = parser_for("kit evaluate", __doc__, seed=12345)
    parser.add_argument("--video", type=Path, help="record one episode to an MP4 file")
    given = parser.parse_args(argv)
    with errors_in_one_line():
        run = chosen_run(given)
        axis = run.trainer.plan.axis
        after = f"{getattr(run, axis):,} {axis.replace('_', ' ')}"
        evaluator = run.evaluator(given.episodes, given.seed)
        sampled = evaluator.exploration_type is ExplorationType.RANDOM
        where = f", on the CPU ({run.elsewhere} is not available)" if run.elsewhere else ""
        how = "sampled" if sampled else "deterministic"
        print(f"{run.folder}\nafter {after}, {how} actions{where}")
        metrics = evaluator(0)
        evaluator.close()
        found = {name.partition("/")[2]: measured(value) for name, value in metrics.items()}
        mean, std, least, greatest, length = (found.pop(name) for name in _RETURN_METRICS)
        print(
            f"return {mean} ± {std} (minimum {least}, maximum {greatest})"
            f" over {given.episodes} episodes of {length} policy steps on average"
        )
        if found:
            print(", ".join(f"{name} {value}" for name, value in found.items()))
        if given.video is not None:
            shown = run.record(given.video, given.seed)
            print(f"{given.video}: one episode, return {measured(shown['evaluation/return'])}")
        run.close()
