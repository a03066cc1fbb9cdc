"""Speed of several learners: one run on one and on two ranks of torchrun."""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import environment, interleaved, markdown_table, median, ratio

PPO = [
    "-m", "recipes.ppo", "env.num_envs=8", "steps.steps_per_env=128", "steps.minibatch_size=256",
    "steps.evaluation_every=null", "steps.evaluation_episodes=1", "progress=false",
]  # fmt: skip
LENGTHS = {"CartPole-v1": 65_536, "HalfCheetah-v5": 32_768}
"""Policy steps of one rank, by environment."""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def _rate(env: str, ranks: int | None) -> Callable[[], float]:
    """Return a case: policy steps per second of a run after its first row.

    Args:
        env: environment of the run.
        ranks: number of processes; ``None``: without torchrun.
    """
    steps = LENGTHS[env] * (ranks or 1)
    words = [*PPO, f"env.id={env}", f"steps.total_policy_steps={steps}", f"log_every={steps // 8}"]
    start = [] if ranks is None else [*TORCHRUN, str(ranks)]

    def case() -> float:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, *start, *words, f"log_dir={folder}"]
            subprocess.run(command, check=True, capture_output=True, env=environment())
            (table,) = Path(folder).glob("ppo/*/*/times.csv")
            with table.open() as file:
                first, *_, last = csv.DictReader(file)
        counted = int(last["policy_steps"]) - int(first["policy_steps"])
        return counted / (float(last["time/seconds"]) - float(first["time/seconds"]))

    return case


def learners(rounds: int = 3) -> str:
    """Return the section about ranks of torchrun."""
    rows = []
    for env in LENGTHS:
        cases = {"alone": None, "one rank": 1, "two ranks": 2}
        figures = interleaved({name: _rate(env, n) for name, n in cases.items()}, rounds, False)
        alone = figures["alone"]
        for name, rates in figures.items():
            rows.append([env, name, f"{median(rates):,.0f}", f"{ratio(rates, alone):.2f}"])
    text = "PPO, 8 envs x 128 steps and minibatches of 256 per rank, after the first row."
    header = ["environment", "processes", "policy steps/s", "ratio"]
    return f"## Several learners\n\n{text}\n\n{markdown_table(header, rows)}"


if __name__ == "__main__":
    print(learners())
