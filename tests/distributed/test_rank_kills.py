"""Runs on two ranks that are killed at any time end as the undisturbed run does."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.distributed.torchrun import Torchrun
from tests.test_resume import assert_same, end_state

PPO = [
    "-m", "recipes.ppo", "env.id=CartPole-v1", "env.num_envs=4", "steps.total_policy_steps=16384",
    "env.normalize_observation=true", "steps.evaluation_every=4096", "steps.evaluation_episodes=2",
    "checkpoint_every=1024",
]  # fmt: skip
SAC = [
    "-m", "recipes.sac", "env.id=Pendulum-v1", "steps.total_policy_steps=1200",
    "steps.learning_starts=100", "steps.evaluation_every=400", "steps.evaluation_episodes=1",
    "hidden_sizes=[32]", "checkpoint_every=100",
]  # fmt: skip
COMMANDS = {"ppo": PPO, "sac": SAC}
VICTIMS = ("rank 0", "rank 1", "torchrun", "everything")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of the undisturbed run of a recipe."""
    runs: dict[str, Path] = {}

    def of(recipe: str) -> Path:
        if recipe not in runs:
            folder = tmp_path_factory.mktemp(recipe)
            run = Torchrun([*COMMANDS[recipe], f"log_dir={folder}"], folder / "log")
            assert run.ended() == 0, run.text()[-3_000:]
            (runs[recipe],) = folder.glob("*/*/2*")
        return runs[recipe]

    return of


def hit(run: Torchrun, victim: str, number: int) -> None:
    if victim == "everything" and number == signal.SIGKILL:
        run.kill_all()
        return
    ranks = run.pids()
    targets = {"rank 0": ranks[:1], "rank 1": ranks[1:], "torchrun": [run.process.pid]}
    for pid in targets.get(victim, [run.process.pid, *ranks]):
        os.kill(pid, number)


def resumed_to_its_end(words: list[str], folder: Path) -> Path:
    last = Torchrun([*words[:2], f"log_dir={folder}", "resume=latest"], folder / "log")
    assert last.ended() == 0, last.text()[-3_000:]
    (path,) = folder.glob("*/*/2*")
    return path


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(30))
def test_killed_run_ends_as_undisturbed_run(number, whole, tmp_path):
    rng = random.Random(number)
    recipe, restarts = ("ppo", "sac")[number % 2], number % 3 == 0
    victim = rng.choice(VICTIMS[:2] if restarts else VICTIMS)
    sent = rng.choice([signal.SIGKILL, signal.SIGTERM])
    words, options = COMMANDS[recipe], ("--max-restarts=3",) if restarts else ()
    run = Torchrun([*words, f"log_dir={tmp_path}"], tmp_path / "log", options=options)
    run.wait_for("*/*/*/config.yaml", tmp_path)
    time.sleep(rng.uniform(0.0, 5.0))
    if run.process.poll() is None and len(run.pids()) == 2:
        hit(run, victim, sent)
    code = run.ended()
    if restarts:
        assert code == 0, (victim, sent, run.text()[-3_000:])
        (path,) = tmp_path.glob("*/*/2*")
    else:
        path = resumed_to_its_end(words, tmp_path)
    metrics = [folder / "metrics.csv" for folder in (path, whole(recipe))]
    assert metrics[0].read_bytes() == metrics[1].read_bytes(), (victim, sent)
    assert_same(end_state(path), end_state(whole(recipe)), str((victim, sent)))
