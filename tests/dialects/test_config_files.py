"""Settings are read from the command line and from the files of other libraries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kit.cli.steps import main
from kit.dialects import SB3, Dreamer, Pyrado, PyradoGAE, Sheeprl, Tianshou
from kit.dialects.carried import map_fields
from kit.dialects.files import left_unread, make, settings_of, value_of
from recipes import ppo
from tests.errors import raises_setting

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("-1", -1),
        ("1e6", 1e6),
        ("1_000", 1000),
        ("0.5", 0.5),
        ("1/4", 0.25),
        ("true", True),
        ("None", None),
        ("null", None),
        ("(2,episode)", (2, "episode")),
        ("[1, step]", (1, "step")),
        ("'4'", "4"),
        ("sac", "sac"),
        ("", ""),
        ("1/0", "1/0"),
    ],
)
def test_value_of_parses_text(text, value):
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


@pytest.mark.parametrize("text", ["1e6", "1E6", "1e+6", "10.e5", "1.0e6", "+1.0e+6", ".1e7"])
def test_config_file_parses_number_with_exponent(text, tmp_path):
    file = tmp_path / "sb3_ppo.yaml"
    file.write_text(f"total_timesteps: {text}\n")
    assert make(SB3, {}, str(file)).to_plan().asked["total_policy_steps"] == 1_000_000


def test_settings_of_parses_name_value_pairs():
    assert settings_of(["a=1", "+b=x=y"]) == {"a": 1, "b": "x=y"}
    with raises_setting("setting"):
        settings_of(["a"])


def test_make_accepts_nested_library_names():
    settings = {"algo.name": "sac", "algo.replay_ratio": 0.5, "env.num_envs": 2}
    settings |= {"fabric.devices": 3, "buffer.size": 100}
    made = make(Sheeprl, settings)
    assert (made.algo, made.replay_ratio, made.num_envs) == ("sac", 0.5, 2)
    assert (made.world_size, made.buffer_size) == (3, 100)
    assert make(Dreamer, {"run.train_ratio": 64}).train_ratio == 64
    assert make(Pyrado, {"critic.num_epoch": 3}).critic.num_epoch == 3


def test_make_rejects_unknown_name():
    with raises_setting("algo.replay_rato"):
        make(Sheeprl, {"algo.replay_rato": 1})


def test_sheeprl_file_resolves_sections_and_interpolations():
    made = make(Sheeprl, {}, str(CONFIGS / "sheeprl_dreamer.yaml"))
    assert made.algo == "dreamer_v3"
    assert (made.replay_ratio, made.total_steps, made.action_repeat) == (0.3, 5000, 4)
    assert (made.world_size, made.buffer_size, made.buffer_checkpoint) == (2, 5000, False)
    assert made.to_plan().iterations == 2500


def test_command_line_overrides_file():
    made = make(Sheeprl, {"algo.total_steps": 100}, str(CONFIGS / "sheeprl_dreamer.yaml"))
    assert made.total_steps == 100
    assert made.replay_ratio == 0.3


def test_zoo_file_selects_group_by_env():
    path = str(CONFIGS / "sb3_zoo_ppo.yml")
    made = make(SB3, {"env": "CartPole-v1"}, path)
    assert made.algo == "ppo"
    assert made.to_plan().frames_per_batch == 256
    assert make(SB3, {"env": "Pendulum-v1", "n_epochs": 2}, path).n_steps == 1024
    with raises_setting("env"):
        make(SB3, {}, path)
    with raises_setting("env"):
        make(SB3, {"env": "CartPole-v2"}, path)


def test_file_may_nest_all_settings_in_one_section():
    made = make(Tianshou, {"algo": "sac"}, str(CONFIGS / "tianshou_sac.yaml"))
    assert made.to_plan().iterations == 18


@pytest.mark.parametrize("content", [None, "a: [", "- 1", "other: 3", "\x00\x01"])
def test_make_rejects_file_without_settings(tmp_path, content):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    with raises_setting("file"):
        make(Sheeprl, {}, str(path))


def test_command_reports_unread_file_entries(tmp_path, capsys):
    file = tmp_path / "ppo.yml"
    file.write_text("CartPole-v1:\n  n_timestps: 1e4\n  save_freq: 9\n  n_steps: 32\n")
    assert main(["explain", "sb3", str(file)]) == 0
    assert "Not read from " in (told := capsys.readouterr().out.replace("\n  ", " "))
    assert "n_timestps=10000.0, save_freq=9." in told
    assert main(["translate", "sb3", str(file), "--to", "cleanrl"]) == 0
    assert "- save_freq=9" in capsys.readouterr().out


def test_left_unread_lists_only_near_misses_in_large_file(tmp_path):
    file = tmp_path / "config.yaml"
    others = "".join(f"other_{number}: 1\n" for number in range(20))
    file.write_text(f"{others}n_step: 3\ngama: 0.9\nn_steps: 8\n")
    assert left_unread(SB3, file) == {"n_step": 3, "gama": 0.9}


def test_config_file_loads_nested_groups(tmp_path):
    file = tmp_path / "pyrado.yaml"
    others = "".join(f"other_{number}: 1\n" for number in range(20))
    file.write_text(f"{others}algo: ppo\nmin_steps: 100\ncritic:\n  gamma: 0.9\n  num_epoch: 3\n")
    made = make(Pyrado, {}, str(file))
    assert (made.min_steps, made.critic.gamma, made.critic.num_epoch) == (100, 0.9, 3)


def config_file(tmp_path, text, name="config.yaml"):
    file = tmp_path / name
    file.write_text(text)
    return str(file)


# ---------------------------------------------------------------------- values
@pytest.mark.parametrize(
    ("library", "words", "message"),
    [
        ("pyrado", "algo=ppo min_steps=5 critic.gamma=x", r"critic\.gamma='x' is not a number"),
        (
            "pyrado",
            "algo=ppo min_steps=5 critic.num_epoch=x",
            r"critic\.num_epoch='x' is not a who",
        ),
        ("pyrado", "algo=ppo min_steps=5 critic.standardizer=x", "Try: RunningStandardizer"),
        (
            "pyrado",
            "algo=sac min_steps=5 critic.lr=none",
            r"critic\.lr=None is not a number",
        ),
        ("nip", "body_lr_factor.actor=x", r"body_lr_factor\.actor='x' is not a number"),
        (
            "nip",
            "loss_critic_type=l3",
            "loss_critic_type='l3' .* Try: l1, l2 or smooth_l1",
        ),
        ("nip", "clip_value=x", "clip_value='x' is not a number"),
        ("sheeprl", "algo=sac gamma=x", "gamma='x' is not a number"),
        ("cleanrl", "clip_vloss=0.2", "clip_vloss=0.2 is neither true nor false"),
        ("sb3", "algo=sac ent_coef=x", "ent_coef='x' is not a number"),
        ("sb3", "algo=sac ent_coef=auto_x", "ent_coef='auto_x'.* neither a number .* auto_0.1"),
        ("sb3", "algo=ppo ent_coef=auto", "ent_coef='auto' is not a number"),
        ("sb3", "algo=ppo learning_rate=x", "learning_rate='x'.* neither a number nor"),
        ("sb3", "algo=ppo clip_range=lin_x", "clip_range='lin_x'.* neither a number nor"),
        ("sb3", "algo=sac target_entropy=x", "target_entropy='x' is not a number"),
        ("sb3", "algo=ppo policy=MlpPolcy", "policy='MlpPolcy' .* Try: MlpPolicy"),
    ],
)
def test_command_rejects_values_invalid_in_library(library, words, message, capsys):
    needed = ["steps_per_env_per_iteration=10"] if library == "nip" else []
    assert main(["explain", library, *needed, *words.split()]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_settings_of_parses_mapping_in_braces():
    assert settings_of(["policy_kwargs={net_arch: [8, 8]}"]) == {
        "policy_kwargs": {"net_arch": [8, 8]}
    }
    assert value_of("{a: [}") == "{a: [}"
    assert main(["explain", "sb3", "policy_kwargs={net_arch: [8, 8]}"]) == 0


def test_zoo_file_has_policy_kwargs_as_string(tmp_path):
    text = "n_timesteps: 10_000\npolicy_kwargs: 'dict(net_arch=[64, 64])'\n"
    made = make(SB3, {"algo": "ppo"}, config_file(tmp_path, text, "ppo.yml"))
    assert made.to_plan().iterations == 5
    assert map_fields(made, ppo.Config(), "ppo")[0]["hidden_sizes"] == [64, 64]


def test_resolved_does_not_modify_group():
    critic = PyradoGAE(num_epoch=3.0)
    assert Pyrado(algo="ppo", min_steps=5, critic=critic).resolved().critic.num_epoch == 3
    assert isinstance(critic.num_epoch, float)
