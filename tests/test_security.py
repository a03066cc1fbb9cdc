"""Each way in that docs/security.md lists is tried with a run folder that somebody else has made.

Code in checkpoints is tried in ``test_checkpoint.py``.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium.envs.registration import EnvSpec

import recipes.ppo
from kit.buffers.datasets import read_datasets
from kit.cli.launch import main
from kit.envs import EnvError
from kit.envs.plain_values import StateCaptureError
from kit.envs.state import capture, restore
from kit.evaluate import SavedRun
from kit.evaluate import main as evaluate
from kit.logging.loggers import CsvLogger, WandbLogger
from kit.runs.lock import RunLock
from kit.runs.recipe import Recipe
from kit.runs.run_folder import RunFolder
from kit.runs.trust import check_names
from kit.steps import SettingError
from tests.errors import raises_setting
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
def test_saved_run_imports_external_module_only_with_trust(name, attack, capsys):
    run, trap = attack(**WAYS[name])
    (value,) = WAYS[name].values()
    reason = (
        "The run imports a module that is outside the project or was copied with the run folder"
    )
    refused = f"{name}={value!r}: {reason}. If you trust evil_module, add"
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
    assert "differs from the settings in the checkpoint" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    "settings",
    [
        {"env": {"wrappers": ["evil_module:Evil"]}},
        {"env": {"wrappers": [{"evil_module:Evil": {}}]}},
        {"steps": {"dialect": "sb3", "env_wrapper": "evil_module.Evil"}},
        {"steps": {"dialect": "sb3", "env_wrapper": {"evil_module.Evil": {"a": 1}}}},
        {"steps": {"dialect": "sb3", "env_wrapper": [{"evil_module.Evil": None}]}},
    ],
    ids=str,
)
def test_saved_run_imports_wrappers_only_with_trust(settings, attack, tmp_path):
    run, trap = attack()
    config, recipe = yaml.safe_load((run / "config.yaml").read_text()), Path(recipes.ppo.__file__)
    for group, values in settings.items():
        config[group] |= values
    with raises_setting(
        next(
            f"{group}.{name}"
            for group, values in settings.items()
            for name in values
            if name != "dialect"
        )
    ):
        check_names(config, run, [], "trust=", recipe)
    check_names(config, run, ["evil_module"], "trust=", recipe)
    assert not trap.exists()


@pytest.mark.parametrize("name", ["loss", "id"])
def test_saved_run_rejects_interpolated_module_names(name, attack, capsys):
    """Names in ``env.kwargs`` are not looked at, as they are only passed on."""
    run, trap = attack(**{name: "${env.kwargs.x}"})
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["env"]["kwargs"] = {"x": "evil_module:Evil" if name == "loss" else "evil_module:Evil-v0"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit):
        resume(run)
    assert "The run has other settings" in one_line(capsys.readouterr().err)
    with pytest.raises((SettingError, EnvError)):
        SavedRun(run)
    assert not trap.exists()


# ---------------------------------------------------------------------- links
LINKS = (
    "checkpoints", "lock", "metrics.csv", "plan.txt", "policy", "policy/checkpoints",
    "policy/config.yaml", "videos/step.mp4", "tensorboard/events", "wandb", "wandb/latest-run",
    "wandb/run/files/config.yaml", "a/b/c/d",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "file") for name in LINKS), ("checkpoints", "folder"), ("lock", "dangling")],
)
def test_resume_rejects_links_at_every_depth(name, kind, attack, tmp_path, capsys):
    run, _ = attack()
    outside = tmp_path / "outside"
    if kind == "folder":
        (outside / ".hidden").mkdir(parents=True)
        (outside / "checkpoint-1").mkdir()
    elif kind == "file":
        outside.write_text("mine")
    link = run / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(outside)
    with pytest.raises(SystemExit):
        resume(run)
    assert f"The folder has a link to a file elsewhere: {name}. " in one_line(
        capsys.readouterr().err
    )
    if kind == "folder":
        assert sorted(path.name for path in outside.iterdir()) == [".hidden", "checkpoint-1"]
    else:
        assert not outside.exists() or outside.read_text() == "mine"


def test_resume_allows_links_of_wandb_within_its_folder(attack):
    run, _ = attack()
    (run / "wandb" / "run").mkdir(parents=True)
    (run / "wandb" / "latest-run").symlink_to("run")
    folder = RunFolder(Recipe("recipes.ppo"), config_of(run))
    with folder.locked():
        assert folder.checkpoint is not None


def config_of(run: Path, **changes: Any) -> Any:
    """The settings with which a run is resumed."""
    return tiny_config(run.parents[3], resume=str(run), **changes)


def test_resume_removes_only_its_own_temporary_files(attack):
    run, _ = attack()
    for name in ("checkpoints/.cache", "checkpoints/.checkpoint-half"):
        (run / name).mkdir()
    for name in ("notes.new", "metrics.csv.new"):
        (run / name).write_text("mine")
    with RunFolder(Recipe("recipes.ppo"), config_of(run)).locked():
        pass
    assert (run / "checkpoints" / ".cache").is_dir()
    assert not (run / "checkpoints" / ".checkpoint-half").exists()
    assert (run / "notes.new").read_text() == "mine"
    assert not (run / "metrics.csv.new").exists()


def test_lock_never_truncates_hard_linked_file(tmp_path):
    mine, run = tmp_path / "mine", tmp_path / "run"
    run.mkdir()
    mine.write_text("mine")
    os.link(mine, run / ".lock")
    with pytest.raises(
        SettingError, match=r"The file \.lock is a hard link to another file\. Remove"
    ):
        RunLock(run)
    (run / ".lock").unlink()
    os.link(mine, run / "lock")
    RunLock(run).release()
    os.mkfifo(run / "lock")
    RunLock(run).release()
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("rows", [0, 1])
def test_csv_logger_does_not_append_to_hard_linked_file(rows, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("policy_steps\n8\n")
    os.link(mine, tmp_path / "metrics.csv")
    logger = CsvLogger(tmp_path)
    state = {"columns": ["policy_steps"], "rows": rows, "last": [8.0] * rows}
    logger.load_state_dict({"metrics": state, "times": {"columns": [], "rows": 0, "last": []}})
    logger.log_row({"policy_steps": 16})
    assert mine.read_text() == "policy_steps\n8\n"


# ---------------------------------------------------------------------- names of modules
RUN = "runs/ppo/CartPole-v1/X"
PLACED = {
    # name: (run, module, its file, working folder), all below the project
    "in a run below the project": (f"exp/{RUN}", "exp.runs.ppo.CartPole-v1.X.evil",
                                   f"exp/{RUN}/evil.py", "."),
    "a package in a run": (f"exp/{RUN}", "exp.runs.ppo.CartPole-v1.X.evil",
                           f"exp/{RUN}/evil/__init__.py", "."),
    "of a package in a run": (f"exp/{RUN}", "exp.runs.ppo.CartPole-v1.X.pack.missing",
                              f"exp/{RUN}/pack/__init__.py", "."),
    "an extension in a run": (f"exp/{RUN}", "exp.runs.ppo.CartPole-v1.X.evil",
                              f"exp/{RUN}/evil.abi3.so", "."),
    "bytecode in a run": (f"exp/{RUN}", "exp.runs.ppo.CartPole-v1.X.evil",
                          f"exp/{RUN}/evil.pyc", "."),
    "beside the folder of runs": (f"exp/{RUN}", "exp.evil", "exp/evil.py", "."),
    "a package beside the folder of runs": (f"exp/{RUN}", "exp.evil", "exp/__init__.py", "."),
    "five folders up": ("a/b/c/d/e/X", "a.evil", "a/evil.py", "."),
    "in the folder of runs": (RUN, "runs.evil", "runs/evil.py", "."),
    "called as the kit": ("kit:run", "kit:run.evil", "kit:run/evil.py", "."),
    "called as the recipes": ("recipes:X", "recipes:X.evil", "recipes:X/evil.py", "."),
    "called as TorchRL": ("torchrl:X", "torchrl:X.evil", "torchrl:X/evil.py", "."),
    "with many colons": ("a:b:c", "a:b:c.evil", "a:b:c/evil.py", "."),
    "beside a run": ("X", "evil", "evil.py", "."),
    "a package beside a run": ("X", "evil", "evil/__init__.py", "."),
    "in a package beside a run": ("X", "pack.evil", "pack/evil.py", "."),
    "in the working run": (RUN, "evil", f"{RUN}/evil.py", RUN),
    "in a folder of the working run": (RUN, "sub.evil", f"{RUN}/sub/evil.py", RUN),
    "in the working folder of runs": (RUN, "evil", "runs/evil.py", "runs"),
    "in the working folder of a recipe": (RUN, "evil", "runs/ppo/evil.py", "runs/ppo"),
    "in the working folder of an environment": (
        RUN, "evil", "runs/ppo/CartPole-v1/evil.py", "runs/ppo/CartPole-v1",
    ),
    "called as a package of environments": ("X", "evil_envs", "evil_envs.py", "."),
    "in one called so": ("X", "evil_envs.evil", "evil_envs/evil.py", "."),
}  # fmt: skip


@pytest.fixture
def placed(finished, tmp_path, monkeypatch):
    """Puts a module and a run into a project; the run and a trap."""
    project, trap = tmp_path / "project", tmp_path / "trap"
    before = set(sys.modules)
    monkeypatch.setitem(gym.registry, "Evil-v0", EnvSpec("Evil-v0", "evil_envs:Evil"))

    def place(run: str, file: str, here: str, **settings: Any) -> tuple[Path, Path]:
        shutil.copytree(finished, project / run)
        path, text = project / file, EVIL.format(trap=str(trap))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.suffix == ".pyc":
            py_compile.compile(str(path), str(path))
        for key, value in settings.items():
            change(project / run, key, value)
        monkeypatch.chdir(project / here)
        monkeypatch.syspath_prepend(str(project / here))
        return project / run, trap

    yield place
    for name in set(sys.modules) - before:
        if name.startswith(("exp", "a.", "evil", "pack", "sub", "runs")):
            del sys.modules[name]


def change(run: Path, name: str, value: Any) -> None:
    """Change a setting of a run."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    if name == "id":
        config["env"]["id"] = value
    else:
        config[name] = value
    (run / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("setting", ["loss", "id", "recipe"])
@pytest.mark.parametrize("case", PLACED)
def test_saved_run_rejects_modules_copied_with_run(case, setting, placed):
    run, module, file, here = PLACED[case]
    value = {"loss": f"{module}:Evil", "id": f"{module}:CartPole-v1", "recipe": module}[setting]
    place, trap = placed(run, file, here, **{setting: value})
    with pytest.raises(SettingError, match="imports a module that is outside the project"):
        SavedRun(place)
    assert not trap.exists()


@pytest.mark.parametrize("setting", ["loss", "id"])
@pytest.mark.parametrize(
    "module", ["os", "builtins", "sys", "__main__", "..", "", "evil.", ".evil", "evil..x", "a b"]
)
def test_saved_run_rejects_builtin_and_malformed_module_names(module, setting, placed):
    run, trap = placed(RUN, "elsewhere/evil.py", "elsewhere", **{setting: f"{module}:x"})
    with pytest.raises(SettingError, match="outside the project"):
        SavedRun(run)
    assert not trap.exists()


@pytest.mark.parametrize(
    "file", ["runs/ppo/CartPole-v1/X/evil.py", "runs/evil.py", "../evil.py", "a/../runs/evil.py"]
)
def test_saved_run_rejects_recipe_files_copied_with_run(file, placed):
    run, trap = placed(RUN, file.replace("a/../", ""), ".", recipe=file)
    with raises_setting("recipe"):
        SavedRun(run)
    assert not trap.exists()


@pytest.mark.parametrize("way", ["to the run", "to the folder of runs", "over the run"])
def test_links_to_run_do_not_hide_module_location(way, placed, tmp_path):
    run, trap = placed(RUN, f"{RUN}/evil.py", ".")
    link = tmp_path / "project" / "link"
    link.symlink_to(run if way != "to the folder of runs" else run.parents[2])
    module = "link.ppo.CartPole-v1.X.evil" if way == "to the folder of runs" else "link.evil"
    change(run, "loss", f"{module}:Evil")
    with raises_setting("loss"):
        SavedRun(link if way == "over the run" else run)
    assert not trap.exists()


def test_trust_matches_complete_module_names(placed, monkeypatch):
    # Tests of world models have a module `runs` in their folder.
    monkeypatch.delitem(sys.modules, "runs", raising=False)
    others = [folder for folder in sys.path if not Path(folder, "runs.py").exists()]
    monkeypatch.setattr(sys, "path", others)
    run, trap = placed(RUN, "runs/evil.py", ".", loss="runs.evil:Evil")
    for name in ("runs.evi", "evil", "run", "runs.evil.more", "runs/evil.py"):
        with raises_setting("loss"):
            SavedRun(run, trust=[name])
    assert not trap.exists()
    SavedRun(run, trust=["runs"]).close()
    assert trap.exists()


@pytest.mark.parametrize("layout", ["exp/runs/ppo/CartPole-v1/X", "runs/ppo/CartPole-v1/X"])
def test_check_names_trusts_modules_in_package_of_recipe(layout, placed):
    run, trap = placed(layout, "exp/evil.py", ".", loss="exp.evil:Evil")
    config = yaml.safe_load((run / "config.yaml").read_text())
    check_names(config, run, [], "trust=", Path("exp/train.py").absolute())
    assert not trap.exists()


@pytest.mark.parametrize("kind", ["module", "file"])
def test_saved_run_imports_external_recipe_only_with_trust(kind, attack, tmp_path):
    file = tmp_path / "elsewhere" / "evil_module.py"
    source = str(file) if kind == "file" else "evil_module"
    run, trap = attack(recipe=source)
    with raises_setting("recipe"):
        SavedRun(run)
    assert not trap.exists()
    SavedRun(run, trust=[source]).close()
    assert trap.exists()


@pytest.mark.parametrize("place", ["runs/ppo/CartPole-v1/copied", "runs/helpers", "runs"])
@pytest.mark.parametrize("kind", ["loss", "module", "file"])
def test_saved_run_rejects_modules_inside_run_folders(place, kind, attack, tmp_path):
    where = tmp_path / "project" / place
    file = {"recipe": str(where / "evil_module.py")}
    ways = {"loss": WAYS["loss"], "module": {"recipe": "evil_module"}, "file": file}
    run, trap = attack(where, **ways[kind])
    with pytest.raises(SettingError, match="outside the project"):
        SavedRun(run)
    assert not trap.exists()


def test_saved_run_rejects_modules_in_local_site_packages(attack, tmp_path):
    where = tmp_path / "project" / ".venv" / "lib" / "site-packages"
    run, trap = attack(where, **WAYS["loss"])
    with raises_setting("loss"):
        SavedRun(run)
    assert not trap.exists()


@pytest.mark.parametrize("way", [*WAYS.values(), {"recipe": "evil_module"}])
def test_saved_run_trusts_modules_of_project(way, attack, tmp_path):
    run, trap = attack(tmp_path / "project", **way)
    SavedRun(run).close()
    assert trap.exists()


@pytest.mark.parametrize("module", ["nowhere_at_all", "__main__", ".."])
def test_saved_run_rejects_modules_that_cannot_be_found(module, attack):
    run, _ = attack(loss=f"{module}:Loss", recipe="recipes.ppo")
    with raises_setting("loss"):
        SavedRun(run)


def test_saved_run_trusts_modules_next_to_recipe(attack, tmp_path, monkeypatch):
    """One's own recipe, and a loss beside it, run from another folder."""
    run, _ = attack(tmp_path / "mine", **WAYS["loss"])
    (tmp_path / "mine" / "ppo.py").write_text(
        "from dataclasses import dataclass\nfrom recipes import ppo\n"
        "@dataclass\nclass Config(ppo.Config):\n    pass\nbuild = ppo.build\n"
    )
    source = str(tmp_path / "mine" / "ppo.py")
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "recipe": source}))
    with raises_setting("recipe"):
        SavedRun(run)
    SavedRun(run, trust=[source]).close()
    monkeypatch.chdir(tmp_path / "mine")
    SavedRun(run).close()


# ---------------------------------------------------------------------- states of environments
class Gadgets(gym.Env):
    """Holds what a saved state might turn into a command."""

    observation_space = action_space = gym.spaces.Discrete(2)
    count = 0

    def __init__(self) -> None:
        self.array, self.text, self.wrapped = np.zeros(2), "", None
        self.generator = np.random.default_rng(0)
        self.draw, self.method = self.generator.random, self.up
        self.part, self.log, self.kind = Part(), logging.getLogger("gadgets"), Part
        self.function, self.partial = self.make_function(), functools.partial(pow, 2)

    def make_function(self) -> Any:
        call, number = self.up, 0
        return lambda: (call, number)

    def up(self) -> None:
        """Go up."""

    def down(self) -> None:
        """Go down."""

    @property
    def height(self) -> int:
        return 0

    @functools.cached_property
    def drawn(self) -> float:
        return float(self.generator.random())


class Part:
    """An object of the environment's own package."""

    def __call__(self) -> None:
        pass


ARRAY = {"array": "AAAAAAAAAAA=", "dtype": "<f8", "shape": [1], "number": 90}
OBJECTS = {"array": "AAAAAAAAAAA=", "dtype": "|O", "shape": [1], "number": 91}
TOFILE = {"function": "tofile", "of": ARRAY, "number": 92}
DOWN = {"function": "down", "of": {"same": 0}, "number": 93}
STATES: dict[str, dict[str, Any]] = {
    "a function of an array": {"draw": TOFILE},
    "a function of an array for a method": {"method": TOFILE},
    "a function of a text": {"method": {"function": "format", "of": "x", "number": 92}},
    "a function of a function": {
        "method": {"function": "__globals__", "of": {"same": 7}, "number": 92},
    },
    "another method of the environment": {"method": DOWN},
    "another method of its generator": {
        "draw": {"function": "bytes", "of": {"same": 5}, "number": 92},
    },
    "a method of another object": {"method": {"function": "up", "of": ARRAY, "number": 92}},
    "a function for a number": {"text": TOFILE},
    "a function under a new name": {"new": TOFILE},
    "an object to call for a number": {"text": {"same": 0}, "wrapped": {"same": "function"}},
    "a function for step": {"step": TOFILE},
    "a number for step": {"step": 1},
    "a number for reset": {"reset": 1},
    "a text for render": {"render": "x"},
    "a number for a property": {"height": 1},
    "a number for the generator's property": {"np_random": 1},
    "its class": {"__class__": "x"},
    "its attributes": {"__dict__": {"dict": [], "number": 92}},
    "its constructor": {"__init__": 1},
    "arguments of its constructor": {"_ezpickle_args": {"tuple": ["x"]}},
    "a function that it encloses": {
        "function": {
            "function": "Gadgets.make_function.<locals>.<lambda>", "attributes": {},
            "cells": [DOWN, 0], "number": 94,
        },
    },
    "a method of a function": {
        "function": {
            "function": "Gadgets.make_function.<locals>.<lambda>", "cells": [],
            "attributes": {"__call__": 1}, "number": 94,
        },
    },
    "an array of objects": {"array": OBJECTS},
    "an array of objects among others": {
        "array": {**OBJECTS, "dtype": {"tuple": []}, "shape": [1]} | {"dtype": [["a", "|O"]]},
    },
    "a view of numbers as objects": {
        "array": {"view": ARRAY, "offset": 0, "strides": [8], "dtype": "|O", "shape": [1],
                  "number": 95},
    },
    "an object of another package": {
        "log": {"object": "Logger", "attributes": {"name": "x"}, "number": 92},
    },
    "a class": {"kind": {"object": "type", "attributes": {}, "number": 92}},
    "a class as a function": {
        "kind": {"function": "Part", "cells": [], "attributes": {"x": 1}, "number": 92},
    },
    "a method of an object": {
        "part": {"object": "Part", "attributes": {"__call__": 1}, "number": 92},
    },
    "an object where there is none": {
        "text": {"object": "Part", "attributes": {}, "number": 92},
    },
    "a function that was made elsewhere": {"text": os.system},
    "a list that was not written": {"text": [os.system]},
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_restore_rejects_code_in_env_state(case):
    env, other = Gadgets(), Gadgets()
    state = capture(other)
    state["layers"][0]["attributes"] |= STATES[case]
    with pytest.raises((StateCaptureError, ValueError, KeyError, TypeError)):
        restore(env, state)
    for name in ("step", "reset", "render", "up", "down", "height", "np_random", "__call__", "new"):
        assert name not in vars(env)
        assert name not in vars(env.part)
    assert env.method == env.up
    assert env.draw.__name__ == "random"
    assert env.function()[0] == env.up


def test_restore_recovers_attributes_and_methods_of_env():
    env, other = Gadgets(), Gadgets()
    other.count, other.since = 3, 1.5
    other.part.level = 2
    other.array[:] = 7
    assert other.drawn
    restore(env, capture(other))
    assert env.drawn == other.drawn
    assert (env.count, env.since, env.part.level, env.array.tolist()) == (3, 1.5, 2, [7.0, 7.0])
    assert env.draw() == other.draw()
    assert env.draw.__self__ is env.generator
    assert env.method == env.up


# ---------------------------------------------------------------------- W&B
@pytest.fixture
def wandb_settings(tmp_path, monkeypatch):
    """Writes settings of W&B that name another host."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def write(folder: Path, name: str = "wandb") -> None:
        (folder / name).mkdir(parents=True)
        (folder / name / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")

    return write


@pytest.mark.parametrize("name", ["wandb", ".wandb"])
@pytest.mark.parametrize("here", [".", "checkpoints", "elsewhere", "another run"])
def test_wandb_logger_rejects_settings_in_run_folder(here, name, attack, wandb_settings, tmp_path):
    run, _ = attack()
    given = run
    if here == "another run":
        given, here = tmp_path / "new", "."
    elif here == "elsewhere":
        here = str(tmp_path)
    wandb_settings(run / here if here == "checkpoints" else run, name)
    os.chdir(run / here)
    if here == "checkpoints":
        wandb_settings(run, name)
    with raises_setting("logger"):
        WandbLogger(given)


@pytest.mark.parametrize("where", ["project", "run"])
def test_wandb_reads_settings_of_project_only(where, attack, wandb_settings, monkeypatch):
    """The installed W&B reads settings of the working folder, and none of the run folder."""
    run, _ = attack()
    project = run.parents[3]
    wandb_settings(project if where == "project" else run)
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    if where == "project":
        WandbLogger(run)
    script = "import wandb; print(wandb.setup().settings.base_url)"
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, cwd=project, capture_output=True, check=True, text=True).stdout
    assert (found.strip() == "http://127.0.0.1:9") == (where == "project")


def test_saved_run_allows_colons_in_device_and_paths(attack):
    run, _ = attack(device="cpu:0", log_dir="a:b", init_from="c:d")
    SavedRun(run).close()


def test_saved_run_trusts_envs_of_installed_packages(attack):
    run, _ = attack(id="gymnasium.envs.classic_control:CartPole-v1")
    SavedRun(run).close()


@pytest.mark.parametrize("missing", ["observation_space", "action_space"])
def test_read_datasets_does_not_import_env(missing, attack, tmp_path):
    """Minari makes the environment of a data set whose spaces are missing."""
    _, trap = attack()
    spec = json.dumps({"id": "Evil-v0", "entry_point": "evil_module:Evil"})
    spaces = dict.fromkeys(("observation_space", "action_space"), '{"type": "Discrete", "n": 2}')
    metadata = {**spaces, "env_spec": spec, "data_format": "hdf5", missing: None}
    folder = tmp_path / "data-set-v0"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "metadata.json").write_text(json.dumps(metadata))
    with raises_setting("dataset"):
        read_datasets([str(folder)])
    assert not trap.exists()


def test_saved_run_rejects_yaml_object_tags(attack):
    run, trap = attack()
    text = f"recipe: !!python/object/apply:builtins.open ['{trap}', w]\n"
    yaml.unsafe_load(text)["recipe"].close()
    assert trap.exists()  # the trap works, where objects are made
    trap.unlink()
    (run / "config.yaml").write_text(text)
    with raises_setting("resume"):
        SavedRun(run)
    assert not trap.exists()
