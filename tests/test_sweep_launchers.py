"""Sweeps in several processes: every run is bitwise the run made alone, also after a death."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.core.config_store import ConfigStore

import recipes.ppo
from kit import SettingError
from kit.cli.launch import main
from kit.distributed.ray_session import ray_session
from kit.runs.recipe import Recipe
from kit.steps.values import flat
from kit.trainer.checkpoint import Checkpoints
from kit.tune import trainable
from kit.tune.trials import _nested
from tests.short_runs import one_line
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
SHORT = [
    "env.num_envs=2", "steps.total_policy_steps=128", "steps.steps_per_env=8", "hidden_sizes=[8]",
    "steps.minibatch_size=8", "steps.update_epochs=1", "steps.evaluation_every=null",
    "steps.evaluation_episodes=1", "progress=false", "checkpoint_every=32", "log_every=16",
]  # fmt: skip
ENVS = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1")
NODE = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
RECIPE = """
    import os, signal
    from dataclasses import dataclass
    from pathlib import Path
    from kit import main
    from recipes import ppo

    DIED = Path(__file__).with_name("died")

    @dataclass
    class Config(ppo.Config):
        dies: bool = False

    def build(cfg, **parts):
        trainer = ppo.build(cfg, **parts)
        def die(row):
            if cfg.dies and row["policy_steps"] == 80 and not DIED.exists():
                DIED.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        trainer.register_op("log_row", die)
        return trainer

    if __name__ == "__main__":
        main(Config, build)
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ray_folder(monkeypatch) -> Iterator[Path]:
    """Folder of all Ray sessions of a test. Afterwards, no process of a session is left."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # sockets need a short path
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def mortal(tmp_path) -> Path:
    """Recipe whose process is killed once at 80 of 128 policy steps if ``dies=true``."""
    file = tmp_path / "recipe" / "mortal.py"
    file.parent.mkdir()
    file.write_text(textwrap.dedent(RECIPE))
    return file


def shell(*words: str) -> dict[str, Any]:
    """Arguments of a process of Python."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return {"args": [sys.executable, *words], "env": environment, "text": True, **pipes}


def in_a_shell(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**shell(*words), check=False)


def results(runs: Path | str, setting: str) -> dict[Any, tuple[str, list[float]]]:
    """Metrics and final weights of all runs in a folder, keyed by the value of a setting."""
    found: dict[Any, tuple[str, list[float]]] = {}
    for file in Path(runs).rglob("config.yaml"):
        value = flat(yaml.safe_load(file.read_text()))[setting]
        assert value not in found  # one folder per run
        checkpoint = Checkpoints.latest(file.parent / "checkpoints")
        (state,) = checkpoint.glob("components/*-loss_module/state.pt")
        weights = torch.load(state, weights_only=True)
        numbers = [number for tensor in weights.values() for number in tensor.flatten().tolist()]
        found[value] = file.with_name("metrics.csv").read_text(), numbers
    return found


def processes_of(folder: Path) -> list[str]:
    """Command lines of running processes that name a folder."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(file.read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return [line for line in lines if str(folder) in line]


# ---------------------------------------------------------------------- equal runs
@pytest.fixture(scope="module")
def runs_alone(tmp_path_factory) -> dict[Any, tuple[str, list[float]]]:
    """Runs that were made one by one, keyed by environment."""
    folder = tmp_path_factory.mktemp("alone")
    for env in ENVS:
        main(recipes.ppo.Config, recipes.ppo.build, [*SHORT, f"env.id={env}", f"log_dir={folder}"])
    return results(folder, "env.id")


def test_basic_sweep_equals_runs_alone(runs_alone):
    words = [*SHORT, "--multirun", f"env.id={','.join(ENVS)}"]
    main(recipes.ppo.Config, recipes.ppo.build, words)
    assert results("runs", "env.id") == runs_alone


@pytest.mark.parametrize(
    "launcher",
    ["joblib", pytest.param("submitit_local", marks=pytest.mark.nightly), "ray"],
)
def test_parallel_sweep_equals_runs_alone(launcher, runs_alone, ray_folder):
    words = ["--multirun", f"hydra/launcher={launcher}", f"env.id={','.join(ENVS)},Nowhere-v0"]
    ran = in_a_shell("-m", "recipes.ppo", *SHORT, *words)
    assert ran.returncode == 1
    assert "\n\nerror: env.id='Nowhere-v0': Gymnasium cannot create" in ran.stderr
    assert results("runs", "env.id") == runs_alone
    (table,) = Path("runs").glob("ppo/sweeps/*/sweep.csv")
    rows = list(csv.DictReader(table.open()))
    assert [row["env.id"] for row in rows] == [*ENVS, "Nowhere-v0"]
    assert [bool(row["error"]) for row in rows] == [False] * 4 + [True]
    assert not [*table.parent.glob("started-*"), *processes_of(ray_folder)]


# ---------------------------------------------------------------------- deaths
@pytest.fixture
def undisturbed(mortal) -> dict[Any, tuple[str, list[float]]]:
    """Runs of the recipe ``mortal`` that did not die, keyed by seed."""
    mortal.with_name("died").touch()
    module = Recipe(str(mortal)).load()
    for seed in range(4):
        words = [*SHORT, f"seed={seed}", "dies=true", "log_dir=alone"]
        main(module.Config, module.build, words)
    mortal.with_name("died").unlink()
    return results("alone", "seed")


def test_ray_task_resumes_its_run_after_death(mortal, undisturbed, ray_folder):
    words = ["--multirun", "hydra/launcher=ray", "seed=range(4)", "dies=true"]
    ran = in_a_shell(str(mortal), *SHORT, *words)
    assert ran.returncode == 0
    assert mortal.with_name("died").exists()
    assert results("runs", "seed") == undisturbed
    assert processes_of(ray_folder) == []


@pytest.mark.nightly
def test_ray_task_resumes_its_run_on_another_node(mortal, undisturbed, ray_folder, monkeypatch):
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    text = mortal.read_text().replace("os.kill(os.getpid(), signal.SIGKILL)", "signal.pause()")
    mortal.write_text(text)
    cluster = cluster_utils.Cluster(True, head_node_args={**NODE, "num_cpus": 0})
    try:
        node = cluster.add_node(**NODE, num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        words = ["--multirun", "hydra/launcher=ray", "seed=range(4)", "dies=true"]
        with subprocess.Popen(**shell(str(mortal), *SHORT, *words)) as sweep:
            wait_until(mortal.with_name("died").exists, "the run that waits for its death")
            cluster.add_node(**NODE, num_cpus=1)
            cluster.remove_node(node, allow_graceful=False)
            out, _ = sweep.communicate()
        assert sweep.returncode == 0, out
        assert processes_of(ray_folder) != []  # the cluster stays
    finally:
        cluster.shutdown()
    assert results("runs", "seed") == undisturbed


@pytest.mark.nightly
def test_ray_sweep_reports_run_that_always_dies(mortal, ray_folder):
    mortal.write_text(mortal.read_text().replace("not DIED.exists()", "cfg.seed == 1"))
    words = ["--multirun", "hydra/launcher=ray", "seed=0,1", "dies=true"]
    ran = in_a_shell(str(mortal), *SHORT, *words)
    assert ran.returncode == 1
    (table,) = Path("runs").glob("mortal/sweeps/*/sweep.csv")
    finished, dead = csv.DictReader(table.open())
    assert finished["error"] == ""
    assert dead["error"].startswith("The worker died unexpectedly")


def test_tune_trials_equal_runs_alone_after_death(mortal, undisturbed, ray_folder):
    script = f"""
        import math
        from ray import tune
        from kit.distributed.ray_session import ray_session
        from kit.tune import trainable

        settings = {tune_settings()!r}
        with ray_session("tune", "test"):
            found = tune.Tuner(
                trainable({str(mortal)!r}),
                param_space={{**settings, "seed": tune.grid_search([0, 1, 2, 3])}},
                run_config=tune.RunConfig(
                    storage_path={str(Path("trials").absolute())!r}, name="sweep", verbose=0,
                    failure_config=tune.FailureConfig(max_failures=1),
                ),
            ).fit()
            for trial in found:
                assert trial.metrics["policy_steps"] == 128
                assert not math.isnan(trial.metrics["evaluation/return"])
                assert trial.metrics["folder"].startswith(trial.path)
    """
    ran = in_a_shell("-c", textwrap.dedent(script))
    assert ran.returncode == 0, ran.stderr
    assert mortal.with_name("died").exists()
    assert results("trials", "seed") == undisturbed
    assert processes_of(ray_folder) == []


def tune_settings() -> dict[str, Any]:
    """``SHORT`` as a search space, with a nested and a dotted group."""
    pairs = [word.split("=") for word in SHORT]
    plain = {name: yaml.safe_load(value) for name, value in pairs}
    steps = {n.removeprefix("steps."): v for n, v in plain.items() if n.startswith("steps.")}
    rest = {name: value for name, value in plain.items() if not name.startswith("steps.")}
    return {**rest, "steps": steps, "dies": True}


# ---------------------------------------------------------------------- settings and errors
def test_tune_settings_accept_nested_and_dotted_names():
    space = {"seed": 1, "env": {"id": "A-v0", "kwargs": {"x": 2}}, "env.num_envs": 4}
    assert _nested(space) == {
        "seed": 1,
        "env": {"id": "A-v0", "kwargs": {"x": 2}, "num_envs": 4},
    }


@pytest.mark.parametrize("recipe", ["recipes.nothing", "nothing"])
def test_trainable_rejects_unknown_recipe(recipe):
    with pytest.raises(SettingError, match=r"recipe='.*nothing'"):
        trainable(recipe)


@pytest.mark.parametrize(
    ("launcher", "package"),
    [("joblib", "hydra-joblib-launcher"), ("submitit_local", "hydra-submitit-launcher"),
     ("submitit_slurm", "hydra-submitit-launcher"), ("ray", "'torchrl-kit[ray]'")],
)  # fmt: skip
def test_sweep_names_package_of_missing_launcher(launcher, package, capsys, monkeypatch):
    monkeypatch.setattr(ConfigStore, "list", lambda *_: ["basic.yaml", "ray.yaml"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(
            recipes.ppo.Config, recipes.ppo.build, ["-m", "seed=0,1", f"hydra/launcher={launcher}"]
        )
    assert capsys.readouterr().err == (
        f"\nerror: hydra/launcher={launcher!r}: The launcher is not installed. "
        f"Install it: pip install {package}.\n"
    )


def test_sweep_suggests_name_of_misspelled_launcher(capsys):
    with pytest.raises(SystemExit):
        main(recipes.ppo.Config, recipes.ppo.build, ["-m", "seed=0,1", "hydra/launcher=jobib"])
    error = "hydra/launcher='jobib' is not a valid choice. Try: joblib, "
    assert one_line(capsys.readouterr().err).startswith(error)


@pytest.mark.parametrize(("failures", "starts"), [(2, True), (3, False)])
def test_ray_session_tries_three_times_to_start(failures, starts, monkeypatch):
    ray = pytest.importorskip("ray")
    calls = []

    def init(address, **_):
        calls.append(address)
        if len(calls) <= failures:
            raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if starts:
        with ray_session("collector", "ray"):
            pass
    else:
        error = "^collector='ray': Ray did not start in 3 attempts: The current node timed out"
        with pytest.raises(SettingError, match=error), ray_session("collector", "ray"):
            raise AssertionError("not reached")
    assert calls == ["local"] * 3
