"""A killed run goes on as if it had not been killed: weights, counters, rows, buffer."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torchrl.checkpoint import CheckpointRotation

PPO_CARTPOLE = [
    "ppo", "steps.total_policy_steps=8_192", "steps.steps_per_env=32", "steps.update_epochs=2",
    "steps.evaluation_every=2_048", "steps.evaluation_episodes=3",
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


def start(arguments: list[str], folder: Path, **popen: object) -> subprocess.Popen[bytes]:
    recipe, *settings = arguments
    command = [sys.executable, "-m", f"recipes.{recipe}", *settings, f"runs={folder}"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [*command, "progress=false"], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, **popen,
    )  # fmt: skip


def finish(process: subprocess.Popen[bytes]) -> None:
    output, _ = process.communicate()
    assert process.returncode == 0, output.decode()


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


def kill_and_resume(arguments: list[str], folder: Path, kills: int, seed: int) -> Path:
    """Kill a run at random moments, resume it each time, and let it end."""
    rng = random.Random(seed)
    done = 0
    extra = ["checkpoint_every=64" if arguments[0] == "sac" else "checkpoint_every=256"]
    resume: list[str] = []
    while done < kills:
        process = start([*arguments, *extra] if not resume else [arguments[0], *resume], folder)
        # Wait until the run has begun, then strike somewhere in its middle.
        deadline = time.monotonic() + 120
        while not list(folder.glob("*/*/*/metrics.csv")) and time.monotonic() < deadline:
            time.sleep(0.05)
        rows = sum(1 for _ in (the_run(folder) / "metrics.csv").open())
        target = rows + rng.randint(1, 12)
        while process.poll() is None and time.monotonic() < deadline:
            if sum(1 for _ in (the_run(folder) / "metrics.csv").open()) >= target:
                time.sleep(rng.random() * 0.05)
                break
            time.sleep(0.01)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.communicate()
        done += 1
        resume = [f"resume={the_run(folder)}"]
    if resume:
        finish(start([arguments[0], *resume], folder))
    return the_run(folder)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(PPO_CARTPOLE, id="ppo-cartpole"),
        pytest.param(SAC_PENDULUM, id="sac-pendulum"),
        pytest.param(PPO_TENSOR, id="ppo-tensor", marks=pytest.mark.slow),
        pytest.param(PPO_CHEETAH, id="ppo-halfcheetah", marks=pytest.mark.slow),
        pytest.param(SAC_N_STEP, id="sac-n-step", marks=pytest.mark.slow),
        pytest.param(SAC_CHEETAH, id="sac-halfcheetah", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(arguments: list[str], tmp_path: Path) -> None:
    whole = start(
        [*arguments, "checkpoint_every=64" if arguments[0] == "sac" else "checkpoint_every=256"],
        tmp_path / "whole",
    )
    resumed = kill_and_resume(arguments, tmp_path / "killed", kills=3, seed=len(arguments))
    finish(whole)
    uninterrupted = the_run(tmp_path / "whole")
    assert (resumed / "metrics.csv").read_bytes() == (uninterrupted / "metrics.csv").read_bytes()
    assert_same(end_state(resumed), end_state(uninterrupted))
