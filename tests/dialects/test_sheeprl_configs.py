"""sheeprl's experiments are composed from its config groups."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kit.cli.steps import main
from kit.dialects import Sheeprl
from kit.dialects.files import left_unread, make
from kit.dialects.sheeprl import configs
from tests.errors import raises_setting

needs_sheeprl = pytest.mark.skipif(find_spec("sheeprl") is None, reason="sheeprl is not installed")

GROUPS = {
    "config": "defaults: [_self_, {algo: default}, {env: default}, {exp: '???'}]\nseed: 42\n"
    "run_name: ${now:%Y}_${hydra:job.name}_${env.id}\n",
    "algo/default": "name: ???\ntotal_steps: ???\n",
    "algo/sac": "defaults: [default, _self_]\nname: sac\nhidden_size: 256\n"
    "critic: {target_network_frequency: 1, hidden_size: '${algo.hidden_size}'}\n",
    "env/default": "id: ???\nnum_envs: 4\naction_repeat: 1\nwrapper: ???\n",
    "env/atari": "defaults: [default, _self_]\nid: PongNoFrameskip-v4\naction_repeat: 4\n"
    "wrapper: {_target_: gymnasium.wrappers.AtariPreprocessing}\n",
    "env/dmc": "defaults: [default, _self_]\nid: ${env.wrapper.domain_name}\nwrapper:\n"
    "  {_target_: sheeprl.envs.dmc.DMCWrapper, domain_name: walker, task_name: walk}\n",
    "exp/pong": "# @package _global_\n"
    "defaults: [override /algo: sac, override /env: atari, _self_]\n"
    "algo: {total_steps: 320}\nbuffer: {size: '${algo.total_steps}', memmap: true}\n",
}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a few config groups."""
    folder = tmp_path_factory.mktemp("configs")
    for name, text in GROUPS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)
    return str(folder)


def own_file(folder: Path, text: str, header: str = "# @package _global_\n") -> str:
    file = folder / "pong.yaml"
    file.write_text(header + text)
    return str(file)


def test_exp_composes_config_groups(groups):
    made = make(Sheeprl, {"exp": "pong", "configs": groups})
    assert (made.algo, made.total_steps, made.hidden_size, made.num_envs) == ("sac", 320, 256, 4)
    assert (made.env_id, made.action_repeat) == ("ale_py:PongNoFrameskip-v4", 4)
    assert made.library_defaults
    assert made.recipe() == "sac"


def test_settings_override_experiment_and_interpolations(groups):
    given: dict[str, Any] = {"exp": "pong", "configs": groups, "env": "dmc", "total_steps": 80}
    made = make(Sheeprl, {**given, "env.wrapper.task_name": "run", "env.num_envs": 2})
    assert (made.total_steps, made.buffer_size, made.num_envs) == (80, 80, 2)
    assert (made.env_id, made.action_repeat) == ("dm_control/walker-run-v0", 1)
    with raises_setting("algo.replay_rato"):
        make(Sheeprl, {**given, "algo.replay_rato": 1})


def test_own_experiment_file_is_composed_with_config_groups(groups, tmp_path):
    text = "defaults: [override /algo: sac, override /env: dmc]\nalgo: {total_steps: 40}\n"
    made = make(Sheeprl, {"configs": groups}, own_file(tmp_path, text))
    assert (made.algo, made.total_steps, made.env_id) == ("sac", 40, "dm_control/walker-walk-v0")
    with raises_setting("exp", "pong"):
        make(Sheeprl, {"configs": groups, "exp": "pong"}, own_file(tmp_path, text))
    with raises_setting("file"):
        make(Sheeprl, {"configs": groups}, own_file(tmp_path, "defaults: [override /algo: pppo]"))
    with raises_setting("file"):
        make(Sheeprl, {"configs": groups}, own_file(tmp_path, text, header=""))


def test_composed_file_can_have_resolvers_of_hydra(tmp_path):
    text = "algo: {name: sac, gamma: 0.5}\nrun_name: ${now:%Y}\nroot_dir: ${hydra:job.name}\n"
    made = make(Sheeprl, {}, own_file(tmp_path, text))
    assert (made.algo, made.gamma, made.env_id) == ("sac", 0.5, None)


@pytest.mark.parametrize(("group", "option"), [("exp", "png"), ("env", "atarii"), ("algo", "sca")])
def test_experiment_rejects_unknown_option(groups, group, option):
    with raises_setting(group, option):
        make(Sheeprl, {"configs": groups, "exp": "pong", group: option})


def test_config_groups_need_experiment_and_folder(groups, tmp_path):
    with raises_setting("env"):
        make(Sheeprl, {"env": "atari"})
    with raises_setting("configs"):
        make(Sheeprl, {"configs": groups})
    with raises_setting("configs"):
        make(Sheeprl, {"exp": "pong", "configs": str(tmp_path)})


def test_experiment_without_sheeprl_names_installation(monkeypatch, tmp_path):
    monkeypatch.setattr(configs, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^exp='ppo': .* pip install --no-deps sheeprl, or set"):
        make(Sheeprl, {"exp": "ppo"})
    with raises_setting("file"):
        make(Sheeprl, {}, own_file(tmp_path, "defaults: [override /algo: sac]\n"))


def test_explain_lists_unread_entries_of_experiment(groups, capsys):
    assert main(["explain", "sheeprl", "exp=pong", f"configs={groups}"]) == 0
    assert "Not read" not in capsys.readouterr().out
    file = Path(groups) / "exp" / "noisy.yaml"
    file.write_text(GROUPS["exp/pong"] + "env: {screen_size: 84}\n")
    assert left_unread(Sheeprl, file) == {"env.screen_size": 84}


@needs_sheeprl
@pytest.mark.parametrize(
    ("exp", "recipe", "settings"),
    [
        ("a2c_benchmarks", "a2c", {"env_id": "CartPole-v1", "max_grad_norm": 0.5}),
        ("droq", "droq", {"env_id": "LunarLanderContinuous-v3", "dropout": 0.01}),
        ("dreamer_v1_benchmarks", "dreamerv1", {"expl_amount": 0.3, "buffer_size": 16_384}),
        ("dreamer_v3_dmc_walker_walk", "dreamerv3", {"env_id": "dm_control/walker-walk-v0"}),
        ("dreamer_v3_minedojo", "dreamerv3", {"env_id": "harvest_milk", "dense_units": 256}),
        ("dreamer_v3_5_100k_ms_pacman", "dreamerv3", {"lr": 4e-5, "replay_context": 1}),
        ("p2e_dv3_exploration", "plan2explore", {"intrinsic_weight": 0.1, "ensembles": 8}),
    ],
)
def test_installed_experiments_select_recipe(exp, recipe, settings):
    made = make(Sheeprl, {"exp": exp})
    assert made.recipe() == recipe
    assert {name: getattr(made, name) for name in settings} == settings
