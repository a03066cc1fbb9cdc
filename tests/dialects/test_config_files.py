"""Settings are read from the command line and from the files of other libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.cli.steps import main
from kit.dialects import SB3, Dreamer, Pyrado, Sheeprl, Tianshou
from kit.dialects.files import left_unread, make, settings_of, value_of
from kit.steps import SettingError

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
def test_a_text_means_a_plain_value(text, value):
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


@pytest.mark.parametrize("text", ["1e6", "1E6", "1e+6", "10.e5", "1.0e6", "+1.0e+6", ".1e7"])
def test_a_number_with_an_exponent_is_one_in_a_file_as_well(text, tmp_path):
    file = tmp_path / "sb3_ppo.yaml"
    file.write_text(f"total_timesteps: {text}\n")
    assert make(SB3, {}, str(file)).to_plan().asked["total_policy_steps"] == 1_000_000


def test_words_are_names_and_values():
    assert settings_of(["a=1", "+b=x=y"]) == {"a": 1, "b": "x=y"}
    with pytest.raises(SettingError, match="name=value"):
        settings_of(["a"])


def test_nested_names_are_those_of_the_librarys_configuration():
    settings = {"algo.name": "sac", "algo.replay_ratio": 0.5, "env.num_envs": 2}
    settings |= {"fabric.devices": 3, "buffer.size": 100}
    made = make(Sheeprl, settings)
    assert (made.algo, made.replay_ratio, made.num_envs) == ("sac", 0.5, 2)
    assert (made.world_size, made.buffer_size) == (3, 100)
    assert make(Dreamer, {"run.train_ratio": 64}).train_ratio == 64
    assert make(Pyrado, {"critic.num_epoch": 3}).critic.num_epoch == 3


def test_an_unknown_name_is_refused_with_the_nearest_spelling():
    with pytest.raises(SettingError, match=r"algo\.replay_rato=1 .* what works: replay_ratio"):
        make(Sheeprl, {"algo.replay_rato": 1})


def test_sheeprls_file_has_sections_defaults_and_interpolations():
    made = make(Sheeprl, {}, str(CONFIGS / "sheeprl_dreamer.yaml"))
    assert made.algo == "dreamer_v3"
    assert (made.replay_ratio, made.total_steps, made.action_repeat) == (0.3, 5000, 4)
    assert (made.world_size, made.buffer_size, made.buffer_checkpoint) == (2, 5000, False)
    assert made.to_plan().iterations == 2500


def test_what_is_typed_wins_over_the_file():
    made = make(Sheeprl, {"algo.total_steps": 100}, str(CONFIGS / "sheeprl_dreamer.yaml"))
    assert made.total_steps == 100
    assert made.replay_ratio == 0.3


def test_the_zoo_has_a_group_for_each_environment():
    path = str(CONFIGS / "sb3_zoo_ppo.yml")
    made = make(SB3, {"env": "CartPole-v1"}, path)
    assert made.algo == "ppo"
    assert made.to_plan().frames_per_batch == 256
    assert make(SB3, {"env": "Pendulum-v1", "n_epochs": 2}, path).n_steps == 1024
    with pytest.raises(SettingError, match=r"env=None leaves open .*CartPole-v1 or Pendulum-v1"):
        make(SB3, {}, path)
    with pytest.raises(SettingError, match=r"env='CartPole-v2' .* what works: CartPole-v1"):
        make(SB3, {"env": "CartPole-v2"}, path)


def test_a_section_may_hold_all_settings():
    made = make(Tianshou, {"algo": "sac"}, str(CONFIGS / "tianshou_sac.yaml"))
    assert made.to_plan().iterations == 18


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        ("a: [", "is no YAML"),
        ("- 1", "no settings by name"),
        ("other: 3", "has no settings of sheeprl"),
        ("\x00\x01", "is no YAML"),
    ],
)
def test_a_file_that_says_nothing_is_refused(tmp_path, content, why):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingError, match=why):
        make(Sheeprl, {}, str(path))


def test_what_is_not_read_of_a_file_is_said(tmp_path, capsys):
    file = tmp_path / "ppo.yml"
    file.write_text("CartPole-v1:\n  n_timestps: 1e4\n  normalize: true\n  n_steps: 32\n")
    assert main(["explain", "sb3", str(file)]) == 0
    assert "Not read from " in (told := capsys.readouterr().out.replace("\n  ", " "))
    assert "n_timestps=10000.0, normalize=True." in told
    assert main(["translate", "sb3", str(file), "--to", "cleanrl"]) == 0
    assert "- normalize=True" in capsys.readouterr().out


def test_of_a_file_about_much_else_only_what_is_spelt_like_a_field_is_said(tmp_path):
    file = tmp_path / "config.yaml"
    others = "".join(f"other_{number}: 1\n" for number in range(20))
    file.write_text(f"{others}n_step: 3\ngama: 0.9\nn_steps: 8\n")
    assert left_unread(SB3, file) == {"n_step": 3, "gama": 0.9}


def test_groups_of_settings_are_read_of_a_file(tmp_path):
    file = tmp_path / "pyrado.yaml"
    others = "".join(f"other_{number}: 1\n" for number in range(20))
    file.write_text(f"{others}algo: ppo\nmin_steps: 100\ncritic:\n  gamma: 0.9\n  num_epoch: 3\n")
    made = make(Pyrado, {}, str(file))
    assert (made.min_steps, made.critic.gamma, made.critic.num_epoch) == (100, 0.9, 3)
