"""Config files of other libraries run with ``steps.file``, and as the printed command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from kit.cli.launch import chosen_settings
from kit.cli.overrides import split
from kit.cli.steps import main
from kit.config import EnvConfig
from kit.config.plain import from_plain
from kit.config.plan import make_plan
from kit.dialects import SB3, from_file
from kit.dialects.carried import apply_to_config
from kit.runs.recipe import Recipe
from recipes import dqn, ppo
from tests.errors import raises_setting

FILE = """\
CartPole-v1:
  n_timesteps: !!float 2e3
  policy: MlpPolicy
  learning_rate: !!float 2.3e-3
  train_freq: 256
  gradient_steps: 128
  gamma: 0.99
  policy_kwargs: {net_arch: [256, 256]}
Acrobot-v0:
  n_timesteps: 120000
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "dqn.yml"
    path.write_text(FILE)
    return path


def config_of(words: list[str], recipe: Any = dqn) -> Any:
    """Return the config that a recipe's command line describes."""
    before = chosen_settings(recipe.Config, Recipe.of(recipe.Config), words)
    overrides = [word for word in words if split(word)[0] not in before.applied]
    before.check(overrides, sweeps=False)
    return from_plain(recipe.Config, before.overridden(overrides))


def test_file_sets_library_fields(file):
    steps = config_of(["steps=sb3", f"steps.file={file}", "env.id=CartPole-v1"]).steps
    assert (steps.algo, steps.env_id, steps.total_timesteps) == ("dqn", "CartPole-v1", 2000)
    assert (steps.learning_rate, steps.train_freq) == (0.0023, 256)
    assert steps.policy_kwargs == {"net_arch": [256, 256]}
    assert steps.library_defaults


def test_arguments_override_file(file):
    words = ["steps=sb3", f"steps.file={file}", "env.id=CartPole-v1", "steps.train_freq=8"]
    assert config_of([*words, "steps.n_timesteps=500"]).steps.total_timesteps == 500
    assert config_of(words).steps.train_freq == 8


def test_section_matches_other_version_of_environment(file):
    steps = config_of(["steps=sb3", f"steps.file={file}", "env.id=Acrobot-v1"]).steps
    assert (steps.env_id, steps.total_timesteps) == ("Acrobot-v1", 120_000)


def test_missing_section_is_error(file):
    with raises_setting("env"):
        config_of(["steps=sb3", f"steps.file={file}", "env.id=Pendulum-v1"])


def test_unknown_setting_in_section_is_error(file):
    file.write_text(FILE.replace("gamma", "gamam"))
    with raises_setting("gamam"):
        config_of(["steps=sb3", f"steps.file={file}", "env.id=CartPole-v1"])


def test_python_reads_same_settings(file):
    from_words = config_of(["steps=sb3", f"steps.file={file}", "env.id=CartPole-v1"]).steps
    assert from_file(SB3, file, env="CartPole-v1") == from_words


def test_printed_command_gives_same_config(file, capsys):
    assert main(["command", "sb3", str(file), "env=CartPole-v1"]) == 0
    python, option, module, *words = shlex.split(capsys.readouterr().out)
    assert (python, option, module) == ("python", "-m", "recipes.dqn")
    config = config_of(["steps=sb3", f"steps.file={file}", "env.id=CartPole-v1"])
    config.env.id = "CartPole-v1"
    assert config_of([*words, "env.id=CartPole-v1"]) == config


def test_command_comments_on_assumed_algorithm(tmp_path, capsys):
    assert main(["command", "tianshou", "num_train_envs=4"]) == 2
    assert "kit: algo='on_policy': There is no recipe" in capsys.readouterr().err
    assert main(["command", "sb3", "n_steps=128"]) == 0
    comment, command = capsys.readouterr().out.splitlines()
    assert comment == "# algo is not set: assuming ppo"
    assert command == "python -m recipes.ppo steps=sb3 steps.n_steps=128"


def test_dialect_replaces_steps_of_preset(capsys):
    words = ["preset=mujoco", "steps=sb3", "steps.n_steps=64", "steps.n_envs=4"]
    config = config_of(words, ppo)
    assert (config.steps.n_steps, config.env.id, config.learning_rate) == (
        64,
        "HalfCheetah-v5",
        3e-4,
    )
    assert make_plan(config, "ppo").frames_per_batch == 256
    message = "kit: preset=mujoco: steps=sb3 replaces steps.total_policy_steps, steps.steps_per_env"
    assert message in capsys.readouterr().err


def test_dialect_conflicting_with_preset_is_error():
    config = config_of(["preset=mujoco", "steps=sb3", "steps.learning_rate=1e-3"], ppo)
    with raises_setting("learning_rate"):
        apply_to_config(config.steps, config, "ppo", "on_policy")


def test_sb3_evaluations_within_rollout_are_counted():
    often = SB3(algo="ppo", n_steps=6, batch_size=6, total_timesteps=42, eval_freq=4)
    config = ppo.Config(steps=often, env=EnvConfig("Pendulum-v1"), log_dir=None, progress=False)
    trainer = ppo.build(config)
    trainer.run()
    assert trainer.plan.evaluations_after(7) == trainer.ledger.evaluations == 42 // 4
