"""A killed run goes on as if it had not been killed: weights, counters, rows, buffer."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchrl.checkpoint import CheckpointRotation

from kit.hooks import StopWhen
from recipes.ppo import build
from tests.short_runs import tiny_config

PPO_CARTPOLE = [
    "ppo", "steps.total_policy_steps=4_096", "steps.steps_per_env=32", "steps.update_epochs=2",
    "steps.evaluation_every=1_024", "steps.evaluation_episodes=3",
]  # fmt: skip
PPO_TENSOR = [*PPO_CARTPOLE, "collector=tensor"]
PPO_CHEETAH = [
    "ppo", "env.id=HalfCheetah-v5", "env.num_envs=2", "steps.total_policy_steps=2_048",
    "steps.steps_per_env=64", "steps.minibatch_size=64", "steps.update_epochs=2",
    "steps.evaluation_every=null", "steps.evaluation_episodes=1",
]  # fmt: skip
SAC_PENDULUM = [
    "sac", "hidden_sizes=[32,32]", "buffer_size=500", "steps.total_policy_steps=900",
    "steps.learning_starts=100", "steps.replay_ratio=1/3", "steps.minibatch_size=32",
    "steps.evaluation_every=300", "steps.evaluation_episodes=2",
]  # fmt: skip
SAC_N_STEP = [*SAC_PENDULUM, "n_step=3", "steps.replay_ratio=1/4"]
SAC_CHEETAH = [*SAC_PENDULUM, "env.id=HalfCheetah-v5", "steps.evaluation_every=null"]


# A recipe whose process kills itself at the n-th operation on a file of its checkpoints or rows.
RECIPE = """
import os, runpy, signal, sys

recipe, kill_at, count_in, *settings = sys.argv[1:]
FILES = ("/checkpoints", "metrics.csv", "times.csv")
seen = 0

def look(event, arguments):
    global seen
    if event == "open" or event.startswith(("os.", "shutil.")):
        if any(name in str(argument) for argument in arguments[:2] for name in FILES):
            seen += 1
            if seen == int(kill_at):
                os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(look)
sys.argv = [f"recipes.{recipe}", *settings]
runpy.run_module(f"recipes.{recipe}", run_name="__main__", alter_sys=True)
with open(count_in, "w") as file:
    print(seen, file=file)
"""


def run(arguments: list[str], folder: Path, kill_at: int = 0) -> int:
    """Run a recipe, or begin to: it is killed at an operation on its files, counted from 1.

    Returns:
        How many such operations there were, where the run came to its end.
    """
    recipe, *settings = arguments
    folder.mkdir(exist_ok=True)
    count = folder / "count"
    command = [sys.executable, "-W", "ignore", "-c", RECIPE, recipe, str(kill_at), str(count)]
    command += [*settings, f"log_dir={folder}", "progress=false"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.returncode == (-signal.SIGKILL if kill_at else 0), ran.stdout + ran.stderr
    return 0 if kill_at else int(count.read_text())


def the_run(folder: Path) -> Path:
    (config,) = folder.glob("*/*/*/config.yaml")
    return config.parent


def end_state(run: Path) -> dict[str, torch.Tensor]:
    """Everything in the last checkpoint but times and W&B's run."""
    checkpoint = CheckpointRotation(run / "checkpoints", keep_last=1).latest()
    assert checkpoint is not None
    states = {}
    for path in sorted(checkpoint.glob("components/*/state.pt")):
        name = path.parent.name.split("-", 1)[1]
        states[name] = torch.load(path, weights_only=True)
    del states["journal"]
    return states


def assert_same(a: object, b: object, where: str = "") -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for number, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}/{number}")
    else:
        assert a == b, where


def assert_resumes_exactly(arguments: list[str], folder: Path, kills: int) -> None:
    often = [*arguments, f"checkpoint_every={64 if arguments[0] == 'sac' else 256}"]
    operations = run(often, folder / "whole")
    # Each process takes part of the way, so that the last kill still falls within the run.
    rng, killed = random.Random(len(arguments)), folder / "killed"
    run(often, killed, rng.randrange(1, operations // 4))
    for _ in range(kills - 1):
        run([arguments[0], f"resume={the_run(killed)}"], killed, rng.randrange(1, operations // 4))
    run([arguments[0], f"resume={the_run(killed)}"], killed)
    resumed, whole = the_run(killed), the_run(folder / "whole")
    assert (resumed / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    assert_same(end_state(resumed), end_state(whole))


@pytest.mark.guard
@pytest.mark.parametrize("arguments", [PPO_CARTPOLE, SAC_PENDULUM], ids=["ppo", "sac"])
def test_killed_run_resumes_exactly(arguments: list[str], tmp_path: Path) -> None:
    assert_resumes_exactly(arguments, tmp_path, kills=1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "arguments",
    [PPO_CARTPOLE, SAC_PENDULUM, PPO_TENSOR, PPO_CHEETAH, SAC_N_STEP, SAC_CHEETAH],
    ids=["ppo", "sac", "ppo-tensor", "ppo-halfcheetah", "sac-n-step", "sac-halfcheetah"],
)
def test_run_killed_three_times_resumes_exactly(arguments: list[str], tmp_path: Path) -> None:
    assert_resumes_exactly(arguments, tmp_path, kills=3)


def test_torchrl_collector_warns_that_it_does_not_save_episodes(tmp_path: Path) -> None:
    why = "TorchRL's collectors do not save it. A resumed run ends their open episodes"
    settings = {"collector": "torchrl", "checkpoint_every": 32}
    with pytest.warns(UserWarning, match=why):
        build(tiny_config(tmp_path, **settings), hooks=[StopWhen("policy_steps", reached=32)]).run()
    with pytest.warns(UserWarning, match=why):
        resumed = build(tiny_config(tmp_path, **settings, resume=str(the_run(tmp_path / "runs"))))
    assert resumed.run().policy_steps == 64
