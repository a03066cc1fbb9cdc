"""What SAC, TD3 and CrossQ learn beside Stable-Baselines3 and sb3-contrib.

    python -m benchmarks.side_by_side [case ...] [--seeds 0 1 2] [--peers PYTHON] [--table]

Equal policy steps, gradient steps, copies, networks, minibatches and learning rates; what is not
said is each library's default. Every run is a process of its own on one thread, and is evaluated
afterwards with deterministic actions in environments with other seeds. A line for each run goes to
``results/side_by_side.csv``; ``--peers`` is a Python that has Stable-Baselines3 and sb3-contrib (by
default this one).

The authors' actor of CrossQ has batch renormalisation, sb3-contrib's, too; the kit's by default has
not. With it (``renorm_actor=true``) the kit's runs returned 4857, 5295 and 6544 on HalfCheetah, and
995, 3153, 2453, 1267 and 1427 on Hopper. Its log deviations are clipped, as theirs are; with those
of the kit's other actors, which a tanh keeps in a range, they were 296, 2449, 416, 423 and 344.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, environment, machine, markdown_table, write_results

POLICY_STEPS, LEARNING_STARTS, COPIES, MINIBATCH = 300_000, 10_000, 8, 128
EPISODES = 20
RATES = {"SAC": 3e-4, "TD3": 1e-3, "CrossQ": 1e-3}
ENVIRONMENTS = ("HalfCheetah-v5", "Hopper-v5")
CASES = [f"{algorithm}, {id}" for algorithm in RATES for id in ENVIRONMENTS]
LIBRARIES = ("kit", "peer")


@dataclass
class Run:
    """One line of the raw results."""

    case: str
    library: str
    seed: int
    policy_steps: int
    gradient_steps: int
    mean_return: float
    """of the episodes after the run"""
    std: float
    seconds: float
    """of training, evaluation not counted"""
    measured: str


# ---------------------------------------------------------------------- one run, in its process
def run_kit(algorithm: str, id: str, seed: int, steps: int) -> dict[str, Any]:
    """Train the recipe and evaluate its run."""
    import importlib

    from kit.cli.launch import main
    from kit.evaluate import SavedRun
    from kit.runs.saved_runs import find_run

    recipe = importlib.import_module(f"recipes.{algorithm.lower()}")
    # Stable-Baselines3 makes its first gradient step one vector step after the random ones.
    settings = [
        f"env.id={id}", f"env.num_envs={COPIES}", f"steps.total_policy_steps={steps}",
        f"steps.learning_starts={LEARNING_STARTS + COPIES}", "steps.steps_per_env=1",
        f"steps.replay_ratio=1/{COPIES}", f"steps.minibatch_size={MINIBATCH}",
        "steps.evaluation_every=null", "hidden_sizes=[256,256]", "buffer_size=300_000",
        f"learning_rate={RATES[algorithm]}", f"seed={seed}", "progress=false",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        main(recipe.Config, recipe.build, [*settings, f"runs={folder}"])
        seconds = time.perf_counter() - began
        path = find_run("latest", Path(folder))
        found = SavedRun(path).evaluator(episodes=EPISODES, seed=10_000 + seed)(0)
        with (path / "metrics.csv").open() as file:
            *_, last = csv.DictReader(file)
    return {
        "policy_steps": int(last["policy_steps"]),
        "gradient_steps": int(last["gradient_steps"]),
        "mean_return": found["evaluation/return"],
        "std": found["evaluation/return_std"],
        "seconds": seconds,
    }


def run_peer(algorithm: str, id: str, seed: int, steps: int) -> dict[str, Any]:
    """Train with Stable-Baselines3 or sb3-contrib, and evaluate."""
    import numpy as np
    import sb3_contrib
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.noise import NormalActionNoise

    began = time.perf_counter()
    special: dict[str, Any] = {}
    library = sb3_contrib if algorithm == "CrossQ" else stable_baselines3
    if algorithm == "TD3":  # no noise by default; the paper's, per action dimension
        size = make_vec_env(id, 1).action_space.shape
        special["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, 0.1))
    model = getattr(library, algorithm)(
        "MlpPolicy", make_vec_env(id, COPIES, seed=seed), learning_starts=LEARNING_STARTS,
        train_freq=1, gradient_steps=1, batch_size=MINIBATCH, buffer_size=300_000,
        learning_rate=RATES[algorithm], policy_kwargs={"net_arch": [256, 256]}, seed=seed,
        device="cpu", **special,
    )  # fmt: skip
    model.learn(steps)
    seconds = time.perf_counter() - began
    env = make_vec_env(id, 1, seed=10_000 + seed)
    returns, _ = evaluate_policy(model, env, EPISODES, return_episode_rewards=True)
    return {
        "policy_steps": model.num_timesteps,
        "gradient_steps": model._n_updates,
        "mean_return": statistics.fmean(returns),
        "std": statistics.pstdev(returns),
        "seconds": seconds,
    }


def train(case: str, library: str, seed: int, python: str) -> Run:
    """Make one run in a process of its own."""
    command = [python, "-m", "benchmarks.side_by_side", case, "--run", library, "--seeds"]
    ran = subprocess.run(
        [*command, str(seed)], env=environment(), capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise RuntimeError(f"{library}, {case}:\n{ran.stdout}\n{ran.stderr}")
    found = json.loads(ran.stdout.splitlines()[-1])
    rounded = {k: round(v, 2) for k, v in found.items()}
    return Run(case=case, library=library, seed=seed, measured=str(date.today()), **rounded)


# ---------------------------------------------------------------------- raw results and the table
def read() -> list[Run]:
    """Runs so far, the latest of each case, library and seed."""
    path = RESULTS / "side_by_side.csv"
    if not path.exists():
        return []
    kinds: dict[str, Any] = {"case": str, "library": str, "measured": str}
    kinds |= dict.fromkeys(("seed", "policy_steps", "gradient_steps"), int)
    with path.open() as file:
        lines = list(csv.DictReader(file))
    runs = [Run(**{k: kinds.get(k, float)(v) for k, v in line.items()}) for line in lines]
    return [*{(run.case, run.library, run.seed): run for run in runs}.values()]


def write(runs: Sequence[Run]) -> Path:
    """Write the raw results and the table, and return the table's path."""
    found = sorted(runs, key=lambda r: (CASES.index(r.case), LIBRARIES.index(r.library), r.seed))
    with (RESULTS / "side_by_side.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(field.name for field in fields(Run))
        table.writerows(map(astuple, found))
    rows = []
    for case in CASES:
        groups = [[r for r in found if (r.case, r.library) == (case, name)] for name in LIBRARIES]
        if all(groups):
            own, theirs = (statistics.fmean(r.mean_return for r in group) for group in groups)
            spread = max(statistics.pstdev(r.mean_return for r in group) for group in groups)
            verdict = "yes" if own >= theirs - spread else "no"
            verdict = verdict if min(map(len, groups)) > 1 else "one seed"
            rows += [_row(group, verdict if group is groups[0] else "") for group in groups]
    header = [
        "", "policy steps", "gradient steps", "return of each seed", "mean ± std",
        "not below, within the spread", "seconds",
    ]  # fmt: skip
    text = (
        f"{__doc__}\n{machine(1)}. {COPIES} copies, one gradient step of {MINIBATCH} transitions "
        f"per vector step from {LEARNING_STARTS:,} random policy steps on, networks of 256 x 256, "
        f"learning rates {', '.join(f'{name} {rate:g}' for name, rate in RATES.items())}. Returns "
        f"are means of {EPISODES} episodes; spread: the larger standard deviation over seeds of "
        "the two libraries. Seconds: the median; other runs shared the machine.\n\n"
    )
    title = "Off-policy learning, side by side"
    return write_results("side_by_side", title, text + markdown_table(header, rows))


def _row(runs: Sequence[Run], verdict: str) -> list[str]:
    returns = [run.mean_return for run in runs]
    peer = "sb3-contrib" if runs[0].case.startswith("CrossQ") else "Stable-Baselines3"
    return [
        f"{runs[0].case}: {'kit' if runs[0].library == 'kit' else peer}",
        f"{runs[0].policy_steps:,}",
        f"{runs[0].gradient_steps:,}",
        ", ".join(f"{value:.0f}" for value in returns),
        f"{statistics.fmean(returns):.0f} ± {statistics.pstdev(returns):.0f}",
        verdict,
        f"{statistics.median(run.seconds for run in runs):.0f}",
    ]


def main(cases: Sequence[str], seeds: Sequence[int], peers: str) -> Path:
    """Make the runs that are missing, writing the table after each; return its path."""
    for seed in seeds:
        for case in cases or CASES:
            for library, python in zip(LIBRARIES, (sys.executable, peers)):
                if (case, library, seed) not in {(r.case, r.library, r.seed) for r in read()}:
                    run = train(case, library, seed, python)
                    print(run, flush=True)
                    write([*read(), run])
    return write(read())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side")
    parser.add_argument("cases", nargs="*", metavar="case", help="all by default")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--peers", default=sys.executable)
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--run", choices=LIBRARIES, help="make one run, print it as JSON")
    parser.add_argument("--steps", type=int, default=POLICY_STEPS)
    given = parser.parse_args()
    if given.run:
        algorithm, id = given.cases[0].split(", ")
        one = run_kit if given.run == "kit" else run_peer
        print(json.dumps(one(algorithm, id, given.seeds[0], given.steps)))
    else:
        path = write(read()) if given.table else main(given.cases, given.seeds, given.peers)
        print(path.read_text())
