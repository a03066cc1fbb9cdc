"""Each way in that docs/security.md lists is tried with a run folder that somebody else has made.

Code in checkpoints is tried in ``test_checkpoint.py``, names in environments' states in
``envs/test_state.py``.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import recipes.ppo
from kit.buffers.datasets import read_datasets
from kit.cli.launch import main
from kit.evaluate import SavedRun
from kit.evaluate import main as evaluate
from kit.steps import SettingError
from tests.short_runs import one_line, the_run, tiny_config

EVIL = """
from pathlib import Path
import gymnasium as gym
from torchrl.objectives import ClipPPOLoss as Evil
from recipes.ppo import Config, build
Path({trap!r}).touch()
gym.register("Evil-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=9)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Another one's run that has ended."""
    folder = tmp_path_factory.mktemp("finished")
    recipes.ppo.build(tiny_config(folder)).run()
    return the_run(folder)


@pytest.fixture
def attack(finished, tmp_path, monkeypatch):
    """Changes the settings of a run, where ``evil_module`` can be imported; the run and a trap."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    project.mkdir()
    elsewhere.mkdir()
    run = project / "runs" / "ppo" / "CartPole-v1" / "copied"
    shutil.copytree(finished, run)
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(elsewhere))
    monkeypatch.delitem(sys.modules, "evil_module", raising=False)
    trap = tmp_path / "trap"

    def change(where: Path = elsewhere, **settings: Any) -> tuple[Path, Path]:
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["env"]["id"] = settings.pop("id", config["env"]["id"])
        (run / "config.yaml").write_text(yaml.safe_dump({**config, **settings}))
        where.mkdir(parents=True, exist_ok=True)
        monkeypatch.syspath_prepend(str(where))
        (where / "evil_module.py").write_text(EVIL.format(trap=str(trap)))
        return run, trap

    yield change
    import gymnasium

    gymnasium.registry.pop("Evil-v0", None)


WAYS = {
    "loss": {"loss": "evil_module:Evil"},
    "env.id": {"id": "evil_module:Evil-v0"},
}


def resume(run: Path, *words: str) -> None:
    main(recipes.ppo.Config, recipes.ppo.build, [f"resume={run}", "progress=false", *words])


@pytest.mark.parametrize("name", list(WAYS))
def test_a_module_from_elsewhere_needs_trust_to_be_imported(name, attack, capsys):
    run, trap = attack(**WAYS[name])
    (value,) = WAYS[name].values()
    why = "is what the run folder says, and would import a module from outside the project"
    refused = f"{name}={value!r} {why}; if you trust evil_module, add"
    with pytest.raises(SystemExit):
        resume(run)
    assert one_line(capsys.readouterr().err) == f"{refused} trust=evil_module."
    with pytest.raises(SystemExit):
        evaluate([str(run)])
    assert one_line(capsys.readouterr().err) == f"{refused} --trust evil_module."
    with pytest.raises(SettingError, match=r"add trust=evil_module\.$"):
        SavedRun(run)
    assert not trap.exists()
    saved = SavedRun(run, trust=["evil_module"])
    assert saved.policy_steps == 64
    saved.close()
    assert trap.exists()
    with pytest.raises(SystemExit):  # trusted, it is still not the run that was saved
        resume(run, "trust=other,evil_module")
    assert "config.yaml that is not that of its checkpoint" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("name", ["loss", "id"])
def test_a_name_behind_an_interpolation_is_refused(name, attack, capsys):
    """Names in ``env.kwargs`` are not looked at, as they are only passed on."""
    run, trap = attack(**{name: "${env.kwargs.x}"})
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["env"]["kwargs"] = {"x": "evil_module:Evil" if name == "loss" else "evil_module:Evil-v0"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit):
        resume(run)
    assert "was made with other settings" in one_line(capsys.readouterr().err)
    with pytest.raises(SettingError):
        SavedRun(run)
    assert not trap.exists()


@pytest.mark.parametrize("name", ["checkpoints", "lock", "metrics.csv", "plan.txt"])
def test_what_a_link_in_a_run_folder_leads_to_is_neither_written_nor_removed(
    name, attack, tmp_path, capsys
):
    run, _ = attack()
    outside = tmp_path / "outside"
    if name == "checkpoints":
        shutil.copytree(run / name, outside)
        (outside / ".hidden").mkdir()
        shutil.rmtree(run / name)
    else:
        outside.write_text("mine")
        (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    with pytest.raises(SystemExit):
        resume(run)
    assert f"has a link to elsewhere in it: {name}; " in one_line(capsys.readouterr().err)
    assert (
        (outside / ".hidden").is_dir() if name == "checkpoints" else outside.read_text() == "mine"
    )


@pytest.mark.parametrize("kind", ["module", "file"])
def test_a_recipe_from_elsewhere_needs_trust_to_be_imported(kind, attack, tmp_path):
    file = tmp_path / "elsewhere" / "evil_module.py"
    source = str(file) if kind == "file" else "evil_module"
    run, trap = attack(recipe=source)
    with pytest.raises(SettingError, match=r"^recipe=.*outside the project; if you trust"):
        SavedRun(run)
    assert not trap.exists()
    SavedRun(run, trust=[source]).close()
    assert trap.exists()


@pytest.mark.parametrize("place", ["runs/ppo/CartPole-v1/copied", "runs/helpers", "runs"])
@pytest.mark.parametrize("kind", ["loss", "module", "file"])
def test_modules_that_come_with_run_folders_are_not_those_of_the_project(
    place, kind, attack, tmp_path
):
    where = tmp_path / "project" / place
    file = {"recipe": str(where / "evil_module.py")}
    ways = {"loss": WAYS["loss"], "module": {"recipe": "evil_module"}, "file": file}
    run, trap = attack(where, **ways[kind])
    with pytest.raises(SettingError, match="outside the project"):
        SavedRun(run)
    assert not trap.exists()


def test_what_is_installed_below_the_working_folder_is_from_elsewhere(attack, tmp_path):
    where = tmp_path / "project" / ".venv" / "lib" / "site-packages"
    run, trap = attack(where, **WAYS["loss"])
    with pytest.raises(SettingError, match="outside the project"):
        SavedRun(run)
    assert not trap.exists()


@pytest.mark.parametrize("way", [*WAYS.values(), {"recipe": "evil_module"}])
def test_modules_of_the_project_are_trusted(way, attack, tmp_path):
    run, trap = attack(tmp_path / "project", **way)
    SavedRun(run).close()
    assert trap.exists()


@pytest.mark.parametrize("module", ["nowhere_at_all", "__main__", ".."])
def test_modules_that_are_found_nowhere_are_not_of_the_project(module, attack):
    run, _ = attack(loss=f"{module}:Loss", recipe="recipes.ppo")
    with pytest.raises(SettingError, match=r"^loss=.* outside the project"):
        SavedRun(run)


def test_modules_beside_the_recipe_are_trusted(attack, tmp_path, monkeypatch):
    """One's own recipe, and a loss beside it, run from another folder."""
    run, _ = attack(tmp_path / "mine", **WAYS["loss"])
    (tmp_path / "mine" / "ppo.py").write_text(
        "from dataclasses import dataclass\nfrom recipes import ppo\n"
        "@dataclass\nclass Config(ppo.Config):\n    pass\nbuild = ppo.build\n"
    )
    source = str(tmp_path / "mine" / "ppo.py")
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "recipe": source}))
    with pytest.raises(SettingError, match=r"^recipe="):
        SavedRun(run)
    SavedRun(run, trust=[source]).close()
    monkeypatch.chdir(tmp_path / "mine")
    SavedRun(run).close()


def test_the_colon_of_a_device_or_of_a_folder_names_no_module(attack):
    run, _ = attack(device="cpu:0", runs="a:b", start_from="c:d")
    SavedRun(run).close()


def test_environments_of_installed_packages_are_trusted(attack):
    run, _ = attack(id="gymnasium.envs.classic_control:CartPole-v1")
    SavedRun(run).close()


@pytest.mark.parametrize("missing", ["observation_space", "action_space"])
def test_a_data_set_imports_no_environment(missing, attack, tmp_path):
    """Minari makes the environment of a data set whose spaces are missing."""
    _, trap = attack()
    spec = json.dumps({"id": "Evil-v0", "entry_point": "evil_module:Evil"})
    spaces = dict.fromkeys(("observation_space", "action_space"), '{"type": "Discrete", "n": 2}')
    metadata = {**spaces, "env_spec": spec, "data_format": "hdf5", missing: None}
    folder = tmp_path / "data-set-v0"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(SettingError, match=f"does not say its {missing}"):
        read_datasets([str(folder)])
    assert not trap.exists()


def test_yaml_makes_no_objects(attack):
    run, trap = attack()
    text = f"recipe: !!python/object/apply:builtins.open ['{trap}', w]\n"
    yaml.unsafe_load(text)["recipe"].close()
    assert trap.exists()  # the trap works, where objects are made
    trap.unlink()
    (run / "config.yaml").write_text(text)
    with pytest.raises(SettingError, match=r"has no readable config\.yaml"):
        SavedRun(run)
    assert not trap.exists()
