"""What the recipes learn: several seeds, their spread, and what others have published.

``python -m benchmarks.learning`` trains every case, ``... "SAC, Pendulum-v1" --seeds 0 1`` some of
them, and adds a line for each run to ``results/learning.csv``; ``--table`` alone writes the table
and the picture of the curves from these lines.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from datetime import date
from pathlib import Path

from benchmarks.curves import draw
from benchmarks.measure import RESULTS, machine, markdown_table, write_results

OWN = "env.id=kit.testing.envs:kit"
MAZE = [
    f"{OWN}/Maze-v0", "env.kwargs.rooms=2", "env.kwargs.steps=50", "latents=4", "gamma=0.95",
    "entropy_coeff=0.03", "steps.replay_ratio=1", "steps.total_policy_steps=8_000",
]  # fmt: skip
EXPLORING = ["preset=maze", "env.kwargs.rooms=2", "env.kwargs.steps=50"]
REMEMBERING = [
    "size=tiny", "latents=2", "learning_rate=1e-3", "entropy_coeff=0.03", "steps.replay_ratio=1/2",
    "steps.sequence_length=20", "steps.minibatch_size=48", "imagination_starts=4",
    "steps.total_policy_steps=8_000",
]  # fmt: skip
CASES: dict[str, tuple[str, list[str], int, float]] = {
    "PPO, CartPole-v1": ("ppo", [], 5, 475.0),
    "PPO, Pendulum-v1": (
        "ppo", ["env.id=Pendulum-v1", "steps.total_policy_steps=199_680"], 3, -250.0,
    ),
    "SAC, Pendulum-v1": ("sac", [], 3, -180.0),
    "DQN, CartPole-v1": ("dqn", [], 5, 475.0),
    "DQN, CartPole-v1, best kept": ("dqn", [], 5, 475.0),
    "DQN, LunarLander-v3": ("dqn", ["preset=lunarlander"], 3, 200.0),
    "TD3, Pendulum-v1": ("td3", [], 5, -180.0),
    "DDPG, Pendulum-v1": ("ddpg", [], 3, -180.0),
    "REDQ, Pendulum-v1": ("redq", [], 3, -180.0),
    "DroQ, Pendulum-v1": ("droq", [], 3, -180.0),
    "TQC, Pendulum-v1": ("tqc", [], 3, -180.0),
    "CrossQ, Pendulum-v1": ("crossq", [], 3, -180.0),
    "Rainbow, CartPole-v1": ("rainbow", [], 3, 475.0),
    "Discrete SAC, CartPole-v1": ("sac_discrete", [], 5, 475.0),
    "A2C, CartPole-v1": ("a2c", [], 5, 475.0),
    "PPO2, CartPole-v1": ("ppo", ["preset=ppo2"], 5, 475.0),
    "IMPALA, CartPole-v1": ("impala", [], 5, 475.0),
    "TRPO, CartPole-v1": ("trpo", [], 5, 475.0),
    "Recurrent PPO, CartPole-v1": ("ppo_recurrent", [], 3, 475.0),
    "Recurrent PPO, Recall-v0": ("ppo_recurrent", ["preset=recall"], 3, 0.95),
    "PPO with masks, Allowed-v0": (
        "ppo", [f"{OWN}/Allowed-v0", "env.normalize_observation=false"], 3, 7.6,
    ),
    "PPO, Acrobot-v1": ("ppo", ["preset=classic", "env.vectorization=tensor"], 3, -100.0),
    "PPO, MountainCar-v0": (
        "ppo", ["preset=classic", "env.id=MountainCar-v0", "env.vectorization=tensor"], 3, -110.0,
    ),
    "PPO, LunarLander-v3": ("ppo", ["preset=classic", "env.id=LunarLander-v3"], 3, 200.0),
    "PPO, LunarLanderContinuous-v3": (
        "ppo", ["preset=classic", "env.id=LunarLanderContinuous-v3"], 3, 200.0,
    ),
    "PPO, HalfCheetah-v5": ("ppo", ["preset=mujoco"], 3, 1396.6),
    "PPO, Hopper-v5": ("ppo", ["preset=mujoco", "env.id=Hopper-v5"], 3, 2111.1),
    "PPO, Walker2d-v5": ("ppo", ["preset=mujoco", "env.id=Walker2d-v5"], 3, 1716.2),
    "PPO, Pong": (
        "ppo_pixels",
        [
            "preset=atari", "env.id=ale_py:PongNoFrameskip-v4",
            "steps.total_policy_steps=2_000_896",
        ],
        1, 18.0,
    ),
    "REINFORCE, CartPole-v1": ("reinforce", [], 5, 475.0),
    "DreamerV3 nano, CartPole-v1": ("dreamerv3", [], 3, 400.0),
    "DreamerV3, CartPole-v1": ("dreamerv3", ["size=tiny"], 3, 400.0),
    "DreamerV3, Pendulum-v1": (
        "dreamerv3", ["size=tiny", "steps.replay_ratio=1/4", "env.id=Pendulum-v1"], 3, -300.0,
    ),
    "DreamerV3, Catch-v0": ("dreamerv3", ["size=tiny", f"{OWN}/Catch-v0"], 3, 0.8),
    "DreamerV3, Recall-v0": (
        "dreamerv3", [*REMEMBERING, f"{OWN}/Recall-v0", "steps.total_policy_steps=12_000"], 3, 0.9,
    ),
    "DreamerV3, GoNoGo-v0": (
        "dreamerv3", [*REMEMBERING, f"{OWN}/GoNoGo-v0"], 3, 0.9,
    ),
    "DreamerV3, Glimpse-v0, 16 x 16": (
        "dreamerv3",
        ["size=tiny", "steps.replay_ratio=1/4", f"{OWN}/Glimpse-v0", "env.kwargs.size=16"], 3, 7.2,
    ),
    "DreamerV1, Pendulum-v1": ("dreamerv1", [], 3, -300.0),
    "Plan2Explore, Maze-v0": ("plan2explore", EXPLORING, 5, 0.9),
    "DreamerV3 nano, Maze-v0": ("dreamerv3", MAZE, 3, 0.9),
}  # fmt: skip
"""Recipe, settings beyond its defaults, seeds, and the return to reach."""

BEST_KEPT = {"DQN, CartPole-v1, best kept"}
"""Cases whose runs evaluate as often as by default, and of which the best policy is measured."""

PUBLISHED: dict[str, str] = {
    "PPO, CartPole-v1": "490.0 ± 6.1 (CleanRL, 500k)",
    "PPO, Acrobot-v1": "-86.4 ± 1.3 (CleanRL, 500k), -73.5 (zoo, 1M)",
    "PPO, MountainCar-v0": "-200.0 ± 0.0 (CleanRL, 500k), -110.4 (zoo, 1M)",
    "PPO, LunarLander-v3": "242.1 (zoo, v2, 1M)",
    "PPO, LunarLanderContinuous-v3": "270.9 (zoo, v2, 1M)",
    "PPO, HalfCheetah-v5": "1442.6 ± 46.0 (CleanRL, v4, 1M), 5819.1 (zoo, v3, 1M)",
    "PPO, Hopper-v5": "2382.9 ± 271.7 (CleanRL, v4, 1M), 2410.4 (zoo, v3, 1M)",
    "PPO, Walker2d-v5": "2288.0 ± 571.8 (CleanRL, v4, 1M), 3478.8 (zoo, v3, 1M)",
    "PPO, Pong": "20.4 ± 0.2 (CleanRL, 10M)",
    "A2C, CartPole-v1": "500.0 (zoo, 500k)",
    "DQN, CartPole-v1": "500.0 (zoo, 50k)",
    "DQN, LunarLander-v3": "154.4 (zoo, v2, 100k)",
    "SAC, Pendulum-v1": "-157.0 (zoo, 20k)",
    "TD3, Pendulum-v1": "-151.9 (zoo, 20k)",
    "DDPG, Pendulum-v1": "-152.1 (zoo, 20k)",
    "PPO, Pendulum-v1": "-172.2 (zoo, 100k)",
}
"""What others report for the same task, and after how many steps."""

NOTES = """In Maze-v0 (four rooms, episodes of 50 policy steps) random actions find the goal in one
of 4,100 episodes; a run has 160. DreamerV3 is there to show that it never sees what Plan2Explore
finds while it explores. Of DQN on CartPole fifteen more seeds (5 to 19) were run, with evaluations:
of the last policies 14 returned 500 (the other 131.7), of the best kept all.
Of DreamerV3 on GoNoGo-v0 five more runs were made with other random numbers: four answered right
after 2,000 policy steps (0.96 to 1.00), one (seed 0) still guessed after 6,000."""

SOURCES = """CleanRL: docs/benchmark/ppo.md and ppo_continuous_action.md of its repository at
fe8d8a0, ppo_atari.md at b2542e0, returns of training episodes over 3 seeds. Zoo: benchmark.md of
DLR-RM/rl-baselines3-zoo, one run with settings tuned for each environment, deterministic actions.
Targets of MuJoCo are the lower ends of CleanRL's intervals."""

PICTURE = """Returns of training episodes in each twentieth of the runs, mean and interquartile band
of the seeds; dashed, the return that evaluations are to reach.

![learning curves](learning.png)"""


@dataclass
class Run:
    """One line of the raw results."""

    case: str
    seed: int
    policy_steps: int
    mean_return: float
    """of 100 episodes after the run, with the actions of its own evaluations"""
    std: float
    seconds: float
    """of the run; the 100 episodes are not counted"""
    measured: str
    curve: str = ""
    """mean returns of training episodes in each twentieth of the run"""


def train(case: str, seed: int) -> Run:
    """Train once, then evaluate in environments with other seeds."""
    from kit.cli.launch import main
    from kit.evaluate import SavedRun
    from kit.runs.saved_runs import find_run

    recipe, settings, _, _ = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        module = importlib.import_module(f"recipes.{recipe}")
        began = time.perf_counter()
        arguments = [*settings, f"seed={seed}", f"log_dir={folder}", "progress=false"]
        kept = case in BEST_KEPT
        alone = [] if kept else ["steps.evaluation_every=null"]
        main(module.Config, module.build, [*arguments, *alone])
        seconds = time.perf_counter() - began
        path = find_run("latest", Path(folder))
        saved = SavedRun(path, best=kept)
        metrics = saved.evaluator(episodes=100, seed=10_000 + seed)(0)
        policy_steps, curve = twentieths(path / "metrics.csv")
    found = metrics["evaluation/return"], metrics["evaluation/return_std"]
    rounded = [round(value, 2) for value in (*found, seconds)]
    return Run(case, seed, policy_steps, *rounded, str(date.today()), curve)


def twentieths(path: Path) -> tuple[int, str]:
    """Policy steps of a run, and mean returns of training episodes in each twentieth of it.

    Where none ended it is ``-``.
    """
    with path.open() as file:
        rows = list(csv.DictReader(file))
    last = int(rows[-1]["policy_steps"])
    parts: list[list[float]] = [[] for _ in range(20)]
    for row in rows:
        if row.get("episode/return"):
            part = (int(row["policy_steps"]) * 20 - 1) // last
            parts[part].append(float(row["episode/return"]))
    means = [f"{statistics.fmean(part):.1f}" if part else "-" for part in parts]
    return last, " ".join(means)


# ---------------------------------------------------------------------- raw results and the table
def read() -> list[Run]:
    """Runs so far, the latest of each case and seed."""
    path = RESULTS / "learning.csv"
    if not path.exists():
        return []
    kinds = {"seed": int, "policy_steps": int, "mean_return": float, "std": float, "seconds": float}
    with path.open() as file:
        lines = list(csv.DictReader(file))
    runs = [Run(**{k: kinds.get(k, str)(v) for k, v in line.items()}) for line in lines]
    return [*{(run.case, run.seed): run for run in runs}.values()]


def write(runs: Sequence[Run]) -> None:
    """Write runs in the order of the cases."""
    order = list(CASES)
    with (RESULTS / "learning.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(field.name for field in fields(Run))
        known = [run for run in runs if run.case in CASES]
        table.writerows(
            astuple(run) for run in sorted(known, key=lambda run: (order.index(run.case), run.seed))
        )


HEADER = [
    "", "policy steps", "return of each seed", "mean ± std", "target reached", "published",
    "seconds", "measured",
]  # fmt: skip


def summary(returns: Sequence[float]) -> str:
    """Mean and spread; of five seeds or more also the mean of the middle half, as rliable's."""
    mean, digits = statistics.fmean(returns), digits_of(returns)
    text = f"{mean:.{digits}f} ± {statistics.pstdev(returns):.{digits}f}"
    middle = sorted(returns)[len(returns) // 4 : len(returns) - len(returns) // 4]
    more = f", middle half {statistics.fmean(middle):.{digits}f}" if len(returns) >= 5 else ""
    return text + more


def digits_of(returns: Sequence[float]) -> int:
    """Digits after the point: two where returns are small."""
    return 1 if max(map(abs, returns)) >= 10 else 2


def row(case: str, runs: Sequence[Run]) -> list[str]:
    """The row of a case in the table."""
    returns, target = [run.mean_return for run in runs], CASES[case][3]
    reached = sum(value >= target for value in returns)
    return [
        case,
        f"{max(run.policy_steps for run in runs):,}",
        ", ".join(f"{value:.{digits_of(returns)}f}" for value in returns),
        summary(returns),
        f"{target:g}: {reached} of {len(returns)}",
        PUBLISHED.get(case, ""),
        f"{min(run.seconds for run in runs):.0f}",
        max(run.measured for run in runs),
    ]


def write_table(runs: Sequence[Run]) -> Path:
    """Write the table and return its path."""
    text = (
        f"{machine(1)}. Return: mean of 100 episodes after the run, in "
        "environments with other seeds, with the actions of the run's own evaluations: "
        "deterministic ones, of DreamerV3 sampled ones. Best kept: of the policy of the best of "
        "these evaluations, which the run has kept. Seconds: the least of the runs, which "
        "shared the machine. Raw results: learning.csv.\n\n"
    )
    by_case = {case: [run for run in runs if run.case == case] for case in CASES}
    table = markdown_table(HEADER, [row(case, found) for case, found in by_case.items() if found])
    curves = {
        case: (runs_of[0].policy_steps, [run.curve for run in runs_of], CASES[case][3])
        for case, found in by_case.items()
        if (runs_of := [run for run in found if run.curve])
    }
    draw(curves, RESULTS / "learning.png")
    return write_results(
        "learning", "Learning", f"{text}{table}\n\n{NOTES}\n\n{SOURCES}\n\n{PICTURE}"
    )


def report(cases: Sequence[str] = (), seeds: Sequence[int] = ()) -> Path:
    """Train cases, record each run, write the table after each, and return its path.

    Args:
        cases: of :data:`CASES`; all by default.
        seeds: as many as the case has by default.
    """
    for case in cases or CASES:
        for seed in seeds or range(CASES[case][2]):
            run = train(case, seed)
            runs = [*{(r.case, r.seed): r for r in [*read(), run]}.values()]
            write(runs)
            path = write_table(runs)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help="all by default")
    parser.add_argument("--seeds", nargs="*", type=int, default=())
    parser.add_argument("--table", action="store_true", help="train nothing")
    given = parser.parse_args()
    path = write_table(read()) if given.table else report(given.cases, given.seeds)
    print(path.read_text())
