"""Runs of a recipe that take less than a second, and what they leave behind."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from kit.experiment import EnvConfig
from kit.steps.settings import OnPolicySteps
from recipes.ppo import Config

SHORT = {
    "ppo": ["env.id=CartPole-v1", "env.num_envs=2", "steps.total_policy_steps=64",
            "steps.steps_per_env=8", "steps.minibatch_size=8", "steps.update_epochs=1"],
    "sac": ["env.id=Pendulum-v1", "steps.total_policy_steps=40", "steps.learning_starts=20",
            "steps.minibatch_size=4"],
}  # fmt: skip
COMMON = ["steps.evaluation_every=null", "steps.evaluation_episodes=1", "hidden_sizes=[8]",
          "progress=false"]  # fmt: skip


def one_line(text: str) -> str:
    """The message, after checking that it is one line and no stack trace."""
    assert text.startswith("\nerror: "), text
    assert text.count("\n") == 2, text
    assert "Traceback" not in text
    return text.removeprefix("\nerror: ").strip()


def the_run(folder: Path) -> Path:
    (config,) = folder.glob("runs/*/*/*/config.yaml")
    return config.parent


def rows_in(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def policy_steps_in(run: Path) -> list[int]:
    return [int(row["policy_steps"]) for row in rows_in(run)]


def tiny_config(tmp_path: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "env": EnvConfig(num_envs=2),
        "steps": OnPolicySteps(
            total_policy_steps=64, steps_per_env=8, update_epochs=1, minibatch_size=8,
            evaluation_every=None, evaluation_episodes=1,
        ),
        "hidden_sizes": [8], "log_dir": str(tmp_path / "runs"), "progress": False,
        "checkpoint_every": 16, "log_every": 16,
    }  # fmt: skip
    return Config(**{**settings, **changes})
