"""This tree against another commit, whole runs interleaved: is anything slower than it was?

    python -m benchmarks.against REVISION [case ...] [--rounds 5]

Every run is a command in a process of its own, in turn in both trees, after a round that does not
count and leaves the bytecode. A ratio is the median of the rounds' ratios; above 1 this tree is
faster. Start and imports count. One PyTorch thread.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import (
    TREE,
    environment,
    interleaved,
    machine,
    markdown_table,
    median,
    ratio,
    write_results,
)

THREADS = 1
_STEPS = "steps.total_policy_steps"
CASES: dict[str, list[str]] = {
    "PPO, 8 x CartPole": ["recipes.ppo"],
    "PPO, 1 x CartPole": [
        "recipes.ppo",
        "env.num_envs=1",
        "steps.steps_per_env=512",
        f"{_STEPS}=16_384",
    ],
    "A2C, CartPole": ["recipes.a2c", f"{_STEPS}=65_520"],
    "SAC, Pendulum": ["recipes.sac", f"{_STEPS}=4_000"],
    "DQN, CartPole": ["recipes.dqn", f"{_STEPS}=16_250"],
    "TD3, Pendulum": ["recipes.td3", f"{_STEPS}=4_000"],
    "recurrent PPO": ["recipes.ppo_recurrent", f"{_STEPS}=16_384"],
    "DreamerV3, tiny": ["recipes.dreamerv3", f"{_STEPS}=1_536", "steps.learning_starts=1_024"],
    "help": ["recipes.ppo", "--help"],
}


def seconds(words: Sequence[str], tree: Path) -> float:
    """Run a command in a tree, in a new folder, and return how long it takes."""
    module, *given = words
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", module, *given, "progress=false"],
            cwd=folder, env=environment(THREADS, tree), capture_output=True, text=True, check=False,
        )  # fmt: skip
        spent = time.perf_counter() - began
    if ran.returncode:
        raise RuntimeError(f"in {tree}:\n{ran.stderr}")
    return spent


def main(revision: str, names: Sequence[str] = (), rounds: int = 5) -> Path:
    """Measure both trees, write the table and return its path."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        add = ["git", "worktree", "add", "-q", "--detach", str(other), revision]
        subprocess.run(add, cwd=TREE, check=True)
        try:
            for name in names or CASES:
                rows.append(_compare(name, other, rounds))
                print(" | ".join(rows[-1]), flush=True)
        finally:
            remove = ["git", "worktree", "remove", "--force", str(other)]
            subprocess.run(remove, cwd=TREE, check=True)
    text = f"{__doc__}\nREVISION = {revision}. {machine(THREADS)}; {rounds} rounds.\n\n"
    table = markdown_table(["", "seconds there", "seconds here", "times faster"], rows)
    return write_results("against", "Against an earlier commit", text + table)


def _compare(name: str, other: Path, rounds: int) -> list[str]:
    trees = {"there": other, "here": TREE}
    cases = {which: lambda tree=tree: seconds(CASES[name], tree) for which, tree in trees.items()}
    figures = interleaved(cases, rounds)
    there, here = figures["there"], figures["here"]
    return [name, f"{median(there):.2f}", f"{median(here):.2f}", f"{ratio(there, here):.3f}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision")
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(main(given.revision, given.cases, given.rounds).read_text())
