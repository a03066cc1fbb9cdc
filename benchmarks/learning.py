"""What the recipes learn with their defaults: several seeds, with their spread.

Run with ``python -m benchmarks.learning``.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.measure import machine, markdown_table, write_results

CASES: dict[str, tuple[str, list[str], int, float]] = {
    "PPO, CartPole-v1": ("ppo", [], 5, 475.0),
    "PPO, Pendulum-v1": (
        "ppo", ["env.id=Pendulum-v1", "steps.total_policy_steps=199_680"], 3, -250.0,
    ),
    "SAC, Pendulum-v1": ("sac", [], 3, -180.0),
}  # fmt: skip
"""Recipe, settings beyond its defaults, seeds, and the return to reach."""


def train(recipe: str, settings: Sequence[str], seed: int) -> tuple[int, float, float, float]:
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


def report(workers: int = 1) -> Path:
    """Train every case with every seed, write the table and return its path."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = {
            name: [pool.submit(train, recipe, settings, seed) for seed in range(seeds)]
            for name, (recipe, settings, seeds, _) in CASES.items()
        }
        results = {name: [job.result() for job in found] for name, found in jobs.items()}
    rows = []
    for name, found in results.items():
        returns = [result[1] for result in found]
        target = CASES[name][3]
        reached = sum(value >= target for value in returns)
        rows.append([
            name,
            f"{found[0][0]:,}",
            ", ".join(f"{value:.1f}" for value in returns),
            f"{statistics.fmean(returns):.1f} ± {statistics.pstdev(returns):.1f}",
            f"{target:g}: {reached} of {len(returns)}",
            f"{statistics.median(result[3] for result in found):.0f}",
        ])  # fmt: skip
    header = ["", "policy steps", "return of each seed", "mean ± std", "target reached", "seconds"]
    text = (
        f"{machine(1)}, {workers} runs at a time. Return: mean of 100 episodes with deterministic "
        "actions after the run, in environments with other seeds.\n\n"
    )
    return write_results("learning", "Learning", text + markdown_table(header, rows))


if __name__ == "__main__":
    print(report().read_text())
