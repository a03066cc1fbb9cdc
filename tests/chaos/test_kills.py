"""Runs that are killed, at every operation on their files or at any time, end as others do."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.chaos.killed_runs import Ended, Forks, Kill
from tests.short_runs import COMMON, SHORT
from tests.test_resume import assert_same, end_state

pytestmark = pytest.mark.slow

OFTEN = ["checkpoint_every=16", "log_every=8"]
PPO = [*SHORT["ppo"], *COMMON, *OFTEN]
SAC = [*SHORT["sac"], *COMMON, "checkpoint_every=7", "log_every=5", "buffer_size=30"]
DQN = [*COMMON, "env.num_envs=1", "steps.total_policy_steps=60", "steps.learning_starts=20",
       "steps.minibatch_size=4", "checkpoint_every=11", "log_every=5"]  # fmt: skip
EVALUATES = ["steps.evaluation_every=16", "steps.evaluation_episodes=2"]
CONFIGURATIONS = {
    "ppo": ["ppo", *PPO, *EVALUATES],
    "ppo, async collector": ["ppo", *PPO, "collector=async"],
    "ppo, worker processes": ["ppo", *PPO, "env.vectorization=async", "env.kwargs.num_workers=2"],
    "ppo, environments in torch": ["ppo", *PPO, "collector=tensor"],
    "ppo, whole episodes": ["ppo", *PPO, "steps.steps_per_env=null", "steps.episodes_per_env=1"],
    "ppo, TensorBoard": ["ppo", *PPO, "logger=tensorboard"],
    "sac": ["sac", *SAC],
    "sac, n-step": ["sac", *SAC, "n_step=3"],
    "dqn": ["dqn", *DQN],
    "td3": ["td3", *SAC],
}
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
KILLS = 16
"""in each configuration, half of them at random times."""


@pytest.fixture(scope="module")
def forks():
    with Forks() as forks:
        yield forks


def run_of(runs: Path) -> Path | None:
    """The run that goes on: a kill in its first instant leaves a folder without settings."""
    found = [config.parent for config in runs.glob("*/*/*/config.yaml")]
    assert len(found) <= 1
    return found[0] if found else None


def go_on(forks: Forks, arguments: list[str], runs: Path, kill: Kill | None = None) -> Ended:
    """Begin the run or resume it, until it is killed or ends."""
    recipe, *words = arguments
    run = run_of(runs)
    words = [*words, "progress=false"] if run is None else [f"resume={run}"]
    ended = forks.run(recipe, words, runs, kill)
    number = kill.number if kill else 0
    fine = (0, -number, 128 + number) if kill else (0,)
    assert ended.code in fine, (kill, ended, Path(f"{runs}.log").read_text()[-3_000:])
    assert not ended.left, kill
    return ended


def assert_ends_as(whole: Path, forks: Forks, arguments: list[str], runs: Path, *kills: Kill):
    for kill in kills:
        go_on(forks, arguments, runs, kill)
    go_on(forks, arguments, runs)
    run, other = run_of(runs), run_of(whole)
    assert (run / "metrics.csv").read_bytes() == (other / "metrics.csv").read_bytes(), kills
    assert_same(end_state(run), end_state(other), str(kills))
    assert files_of(run) == files_of(other), kills


def files_of(run: Path) -> list[str]:
    """Names of all files but TensorBoard's, of which each process writes one."""
    names = (str(path.relative_to(run)) for path in run.rglob("*"))
    return sorted(name for name in names if "tfevents" not in name)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_kills_at_any_moment_change_nothing(name: str, forks: Forks, tmp_path: Path):
    arguments, whole = CONFIGURATIONS[name], tmp_path / "whole"
    ended, rng = go_on(forks, arguments, whole), random.Random(name)
    for number in range(0, KILLS, 2):
        at = Kill(SIGNALS[number // 2 % 4], operation=rng.randrange(1, ended.operations + 1))
        seconds = rng.random() * ended.seconds
        after = Kill(SIGNALS[(number // 2 + 1) % 4], seconds=seconds)
        assert_ends_as(whole, forks, arguments, tmp_path / f"killed-{number}", at, after)


def test_a_kill_at_every_operation_on_a_file_changes_nothing(forks: Forks, tmp_path: Path):
    arguments, whole = CONFIGURATIONS["sac"], tmp_path / "whole"
    for operation in range(1, go_on(forks, arguments, whole).operations + 1):
        kill = Kill(signal.SIGKILL, operation=operation)
        assert_ends_as(whole, forks, arguments, tmp_path / f"killed-{operation}", kill)
