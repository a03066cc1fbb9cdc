"""Whole runs, from the command to the end of the process, beside the same runs of other libraries.

    python -m benchmarks.end_to_end [case ...] [--rounds 3] [--peers PYTHON] [--sheeprl PYTHON]

Equal tasks, networks, counts of policy and gradient steps; everything that is on by default is on
(the kit: run folder, CSV, progress, checkpoint, curve), but observations and rewards are normalised
nowhere, and each policy is evaluated for 10 episodes at the end (sheeprl's for one). Start and
imports count. In the first round every library runs once; further rounds are interleaved runs of
the kit and the fastest peer. ``--peers`` is a Python that has Stable-Baselines3, sb3-contrib and
tianshou (by default this one), ``--sheeprl`` one with sheeprl, which runs its own benchmark
settings of PPO and A2C, and ``dreamer_v3_5`` in the kit's size ``tiny`` (both imagine from all
records). One PyTorch thread where none are named.

The table is of an AMD EPYC (Zen 5), whose large products are oneDNN's; but DQN, Pong and two
threads are of a Zen 4, a slower one, Pong with rewards that the kit normalised. Cases were measured
in different hours; factors are over the kit's runs of the same hour. In those of CartPole each side
has a Python of its own: where pandas and h5py are installed, as beside Stable-Baselines3,
tensordict imports them in 0.2 seconds. Some days before, when the kit alone normalised observations
and rewards, on an Intel, whose large products are MKL's, the factors were: PPO 3.83, A2C 2.84, PPO
with 8 environments 2.53, HalfCheetah 3.29, recurrent PPO 7.15, DQN 2.07, SAC 2.59, TD3 1.47; on a
Zen 4 DQN 2.19, TD3 1.29, PPO with 8 environments 2.31. The kit's runs of all these but DQN's in the
table compiled its files at every start, 0.2 to 0.3 seconds; since then bytecode is kept, as that of
the others is. DQN on the Zen 5, with the compiling: 7.0 seconds (6.9 to 7.2, three runs),
Stable-Baselines3 16.2 (16.0 to 16.6): 2.33. DQN without it, on Zen 4 in other hours: 14.4 seconds
(12.4 to 16.5, five runs), Stable-Baselines3 36.6 (35.5 to 37.3): 2.54; and 12.0 and 30.7 (three
runs): 2.63. TD3 without it on Zen 4, where products alone are two thirds to five sixths of a
gradient step: 48.0 to 59.3 seconds, Stable-Baselines3 66.3 to 76.3, 1.20 to 1.50 (five runs); with
two threads (what the others take by themselves on two cores) it is in the table, of a Zen 4, too.
"""

from __future__ import annotations

import argparse
import compileall
import csv
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import (
    RESULTS,
    TREE,
    environment,
    machine,
    markdown_table,
    median,
    ratio,
    write_results,
)

_COMMON = ["progress=true", "steps.evaluation_every=null", "steps.evaluation_episodes=10"]
_AS_THEY_ARE = ["env.normalize_observation=false", "env.normalize_reward=false"]
_PPO = ["learning_rate=3e-4", "lr_schedule=constant", *_AS_THEY_ARE]
_PONG = ["env.id=ale_py:PongNoFrameskip-v4", "env.kwargs.max_num_frames_per_episode=4000"]
_WORLD = "algo.world_model"
_DREAMER = (
    "dreamer_v3_5", "env=gym", "env.id=CartPole-v1", "env.num_envs=1", "env.capture_video=false",
    "algo.total_steps=2048", "algo.learning_starts=1024", "algo.replay_ratio=0.25",
    "algo.mlp_keys.encoder=[vector]", "algo.cnn_keys.encoder=[]", "algo.dense_units=64",
    "buffer.size=100_000", f"{_WORLD}.stochastic_size=8", f"{_WORLD}.discrete_size=8",
    f"{_WORLD}.recurrent_model.recurrent_state_size=128",
    f"{_WORLD}.recurrent_model.hidden_size=64", f"{_WORLD}.recurrent_model.blocks=8",
    f"{_WORLD}.observation_model.block_space=8",
)  # fmt: skip
_SIZES = ["hidden_sizes=[256,256]", "steps.minibatch_size=256", "steps.learning_starts=1000"]
_TD3 = ("td3", "env.id=HalfCheetah-v5", "learning_rate=1e-3", "buffer_size=65_536", *_SIZES)


@dataclass(frozen=True)
class Case:
    """One run, as the kit's command and as those of others have it.

    Attributes:
        command: recipe and settings.
        policy_steps: of the run.
        asked: how many times faster than the fastest peer the kit is to be; 0: nothing is.
        sheeprl: the experiment of sheeprl with the same settings, and what it is told.
        threads: of PyTorch, in every library.
    """

    command: tuple[str, ...]
    policy_steps: int
    asked: float = 0.0
    sheeprl: tuple[str, ...] = ()
    threads: int = 1


CASES = {
    "PPO, CartPole": Case(
        ("ppo", "env.num_envs=1", "steps.steps_per_env=128", "steps.update_epochs=10",
         "steps.minibatch_size=64", *_PPO), 65_536, 3.0, ("ppo_benchmarks",),
    ),
    "A2C, CartPole": Case(
        ("a2c", "env.num_envs=1", "steps.steps_per_env=5", "learning_rate=7e-4",
         "gamma=0.99", "normalize_advantage=false", "entropy_coeff=0", "steps.rounding=up",
         *_AS_THEY_ARE), 65_536, 3.0, ("a2c_benchmarks",),
    ),
    "PPO, 8 x CartPole": Case(
        ("ppo", "env.num_envs=8", "steps.steps_per_env=128", "steps.update_epochs=4",
         "steps.minibatch_size=256", *_PPO), 262_144, 3.0,
    ),
    "PPO, HalfCheetah": Case(
        ("ppo", "env.id=HalfCheetah-v5", "env.num_envs=1", "steps.steps_per_env=2048",
         "steps.update_epochs=10", "steps.minibatch_size=64", *_PPO), 40_960, 3.0,
    ),
    "Recurrent PPO, 8 x CartPole": Case(
        ("ppo_recurrent", "env.num_envs=8", "steps.steps_per_env=128", "steps.update_epochs=4",
         "steps.minibatch_size=16", *_PPO), 65_536, 4.0,
    ),
    "DQN, CartPole": Case(
        ("dqn", "steps.steps_per_env=4", "steps.learning_starts=1000", "steps.replay_ratio=1/4",
         "steps.minibatch_size=64", "n_step=1", "double_dqn=false", "target_update_every=125",
         "learning_rate=1e-4", "lr_schedule=constant", "buffer_size=50_000",
         "hidden_sizes=[64,64]"), 50_000, 2.5,
    ),
    "SAC, 4 x LunarLanderContinuous": Case(
        ("sac", "env.id=LunarLanderContinuous-v3", "env.num_envs=4", "steps.replay_ratio=1/4",
         "learning_rate=3e-4", "buffer_size=65_536", *_SIZES), 24_000, 1.5,
    ),
    "TD3, HalfCheetah": Case(_TD3, 6_000, 1.5),
    "TD3, HalfCheetah, 2 threads": Case(_TD3, 6_000, 1.5, threads=2),
    "PPO, 8 x Pong": Case(
        ("ppo_pixels", "env.num_envs=8", *_AS_THEY_ARE, *_PONG), 8_192,
    ),
    "DreamerV3, CartPole": Case(
        ("dreamerv3", "size=tiny", "imagination_starts=null", "steps.learning_starts=1024",
         "steps.replay_ratio=1/4"), 2_048, 2.5, _DREAMER,
    ),
}  # fmt: skip


@dataclass
class Run:
    """A process that has ended."""

    seconds: float
    gradient_steps: int


def run(case: str, library: str, python: str) -> Run:
    """Run a case once in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        ran = subprocess.run(
            _command(case, library, python), cwd=folder,
            env=environment(CASES[case].threads),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        if ran.returncode:
            raise RuntimeError(f"{library}, {case}:\n{ran.stdout}\n{ran.stderr}")
        return Run(seconds, _gradient_steps(library, Path(folder), ran.stdout))


def _command(case: str, library: str, python: str) -> list[str]:
    settings = CASES[case]
    if library == "kit":
        recipe, *given = settings.command
        own = [f"steps.total_policy_steps={settings.policy_steps}", f"threads={settings.threads}"]
        return [python, "-m", f"recipes.{recipe}", *given, *own, *_COMMON]
    if library == "sheeprl":
        experiment, *given = settings.sheeprl
        return [python, "-c", "from sheeprl.cli import run; run()", f"exp={experiment}", *given,
                f"num_threads={settings.threads}", "algo.run_test=True"]  # fmt: skip
    return [python, "-m", "benchmarks.peers", library, case]


def _gradient_steps(library: str, folder: Path, printed: str) -> int:
    """Steps of the optimiser; sheeprl does not tell."""
    if library == "sheeprl":
        return 0
    if library != "kit":
        return int(printed.split()[-1])
    with next(folder.rglob("metrics.csv")).open() as file:
        return int(list(csv.DictReader(file))[-1]["gradient_steps"])


def measure(case: str, pythons: dict[str, str], rounds: int) -> list[list[str]]:
    """Rows of a case: the kit, then the others, the fastest first."""
    from benchmarks.peers import RUNS

    libraries = [name for name, cases in RUNS.items() if case in cases and name in pythons]
    if CASES[case].sheeprl and "sheeprl" in pythons:
        libraries.append("sheeprl")
    runs = {name: [run(case, name, pythons[name])] for name in ("kit", *libraries)}
    fastest = min(libraries, key=lambda name: runs[name][0].seconds)
    for _ in range(rounds - 1):
        for name in ("kit", fastest):
            runs[name].append(run(case, name, pythons[name]))
    kit = [one.seconds for one in runs["kit"]]
    rows = []
    for name, found in sorted(runs.items(), key=lambda item: item[1][0].seconds):
        seconds = [one.seconds for one in found]
        steps = f"{found[0].gradient_steps:,}" if found[0].gradient_steps else "not told"
        faster = "" if name == "kit" else f"{ratio(seconds, kit[: len(seconds)]):.2f}"
        asked = f"{CASES[case].asked:g}" if name == fastest and CASES[case].asked else ""
        rows.append([f"{case}: {name}", f"{median(seconds):.1f}",
                     f"{min(seconds):.1f} to {max(seconds):.1f}", str(len(seconds)),
                     f"{CASES[case].policy_steps:,}", steps, faster, asked])  # fmt: skip
    return rows


HEADER = [
    "", "seconds", "range", "runs", "policy steps", "gradient steps", "kit is faster", "asked",
]  # fmt: skip


def main(cases: Sequence[str] = (), rounds: int = 3, **pythons: str) -> Path:
    """Measure the cases, write the table after each and return its path."""
    for folder in ("kit", "recipes"):  # as pip does
        compileall.compile_dir(TREE / folder, quiet=1)
    given = dict.fromkeys(("kit", "stable_baselines3", "tianshou"), sys.executable) | pythons
    path = RESULTS / "end_to_end.md"
    for case in cases or CASES:
        rows = measure(case, given, rounds)
        path = _write({**_known(), case: rows})
        print("\n".join(" | ".join(row) for row in rows), flush=True)
    return path


def _known() -> dict[str, list[list[str]]]:
    """Rows of the table so far, by case."""
    path, found = RESULTS / "end_to_end.md", {}
    for line in path.read_text().splitlines() if path.exists() else []:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        case = cells[0].rpartition(":")[0]
        if case in CASES:
            found.setdefault(case, []).append(cells)
    return found


def _write(rows: dict[str, list[list[str]]]) -> Path:
    in_order = [row for case in CASES for row in rows.get(case, [])]
    text = f"{__doc__}\n{machine(1)}; medians of the runs.\n\n"
    return write_results(
        "end_to_end", "End to end, beside others", text + markdown_table(HEADER, in_order)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {'; '.join(CASES)}; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=sys.executable)
    parser.add_argument("--sheeprl")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no case is called {min(unknown)!r}; there are {'; '.join(CASES)}")
    others = dict.fromkeys(("stable_baselines3", "tianshou"), given.peers)
    if given.sheeprl:
        others["sheeprl"] = given.sheeprl
    print(main(given.cases, given.rounds, **others).read_text())
