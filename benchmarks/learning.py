"""What the recipes learn with their defaults: several seeds, with their spread.

Run with ``python -m benchmarks.learning``, or for some cases alone with their names, such as
``"SAC, Pendulum-v1"``: rows of the others stay as they were measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path

from benchmarks.measure import RESULTS, machine, markdown_table, write_results

CASES: dict[str, tuple[str, list[str], int, float]] = {
    "PPO, CartPole-v1": ("ppo", [], 5, 475.0),
    "PPO, Pendulum-v1": (
        "ppo", ["env.id=Pendulum-v1", "steps.total_policy_steps=199_680"], 3, -250.0,
    ),
    "SAC, Pendulum-v1": ("sac", [], 3, -180.0),
    "DQN, CartPole-v1": ("dqn", [], 5, 475.0),
    "TD3, Pendulum-v1": ("td3", [], 5, -180.0),
    "DDPG, Pendulum-v1": ("ddpg", [], 3, -180.0),
    "REDQ, Pendulum-v1": ("redq", [], 3, -180.0),
    "DroQ, Pendulum-v1": ("droq", [], 3, -180.0),
    "TQC, Pendulum-v1": ("tqc", [], 3, -180.0),
    "CrossQ, Pendulum-v1": ("crossq", [], 3, -180.0),
    "Rainbow, CartPole-v1": ("rainbow", [], 3, 475.0),
    "Discrete SAC, CartPole-v1": ("sac_discrete", [], 3, 475.0),
    "A2C, CartPole-v1": ("a2c", [], 5, 475.0),
    "PPO2, CartPole-v1": ("ppo", ["preset=ppo2"], 3, 475.0),
    "IMPALA, CartPole-v1": ("impala", [], 3, 475.0),
    "Recurrent PPO, Recall-v0": ("ppo_recurrent", ["preset=recall"], 3, 0.95),
    "PPO with masks, Allowed-v0": (
        "ppo", ["env.id=kit.testing.envs:kit/Allowed-v0", "env.normalize_observation=false"], 3,
        7.6,
    ),
    "PPO, Acrobot-v1": ("ppo", ["preset=classic", "env.vectorization=tensor"], 3, -100.0),
    "PPO, MountainCar-v0": (
        "ppo", ["preset=classic", "env.id=MountainCar-v0", "env.vectorization=tensor"], 3, -110.0,
    ),
    "PPO, LunarLander-v3": ("ppo", ["preset=classic", "env.id=LunarLander-v3"], 3, 200.0),
    "REINFORCE, CartPole-v1": ("reinforce", [], 5, 475.0),
}  # fmt: skip
"""Recipe, settings beyond its defaults, seeds, and the return to reach."""

Result = tuple[int, float, float, float]
"""Policy steps, mean return, its spread over episodes, seconds of training."""


def train(recipe: str, settings: Sequence[str], seed: int) -> Result:
    """Train once; return policy steps, mean return of 100 further episodes, spread, seconds."""
    import importlib

    from kit.cli.launch import main
    from kit.cli.run_folder import find_run
    from kit.evaluate import SavedRun

    with tempfile.TemporaryDirectory() as folder:
        module = importlib.import_module(f"recipes.{recipe}")
        began = time.perf_counter()
        arguments = [*settings, f"seed={seed}", f"runs={folder}", "progress=false"]
        main(module.Config, module.build, [*arguments, "steps.evaluation_every=null"])
        seconds = time.perf_counter() - began
        saved = SavedRun(find_run("latest", Path(folder)))
        metrics = saved.evaluator(episodes=100, seed=10_000 + seed)(0)
    return (
        saved.policy_steps, metrics["evaluation/return"], metrics["evaluation/return_std"], seconds,
    )  # fmt: skip


HEADER = [
    "", "policy steps", "return of each seed", "mean ± std", "target reached", "seconds",
    "measured",
]  # fmt: skip


def row(name: str, results: Sequence[Result]) -> list[str]:
    """The row of a case in the table."""
    returns = [result[1] for result in results]
    target = CASES[name][3]
    reached = sum(value >= target for value in returns)
    return [
        name,
        f"{max(result[0] for result in results):,}",
        ", ".join(f"{value:.1f}" for value in returns),
        f"{statistics.fmean(returns):.1f} ± {statistics.pstdev(returns):.1f}",
        f"{target:g}: {reached} of {len(returns)}",
        f"{statistics.median(result[3] for result in results):.0f}",
        str(date.today()),
    ]


def rows_before() -> dict[str, list[str]]:
    """Rows of the present table, by name of their case."""
    path = RESULTS / "learning.md"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {cells[0]: cells for cells in found if cells[0] in CASES and len(cells) == len(HEADER)}


def report(names: Sequence[str] = (), workers: int = 1) -> Path:
    """Train cases with every seed, write the table after each, and return its path.

    Args:
        names: of :data:`CASES`; all by default.
        workers: trainings at a time.
    """
    rows = rows_before()
    text = (
        f"{machine(1)}, {workers} runs at a time. Return: mean of 100 episodes with deterministic "
        "actions after the run, in environments with other seeds.\n\n"
    )
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for name in names or CASES:
            recipe, settings, seeds, _ = CASES[name]
            jobs = [pool.submit(train, recipe, settings, seed) for seed in range(seeds)]
            rows[name] = row(name, [job.result() for job in jobs])
            table = markdown_table(HEADER, [rows[case] for case in CASES if case in rows])
            path = write_results("learning", "Learning", text + table)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="case", help="all by default")
    print(report(parser.parse_args().names).read_text())
