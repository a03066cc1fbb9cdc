"""Runs that are killed, at every operation on their files or at any time, end as others do.

Each test says how many of its kills came before the end of a run; ``make chaos`` prints it.
"""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import pytest

from tests.chaos.killed_runs import RECIPES, Ended, Forks, Kill, small
from tests.test_resume import assert_same, end_state

pytestmark = pytest.mark.nightly

OFTEN = ["checkpoint_every=7", "log_every=5"]
EVALUATES = ["steps.evaluation_every=16", "steps.evaluation_episodes=2"]
WORKERS = ["env.vectorization=async", "env.kwargs.num_workers=2"]
VARIANTS = {
    "ppo": {
        "async collector": ["collector=async"],
        "environments in torch": ["collector=tensor"],
        "worker processes": WORKERS,
        "evaluates": EVALUATES,
        "TensorBoard": ["logger=tensorboard"],
        "W&B, offline": ["logger=wandb"],
        "MuJoCo": ["env.id=HalfCheetah-v5"],
    },
    "sac": {
        "async collector": ["collector=async"],
        "worker processes, evaluates": [*WORKERS, *EVALUATES],
        "full buffer": ["buffer_size=30"],
        "n-step": ["n_step=3", "steps.learning_starts=40"],
    },
}
CONFIGURATIONS = {
    **{recipe: [recipe] for recipe in RECIPES},
    **{f"{r}, {name}": [r, *words] for r, more in VARIANTS.items() for name, words in more.items()},
}
SEVERAL_CHECKPOINTS = [
    "sac", "buffer_size=30", "steps.total_policy_steps=48", "checkpoint_every=16", "log_every=12",
]  # fmt: skip
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
KILLED_TWICE = 4
"""runs of each configuration, each at an operation on a file and at a random time."""


@pytest.fixture(scope="module")
def forks():
    with Forks() as forks:
        yield forks


@pytest.fixture
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("k")  # short: sockets are made below it


def run_of(runs: Path) -> Path | None:
    """The run that goes on: a kill in its first instant leaves a folder without settings."""
    found = [config.parent for config in runs.glob("*/*/*/config.yaml")]
    assert len(found) <= 1
    return found[0] if found else None


def go_on(forks: Forks, arguments: list[str], runs: Path, kill: Kill | None = None) -> Ended:
    """Begin the run or resume it, until it is killed or ends."""
    recipe, *words = arguments
    run = run_of(runs)
    words = [*small(recipe), *OFTEN, *words] if run is None else [f"resume={run}"]
    ended = forks.run(recipe, words, runs, kill)
    number = kill.number if kill else 0
    fine = (0, -number, 128 + number) if kill else (0,)
    assert ended.code in fine, (kill, ended, Path(f"{runs}.log").read_text()[-3_000:])
    assert not ended.left, kill
    return ended


def kills_survived(
    whole: Path, forks: Forks, arguments: list[str], runs: Path, *kills: Kill
) -> int:
    """Kill a run and resume it to its end, which is that of one that was not killed.

    Returns:
        How many of the signals came before the end.
    """
    came = sum(go_on(forks, arguments, runs, kill).code != 0 for kill in kills)
    go_on(forks, arguments, runs)
    run, other = run_of(runs), run_of(whole)
    assert (run / "metrics.csv").read_bytes() == (other / "metrics.csv").read_bytes(), kills
    assert_same(end_state(run), end_state(other), str(kills))
    assert files_of(run) == files_of(other), kills
    not_ours = _OF_WANDB if "logger=wandb" in arguments else _NOT_OURS
    left = [path.name for path in runs.iterdir() if not not_ours.search(path.name)]
    assert left == [arguments[0]], kills
    return came


_NOT_OURS = re.compile("wandb|^pymp-")
"""Empty folders for temporary files, of W&B and of Python's multiprocessing."""
_OF_WANDB = re.compile(rf"{_NOT_OURS.pattern}|^tmp\w{{8}}$")
"""With that in which W&B waits for its service, which has no name of its own."""


def files_of(run: Path) -> list[str]:
    """Names of all files but those of which each process writes some.

    They are those of TensorBoard, of W&B, and the checkpoint before the last, which a signal may
    have asked for.
    """
    checkpoints = sorted((run / "checkpoints").iterdir())
    assert len(checkpoints) <= 2
    others = ("tensorboard/", "wandb/", *(f"checkpoints/{path.name}" for path in checkpoints[:-1]))
    names = (str(path.relative_to(run)) for path in run.rglob("*"))
    return sorted(name for name in names if not name.startswith(others))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_run_result_is_unchanged_by_kills_at_random_times(name: str, forks: Forks, folder: Path):
    arguments, whole = CONFIGURATIONS[name], folder / "whole"
    ended, rng, came = go_on(forks, arguments, whole), random.Random(name), 0
    for number in range(KILLED_TWICE):
        one, other = SIGNALS[number % 4], SIGNALS[(number + 1) % 4]
        at = Kill(one, operation=rng.randrange(1, ended.operations))
        after = Kill(other, seconds=0.9 * rng.random() * ended.seconds)
        kills = (at, after) if number % 2 else (after, at)
        came += kills_survived(whole, forks, arguments, folder / f"killed-{number}", *kills)
    print(f"{came} kills of {name}")
    assert came


@pytest.mark.parametrize("first", range(1, 5))
def test_run_result_is_unchanged_by_kill_at_each_file_operation(
    first: int, forks: Forks, folder: Path
):
    arguments, whole, came = SEVERAL_CHECKPOINTS, folder / "whole", 0
    for operation in range(first, go_on(forks, arguments, whole).operations + 1, 4):
        kill = Kill(signal.SIGKILL, operation=operation)
        runs = folder / f"killed-{operation}"
        came += kills_survived(whole, forks, arguments, runs, kill)
    print(f"{came} kills of sac, each at an operation on a file")
    assert came
