"""The gallery of the documentation: ``make gallery`` trains its runs and draws its pictures.

Writes ``docs/gallery.md``, ``docs/images/curves.png`` and ``docs/images/policy.gif``, a picture for
each run in ``docs/images/gallery``, and the outputs of the notebooks. Runs one case after another,
each seed in a process with one PyTorch thread. Without a screen, MuJoCo draws if ``MUJOCO_GL`` is
``egl`` or ``osmesa``.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray
from PIL import Image

from kit import SavedRun
from kit.logging import read_rows

DOCS = Path(__file__).parents[1] / "docs"
IMAGES = DOCS / "images"
INK = "#1f5f8b"
EPISODES = 100
"""Episodes of the evaluation after a run."""


@dataclass
class Case:
    """One run of the gallery.

    Attributes:
        title: heading on the page.
        recipe: name of the recipe.
        settings: settings of the run, as typed.
        seeds: number of seeds; the first one is shown.
        frame: policy step of the episode that is shown.
        render: arguments of the environment that draws.
        curves: curve of each seed, policy steps and mean returns of evaluations.
        seconds: CPU seconds of the first seed, with starting Python.
        returns: returns of the evaluation after the run: mean and standard deviation.
    """

    title: str
    recipe: str
    settings: str
    seeds: int = 1
    frame: int = 60
    render: dict[str, str] = field(default_factory=dict)
    curves: list[NDArray[np.float64]] = field(default_factory=list)
    seconds: float = 0.0
    returns: tuple[float, float] = (0.0, 0.0)

    @property
    def picture(self) -> Path:
        """File of the picture of this run."""
        name = self.title.lower().replace(", ", "-").replace(" ", "-")
        return IMAGES / "gallery" / f"{name}.png"


CASES = [
    Case(
        "PPO, HalfCheetah-v5",
        "ppo",
        "preset=mujoco squash_actions=true steps.total_policy_steps=301_056"
        " steps.evaluation_every=14_336",
        seeds=3,
        render={"camera_name": "track"},
    ),
    Case("SAC, Pendulum-v1", "sac", "steps.evaluation_every=1_000", seeds=3, frame=190),
    Case("PPO, CartPole-v1", "ppo", "steps.evaluation_every=4_096", seeds=3),
    Case("DQN, CartPole-v1", "dqn", "steps.evaluation_every=2_500", seeds=3),
    Case(
        "PPO, Acrobot-v1",
        "ppo",
        "preset=classic steps.total_policy_steps=303_104 steps.evaluation_every=16_384",
        frame=45,
    ),
    Case(
        "PPO, MountainCar-v0",
        "ppo",
        "preset=classic env.id=MountainCar-v0 steps.total_policy_steps=602_112"
        " steps.evaluation_every=28_672",
        frame=85,
    ),
]


def train(case: Case, seed: int, folder: Path) -> Path:
    """Train a case in a new process; return its run folder."""
    settings = [*case.settings.split(), f"seed={seed}", "progress=false"]
    command = [sys.executable, "-m", f"recipes.{case.recipe}", *settings]
    before = os.times()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    if seed == 0:
        used = after.children_user + after.children_system
        case.seconds = used - before.children_user - before.children_system
    (run,) = folder.glob(f"runs/{case.recipe}/*/*-s{seed}")
    return run


def play(run: SavedRun, steps: int, render: dict[str, str]) -> list[NDArray[np.uint8]]:
    """Return the frames of one episode of the policy, ``steps`` at most."""
    policy, frames = run.policy(), []
    env = policy.make_env(render_mode="rgb_array", **render)
    observation, _ = env.reset(seed=1)
    policy.reset()
    for _ in range(steps):
        frames.append(env.render())
        observation, _, terminated, truncated, _ = env.step(policy(observation))
        if terminated or truncated:
            break
    env.close()
    return frames


# ---------------------------------------------------------------------- pictures
def draw_curves(axes: Axes, case: Case) -> None:
    """Draw the evaluations of a case: the mean of its seeds between the lowest and the highest."""
    steps, returns = case.curves[0][0], np.stack([curve[1] for curve in case.curves])
    if len(returns) > 1:
        low, high = returns.min(0), returns.max(0)
        axes.fill_between(steps, low, high, color=INK, alpha=0.2, linewidth=0)
    axes.plot(steps, returns.mean(0), color=INK, linewidth=1.6)
    axes.set_xlim(0, steps[-1])
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_xlabel("policy steps")


def draw_case(case: Case, frame: NDArray[np.uint8]) -> None:
    """Draw the learning curve of a case and a frame of its policy side by side."""
    figure = Figure(figsize=(7.2, 2.7), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    draw_curves(left, case)
    left.set_ylabel("evaluation return")
    right.imshow(frame)
    right.set_axis_off()
    save(figure, case.picture)


def draw_overview(cases: list[Case]) -> None:
    """Draw the learning curves of the cases with several seeds in one row."""
    figure = Figure(figsize=(11, 2.6), layout="constrained")
    row = figure.subplots(1, len(cases))
    for axes, case in zip(row, cases):
        draw_curves(axes, case)
        axes.set_title(case.title, fontsize=10)
    row[0].set_ylabel("evaluation return")
    save(figure, IMAGES / "curves.png")


def save(figure: Figure, path: Path) -> None:
    """Save a figure as a PNG file with 256 colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)


def save_gif(frames: list[NDArray[np.uint8]], path: Path) -> None:
    """Save frames as a GIF that repeats, at the speed of the simulation of HalfCheetah."""
    images = [Image.fromarray(frame).resize((240, 240)).quantize(64) for frame in frames]
    images[0].save(path, save_all=True, append_images=images[1:], duration=50, loop=0)


# ---------------------------------------------------------------------- page
PAGE = """\
# Gallery

`make gallery` trains these runs, draws the pictures and writes this page. Each section shows a
learning curve, a frame from the trained policy and the command that trains it. Curves show
evaluations with deterministic actions. With three seeds, the line is the mean over the seeds and
the band spans the lowest and the highest seed. The return is the mean and standard deviation of
{episodes} episodes after the run. Times are CPU time with one PyTorch thread, including the start
of Python and the evaluations.

Hardware: {machine}.
"""

SECTION = """
## {case.title}

![Learning curve and trained policy: {case.title}](images/gallery/{case.picture.name})

```
{command}
```

Return {mean} ± {std} after {steps:,} policy steps and {case.seconds:.0f} seconds.
"""


def section(case: Case) -> str:
    """Return the section of a case."""
    command = f"kit train {case.recipe} {case.settings} seed=0"
    mean, std = (
        f"{value:,.1f}" if abs(value) < 1_000 else f"{value:,.0f}" for value in case.returns
    )
    steps = int(case.curves[0][0][-1])
    return SECTION.format(case=case, command=command, mean=mean, std=std, steps=steps)


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def execute_notebooks() -> None:
    """Run the notebooks and store their outputs."""
    for path in sorted((DOCS / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(notebook, record_timing=False).execute()
        nbformat.write(notebook, path)


def main() -> None:
    """Train all cases and write the page with its pictures."""
    for case in CASES:
        with tempfile.TemporaryDirectory() as temporary:
            folders = [train(case, seed, Path(temporary)) for seed in range(case.seeds)]
            for folder in folders:
                rows = [row for row in read_rows(folder) if "evaluation/return" in row]
                points = [(row["policy_steps"], row["evaluation/return"]) for row in rows]
                case.curves.append(np.array(points, dtype=float).T)
            run = SavedRun(folders[0])
            evaluator = run.evaluator(EPISODES, seed=12345)
            metrics: dict[str, Any] = evaluator(0)
            evaluator.close()
            case.returns = metrics["evaluation/return"], metrics["evaluation/return_std"]
            frames = play(run, 200, case.render)
            run.close()
        draw_case(case, frames[min(case.frame, len(frames) - 1)])
        if case is CASES[0]:
            save_gif(frames[40:120], IMAGES / "policy.gif")
        print(section(case), flush=True)
    draw_overview([case for case in CASES if case.seeds > 1])
    machine = f"{processor()}, PyTorch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    page = PAGE.format(episodes=EPISODES, machine=machine)
    (DOCS / "gallery.md").write_text(page + "".join(map(section, CASES)))
    execute_notebooks()


if __name__ == "__main__":
    main()
