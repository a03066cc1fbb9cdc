"""This tree against another commit, interleaved: is anything slower than it was?

    python -m benchmarks.against REVISION [--rounds 5]

Every case runs in a process of its own, in turn in both trees, each with its own benchmark code. A
ratio is the median of the rounds' ratios; above 1 this tree is faster. One PyTorch thread.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
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

_RATE = "import statistics; case = {make}; print(statistics.median(case() for _ in range(4)))"
_SECONDS = "print({make}())"
_SETUP = "import torch; torch.set_num_threads(1); "


def _collection(id: str, num_envs: int, **arguments: object) -> str:
    given = "".join(f", {name}={value!r}" for name, value in arguments.items())
    make = f"kit({id!r}, {num_envs}{given})"
    return f"{_SETUP}from benchmarks.collection import kit; {_RATE.format(make=make)}"


def _tensor(id: str, num_envs: int, activation: str) -> str:
    make = f"collector({id!r}, {num_envs}, torch.device('cpu'), {activation!r})"
    return f"{_SETUP}from benchmarks.tensor_envs import collector; {_RATE.format(make=make)}"


def _recipe(name: str, *overrides: str) -> str:
    arguments = ["progress=false", *overrides]
    return (
        f"import sys, time; sys.argv = ['{name}', *{arguments!r}]; began = time.perf_counter(); "
        f"import runpy, contextlib, io\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    runpy.run_module('recipes.{name}', run_name='__main__')\n"
        f"print(time.perf_counter() - began)"
    )


RATES = {
    "collect CartPole-v1, 1": _collection("CartPole-v1", 1),
    "collect CartPole-v1, 8": _collection("CartPole-v1", 8),
    "collect CartPole-v1, 64": _collection("CartPole-v1", 64),
    "collect CartPole-v1, 64, native": _collection("CartPole-v1", 64, vectorization="native"),
    "collect CartPole-v1, 8, TorchRL's policy": _collection("CartPole-v1", 8, theirs=True),
    "collect CartPole-v1, 8, exact policy": _collection("CartPole-v1", 8, exact=True),
    "collect HalfCheetah-v5, 1": _collection("HalfCheetah-v5", 1),
    "collect HalfCheetah-v5, 4": _collection("HalfCheetah-v5", 4),
    "collect HalfCheetah-v5, 4, workers": _collection("HalfCheetah-v5", 4, vectorization="async"),
    "collect CartPole-v1 in torch, 4,096, tanh": _tensor("CartPole-v1", 4096, "tanh"),
    "collect CartPole-v1 in torch, 4,096, relu": _tensor("CartPole-v1", 4096, "relu"),
    "collect CartPole-v1 in torch, 64, tanh": _tensor("CartPole-v1", 64, "tanh"),
}
"""Policy steps per second."""
DURATIONS = {
    "PPO end to end, 1 environment, 65,536": (
        f"{_SETUP}from benchmarks.ppo import Kit; print(Kit()())"
    ),
    "recipes.ppo, 65,536 (command)": _recipe("ppo"),
    "recipes.sac, 4,000 (command)": _recipe("sac", "steps.total_policy_steps=4000"),
    "import everything": (
        "import time; began = time.perf_counter(); import recipes.ppo, recipes.sac; "
        "print(time.perf_counter() - began)"
    ),
}
"""Seconds."""


def _run(code: str, tree: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            env=environment(THREADS, tree),
            capture_output=True,
            text=True,
            check=False,
        )
    if ran.returncode:
        raise RuntimeError(f"in {tree}:\n{ran.stderr}")
    return float(ran.stdout.split()[-1])


def main(revision: str, rounds: int = 5) -> Path:
    """Measure both trees, write the table and return its path."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        add = ["git", "worktree", "add", "-q", "--detach", str(other), revision]
        subprocess.run(add, cwd=TREE, check=True)
        try:
            for name, code in {**RATES, **DURATIONS}.items():
                rows.append(_compare(name, code, other, rounds))
                print(" | ".join(rows[-1]), flush=True)
        finally:
            remove = ["git", "worktree", "remove", "--force", str(other)]
            subprocess.run(remove, cwd=TREE, check=True)
    text = f"{__doc__}\nREVISION = {revision}. {machine(THREADS)}; {rounds} rounds.\n\n"
    header = ["", "unit", "there", "here", "times faster"]
    return write_results(
        "against", "Against an earlier commit", text + markdown_table(header, rows)
    )


def _compare(name: str, code: str, other: Path, rounds: int) -> list[str]:
    trees = {"there": other, "here": TREE}
    cases = {which: lambda tree=tree: _run(code, tree) for which, tree in trees.items()}
    figures = interleaved(cases, rounds, warm_up=False)
    there, here = figures["there"], figures["here"]
    if name in RATES:
        return [name, "policy steps/s", f"{median(there):,.0f}", f"{median(here):,.0f}",
                f"{ratio(here, there):.2f}"]  # fmt: skip
    return [name, "s", f"{median(there):.2f}", f"{median(here):.2f}", f"{ratio(there, here):.2f}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(main(given.revision, given.rounds).read_text())
