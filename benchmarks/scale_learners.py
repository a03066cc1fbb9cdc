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


def _rate(env: str, ranks: int | None, runs: int = 1) -> Callable[[], float]:
    """Return a case: policy steps per second of all runs.

    Args:
        env: environment of the runs.
        ranks: number of processes of a run; ``None``: without torchrun.
        runs: number of runs at the same time.
    """
    steps = LENGTHS[env] * (ranks or 1)
    words = [*PPO, f"env.id={env}", f"steps.total_policy_steps={steps}", f"log_every={steps // 8}"]
    start = [] if ranks is None else [*TORCHRUN, str(ranks)]

    def case() -> float:
        with tempfile.TemporaryDirectory() as folder:
            commands = [
                [sys.executable, *start, *words, f"log_dir={folder}/{n}"] for n in range(runs)
            ]
            output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started = [subprocess.Popen(c, env=environment(), **output) for c in commands]
            assert not any(process.wait() for process in started)
            return sum(map(_rate_of, Path(folder).glob("*/ppo/*/*/times.csv")))

    return case


def _rate_of(table: Path) -> float:
    """Return the policy steps per second of a run, after its first row."""
    with table.open() as file:
        first, *_, last = csv.DictReader(file)
    counted = int(last["policy_steps"]) - int(first["policy_steps"])
    return counted / (float(last["time/seconds"]) - float(first["time/seconds"]))


def learners(rounds: int = 3) -> str:
    """Return the section about ranks of torchrun."""
    rows = []
    for env in LENGTHS:
        cases = {
            "one run": _rate(env, None), "one rank": _rate(env, 1), "two ranks": _rate(env, 2),
            "two runs that exchange nothing": _rate(env, None, runs=2),
        }  # fmt: skip
        figures = interleaved(cases, rounds, False)
        alone = figures["one run"]
        for name, rates in figures.items():
            rows.append([env, name, f"{median(rates):,.0f}", f"{ratio(rates, alone):.2f}"])
    text = "PPO, 8 envs x 128 steps and minibatches of 256 per rank, after the first row."
    header = ["environment", "processes", "policy steps/s", "ratio"]
    return f"## Several learners\n\n{text}\n\n{markdown_table(header, rows)}"


if __name__ == "__main__":
    print(learners())
