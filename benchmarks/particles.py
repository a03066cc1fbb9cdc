"""SVPG's particles, beside as many learners that know nothing of each other, on Pendulum-v1.

    python -m benchmarks.particles [--seeds 0 1 2]

``preset=ppo`` of recipes.svpg with four particles, and four runs of it with one particle, each with
as many environments, policy and gradient steps as a particle has. Returns of 100 episodes of each
after the run, in environments with other seeds; in the picture, of evaluations during the runs.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from benchmarks.measure import RESULTS, machine, markdown_table, write_results

PARTICLES, EPISODES = 4, 100
STEPS, ENVS, MINIBATCH, EVERY = 199_680, 8, 128, 25_600
"""policy steps, environments, minibatch and policy steps between evaluations of a particle."""
INK = {"SVPG": "#1f5f8b", "alone": "#c46a1b"}


@dataclass
class Run:
    """The particles of a run."""

    returns: list[float]
    """of each, after the run"""
    curve: list[tuple[float, float]]
    """policy steps of each particle, and the best one's return"""


def train(particles: int, seed: int) -> Run:
    """Train, then evaluate each particle."""
    from kit.cli.launch import main
    from kit.evaluate import SavedRun
    from kit.runs.saved_runs import find_run
    from recipes import svpg

    scaled = {
        "steps.total_policy_steps": STEPS, "env.num_envs": ENVS,
        "steps.minibatch_size": MINIBATCH, "steps.evaluation_every": EVERY,
        "steps.evaluation_episodes": 8,
    }  # fmt: skip
    settings = [f"{name}={value * particles}" for name, value in scaled.items()]
    with tempfile.TemporaryDirectory() as folder:
        given = ["preset=ppo", f"num_particles={particles}", f"seed={seed}", *settings]
        main(svpg.Config, svpg.build, [*given, f"runs={folder}", "progress=false"])
        path = find_run("latest", Path(folder))
        evaluate = SavedRun(path).evaluator(episodes=EPISODES * particles, seed=10_000 + seed)
        found = evaluate(0)
        with (path / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    names = [f"evaluation/return_particle_{n}" for n in range(particles)]
    best = "evaluation/return_best" if particles > 1 else "evaluation/return"
    returns = [found[name] for name in names] if particles > 1 else [found[best]]
    curve = [(int(r["policy_steps"]) / particles, float(r[best])) for r in rows if r.get(best)]
    return Run(returns, curve)


def draw(together: Sequence[Run], alone: Sequence[Sequence[Run]], path: Path) -> None:
    """Draw the best particle of each run, and the best of those that learnt alone."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for runs in alone:
        at = [steps for steps, _ in runs[0].curve]
        best = [max(run.curve[n][1] for run in runs) for n in range(len(at))]
        axes.plot(at, best, color=INK["alone"], linewidth=1.2, label="best of four alone")
    for run in together:
        axes.plot(*zip(*run.curve), color=INK["SVPG"], linewidth=1.2, label="best of SVPG's four")
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles))
    axes.legend(by_label.values(), by_label.keys(), frameon=False)
    axes.set_xlabel("policy steps of each particle")
    axes.set_ylabel("return of evaluations")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def report(seeds: Sequence[int], together: Sequence[Run], alone: Sequence[Sequence[Run]]) -> Path:
    """Write the table and the picture, and return the table's path."""
    draw(together, alone, RESULTS / "particles.png")
    rows, better = [], 0
    for seed, run, runs in zip(seeds, together, alone):
        single = [one.returns[0] for one in runs]
        better += max(run.returns) >= max(single)
        for name, returns in (("SVPG", run.returns), ("alone", single)):
            each = ", ".join(f"{value:.1f}" for value in returns)
            mean = sum(returns) / len(returns)
            rows.append([f"seed {seed}: {name}", each, f"{mean:.1f}", f"{max(returns):.1f}"])
    table = markdown_table(["", "return of each particle", "mean", "best"], rows)
    text = (
        f"{__doc__}\n{machine(1)}.\n\n{table}\n\n"
        f"SVPG's best is at least the best of those alone: {better} of {len(together)} seeds.\n\n"
        "![best particles](particles.png)"
    )
    return write_results("particles", "Particles", text)


def main(seeds: Sequence[int] = (0, 1, 2)) -> Path:
    """Train, write table and picture after each seed, and return the table's path."""
    together, alone = [], []
    for seed in seeds:
        together.append(train(PARTICLES, seed))
        alone.append([train(1, 100 * (seed + 1) + n) for n in range(PARTICLES)])
        path = report(seeds, together, alone)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="*", type=int, default=(0, 1, 2))
    print(main(parser.parse_args().seeds).read_text())
