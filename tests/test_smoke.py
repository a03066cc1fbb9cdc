"""Smoke tests for a newcomer: `make check`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kit.__main__ import main
from tests.short_runs import policy_steps_in, the_run

pytestmark = pytest.mark.guard

SHORT = {
    "ppo": ["steps.total_policy_steps=4_096"],
    "sac": ["steps.total_policy_steps=1_200", "hidden_sizes=[32,32]"],
    "dqn": ["steps.total_policy_steps=2_000"],
}


def recipe(name: str, folder: Path, *settings: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", f"recipes.{name}", f"log_dir={folder / 'runs'}",
            *settings]  # fmt: skip


@pytest.mark.parametrize("name", SHORT)
def test_recipe_trains_and_counts_exactly(name: str, tmp_path: Path) -> None:
    ran = subprocess.run(recipe(name, tmp_path, *SHORT[name]), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "last evaluation: return" in ran.stdout
    total = int(SHORT[name][0].partition("=")[2].replace("_", ""))
    assert policy_steps_in(the_run(tmp_path))[-1] == total


def test_killed_run_resumes_to_its_end(tmp_path: Path) -> None:
    running = subprocess.Popen(
        recipe("ppo", tmp_path, "steps.total_policy_steps=16_384", "checkpoint_every=1_024"),
        stdout=subprocess.DEVNULL,
    )
    while not list(tmp_path.glob("runs/*/*/*/checkpoints/checkpoint-*")):
        assert running.poll() is None, "the run ended before its first checkpoint"
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
    resume = recipe("ppo", tmp_path, "resume=latest")
    resumed = subprocess.run(resume, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    assert policy_steps_in(the_run(tmp_path))[-1] == 16_384


def test_steps_explain_describes_sb3_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["steps", "explain", "sb3", "train_freq=1", "gradient_steps=1", "n_envs=4"]) == 0
    assert "1/4" in capsys.readouterr().out
