"""Evaluating a saved run, and recording it to video.

Run it::

    python -m kit.evaluate runs/ppo/CartPole-v1/20250101-120000-s0
    python -m kit.evaluate latest --episodes 100 --seed 7
    python -m kit.evaluate latest --best
    python -m kit.evaluate latest --video pendulum.mp4
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
    """Create a parser for a run, with the number of episodes and their seed if ``seed`` is given.

    Args:
        command: name of the command.
        text: module documentation, whose first line describes the command.
        seed: default seed; ``None``: no episodes.
    """
    parser = argparse.ArgumentParser(prog=command, description=text.split("\n")[0])
    parser.add_argument("run", help='run folder, or "latest"')
    parser.add_argument(
        "--log-dir", "--runs", dest="log_dir", default="runs", help="where run folders are"
    )
    if seed is not None:
        parser.add_argument("--episodes", type=int, default=100, help="whole episodes to play")
        parser.add_argument("--seed", type=int, default=seed, help="of the environments")
    parser.add_argument("--best", action="store_true", help="the policy of the best evaluation")
    parser.add_argument("--trust", help="modules that the run may import, separated by commas")
    return parser


def chosen_run(given: argparse.Namespace, device: str | None = None) -> SavedRun:
    """Check the arguments of :func:`parser_for` and return their run."""
    if "episodes" in given:
        given.episodes = whole_number("episodes", given.episodes, at_least=1)
        given.seed = whole_number("seed", given.seed)
    folder = find_run(given.run, Path(given.log_dir), field="run")
    trust = trusted_names(given.trust)
    return SavedRun(folder, trust, how="--trust ", best=given.best, device=device)


_TOLD = ("return", "return_std", "return_min", "return_max", "length")
"""Metrics printed in the line of the return; others, such as those of ``info``, follow."""


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate a run from the command line."""
    parser = parser_for("python -m kit.evaluate", __doc__, seed=12345)
    parser.add_argument("--video", type=Path, help="MP4 file for one episode")
    given = parser.parse_args(argv)
    with errors_in_one_line():
        run = chosen_run(given)
        axis = run.trainer.plan.axis
        after = f"{getattr(run, axis):,} {axis.replace('_', ' ')}"
        evaluator = run.evaluator(given.episodes, given.seed)
        sampled = evaluator.exploration_type is ExplorationType.RANDOM
        where = f", on the CPU: {run.elsewhere} is not here" if run.elsewhere else ""
        how = "sampled" if sampled else "deterministic"
        print(f"{run.folder}\nafter {after}, {how} actions{where}")
        metrics = evaluator(0)
        evaluator.close()
        found = {name.partition("/")[2]: measured(value) for name, value in metrics.items()}
        mean, std, least, greatest, length = (found.pop(name) for name in _TOLD)
        print(
            f"return {mean} ± {std} (least {least}, greatest {greatest})"
            f" over {given.episodes} episodes, length {length} policy steps"
        )
        if found:
            print(", ".join(f"{name} {value}" for name, value in found.items()))
        if given.video is not None:
            shown = run.record(given.video, given.seed)
            print(f"{given.video}: one episode, return {measured(shown['evaluation/return'])}")
        run.close()
