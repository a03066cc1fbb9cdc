"""A run's folder belongs to one run, and to one process at a time."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from filelock import FileLock
from tensordict import TensorDict

import kit.runs.run_folder
import recipes.dreamerv1
import recipes.dreamerv3
import recipes.ppo
import recipes.rainbow
import recipes.sac
import recipes.td3
from kit.config import EnvConfig
from kit.evaluate import SavedRun
from kit.hooks import Hook, StopWhen
from kit.logging.files import WriteError
from kit.runs.lock import RunLock
from kit.runs.run_folder import make_new, new_sweep
from kit.runs.saved_runs import find_run
from kit.steps import SettingError
from kit.steps.settings import OffPolicySteps, OnPolicySteps
from kit.trainer import Trainer
from kit.trainer.stages import HookError
from recipes.ppo import build
from tests.errors import raises_setting
from tests.short_runs import policy_steps_in, the_run, tiny_config
from tests.tiny import assert_equal, weights
from tests.world import runs as worlds


class SameSecond(kit.runs.run_folder.datetime):
    @classmethod
    def now(cls):
        return cls(2025, 1, 2, 3, 4, 5)


@pytest.fixture
def _same_second(monkeypatch):
    monkeypatch.setattr(kit.runs.run_folder, "datetime", SameSecond)


# ---------------------------------------------------------------------- names
@pytest.mark.parametrize("stage", ["post_steps", "before it begins"])
def test_run_keeps_folder_when_working_directory_changes(stage, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    trainer = build(tiny_config(Path("tüb [1]")))
    if stage == "post_steps":
        trainer.register_op(stage, lambda: os.chdir(tmp_path / "elsewhere"))
    else:
        os.chdir(tmp_path / "elsewhere")
    trainer.run()
    assert not [*(tmp_path / "elsewhere").iterdir()]
    folder = find_run("latest", tmp_path / "tüb [1]" / "runs", "ppo")
    assert trainer.folder == folder
    assert {"config.yaml", "plan.txt", "metrics.csv", "checkpoints"} <= {*os.listdir(folder)}


@pytest.mark.usefixtures("_same_second")
def test_runs_built_in_same_second_have_distinct_folders(tmp_path):
    trainers = [build(tiny_config(tmp_path)) for _ in range(3)]  # and none has begun
    names = [trainer.folder.name for trainer in trainers]
    assert names == ["20250102-030405-s0", "20250102-030405-s0-2", "20250102-030405-s0-3"]


@pytest.mark.usefixtures("_same_second")
def test_sweeps_created_in_same_second_have_distinct_folders(tmp_path):
    names = [new_sweep(tmp_path, "ppo").name for _ in range(2)]
    assert names == ["20250102-030405", "20250102-030405-2"]


def test_unstarted_run_leaves_no_folder(tmp_path):
    trainer = build(tiny_config(tmp_path))
    assert trainer.folder.is_dir()
    del trainer
    gc.collect()
    assert not (tmp_path / "runs").exists()


def test_resume_leaves_files_unchanged_when_shut_down_early(tmp_path):
    run = stopped_run(tmp_path)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    build(tiny_config(tmp_path, resume=str(run))).shutdown()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_build_raises_write_error_when_folder_cannot_be_created(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(WriteError, match="cannot be written"):
        build(tiny_config(tmp_path))


def test_make_new_rejects_dangling_link(tmp_path):
    (tmp_path / "CartPole-v1").symlink_to(tmp_path / "nowhere")
    with pytest.raises(WriteError, match="CartPole-v1 cannot be written: File exists"):
        make_new(tmp_path / "CartPole-v1" / "first")


def begun(runs: Path, name: str, at: int = 1) -> Path:
    """A run folder of this name, in which nothing was trained."""
    folder = runs / "ppo" / "Env-v0" / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    os.utime(folder / "config.yaml", (at, at))
    return folder


@pytest.mark.parametrize(
    ("names", "latest"),
    [
        (["-s0-2", "-s0-10", "-s0"], "-s0-10"),  # by number and not by letter
        (["baseline", "-s0", "~copy", "99-seeds"], "-s0"),  # other names are older
    ],
)
def test_find_run_selects_latest_by_name(names, latest, tmp_path):
    for name in names:
        begun(tmp_path, f"20250101-000000{name}" if name.startswith("-") else name)
    for recipe in ("ppo", None):
        assert find_run("latest", tmp_path, recipe).name == f"20250101-000000{latest}"


def test_find_run_selects_last_started_within_same_second(tmp_path):
    for began, name in enumerate(("000000-s7", "000000-s0", "000001-s1")):
        folder = begun(tmp_path, f"20250101-{name}", at=began % 2)
    assert find_run("latest", tmp_path, "ppo") == folder
    shutil.rmtree(folder)
    assert find_run("latest", tmp_path, "ppo").name == "20250101-000000-s0"


def test_find_run_ignores_config_inside_run_folder(tmp_path):
    run = begun(tmp_path, "20250101-000000-s0")
    begun(run, "below")
    assert find_run("latest", tmp_path, "ppo") == run


# ---------------------------------------------------------------------- one process at a time
HOLDS = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""

TAKES = """
import sys, pathlib
from kit.runs.lock import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


def stopped_run(tmp_path: Path) -> Path:
    build(tiny_config(tmp_path), hooks=[StopWhen("policy_steps", reached=32)]).run()
    return the_run(tmp_path)


def locked_by(run: Path, **changes: object) -> Path:
    lock, this = run / RunLock.NAME, {"host": socket.gethostname(), "pid": 1}
    lock.write_text(json.dumps({**this, **changes}))
    return lock


def test_resume_rejects_running_run_and_names_process(tmp_path):
    run = stopped_run(tmp_path)
    rows = (run / "metrics.csv").read_bytes()
    lock = locked_by(run, pid=12345)
    command = [sys.executable, "-c", HOLDS, str(lock.with_name(RunLock.FILE))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        holder.stdout.readline()
        with pytest.raises(SettingError) as refused:
            build(tiny_config(tmp_path, resume=str(run)))
        holder.stdin.close()
    host = socket.gethostname()
    assert str(refused.value) == (
        f"resume={str(run)!r}: The run is in use by process 12345 on {host}. "
        "Wait for it, or end it with: kill 12345."
    )
    assert (run / "metrics.csv").read_bytes() == rows


def test_build_raises_write_error_when_disk_is_full(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileLock, "acquire", full)
    with pytest.raises(WriteError, match="lock cannot be written: No space left on device"):
        build(tiny_config(tmp_path))


def test_resume_takes_over_lock_of_dead_process(tmp_path):
    run = stopped_run(tmp_path)
    lock = locked_by(run)  # of a process that had the number of one that lives
    resumed = build(tiny_config(tmp_path, resume=str(run)))
    assert json.loads(lock.read_text())["pid"] == os.getpid()
    resumed.run()
    assert policy_steps_in(run) == [16, 32, 48, 64]
    assert not lock.exists()


def removed(lock: RunLock) -> None:
    """Remove the files of a lock, as somebody may who takes them for leftovers."""
    lock.path.unlink()
    (lock.folder / RunLock.FILE).unlink()


def test_lock_check_rejects_lock_held_by_another_process(tmp_path):
    lock = RunLock(tmp_path)
    lock.begin()
    removed(lock)
    command = [sys.executable, "-c", TAKES, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        other.stdout.readline()
        with pytest.raises(SettingError, match=f"in use by process {other.pid} on .*. Wait"):
            lock.check()
        lock.release()
        assert lock.path.exists()
        other.kill()
    RunLock(tmp_path).release()  # the system unlocks what a killed process held
    assert not lock.path.exists()


class RemovesLock(Hook):
    """Removes the lock of its run."""

    operations = {"post_steps": "remove"}  # noqa: RUF012

    def remove(self) -> None:
        removed(RunLock._of_this_process[self.trainer.folder.resolve()])


def test_run_continues_when_lock_is_removed(tmp_path):
    trainer = build(tiny_config(tmp_path), hooks=[RemovesLock()])
    trainer.run()
    assert policy_steps_in(the_run(tmp_path)) == [16, 32, 48, 64]
    assert not (the_run(tmp_path) / RunLock.NAME).exists()


def test_resume_rejects_lock_of_another_machine(tmp_path):
    run = stopped_run(tmp_path)
    lock = locked_by(run, host="elsewhere", pid=7)
    with pytest.raises(SettingError) as refused:
        build(tiny_config(tmp_path, resume=str(run)))
    assert str(refused.value) == (
        f"resume={str(run)!r}: The run is in use by process 7 on elsewhere, another machine. "
        f"End that process. If it has ended, remove {lock} and resume again."
    )
    lock.unlink()
    build(tiny_config(tmp_path, resume=str(run))).run()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"pid": 7}', '{"host": "x", "pid": "1; x", "started": "7"}']
)
def test_resume_takes_over_invalid_lock(text, tmp_path):
    run = stopped_run(tmp_path)
    (run / RunLock.NAME).write_text(text)
    build(tiny_config(tmp_path, resume=str(run))).run()


def test_unstarted_run_releases_lock_to_next_build(tmp_path):
    run = stopped_run(tmp_path)
    one, other = (build(tiny_config(tmp_path, resume=str(run))) for _ in range(2))
    with pytest.raises(HookError, match="is in use by process"):
        one.run()
    other.run()
    assert policy_steps_in(run) == [16, 32, 48, 64]


# ---------------------------------------------------------------------- what goes wrong
def test_save_raises_write_error_before_run_starts(tmp_path):
    with pytest.raises(WriteError, match="or the run has not started"):
        build(tiny_config(tmp_path)).save()


class Removes(Hook):
    """Removes the run folder in the third iteration."""

    operations = {"post_steps": "look"}  # noqa: RUF012

    def look(self) -> None:
        if self.trainer.policy_steps == 48:
            shutil.rmtree(self.trainer.folder)


@pytest.mark.parametrize("log_every", [16, 64])
def test_run_raises_write_error_when_folder_is_removed(log_every, tmp_path):
    config = tiny_config(tmp_path, log_every=log_every)
    with pytest.raises(WriteError, match="was removed"):
        build(config, hooks=[Removes()]).run()
    assert not list((tmp_path / "runs").rglob("checkpoint-*"))


def test_resume_removes_partial_files_of_killed_run(tmp_path):
    run = stopped_run(tmp_path)
    for name in ("metrics.csv.new", "curve.png.new", "checkpoints/.checkpoint-x/new/components/a"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("half")
    build(tiny_config(tmp_path, resume=str(run)))
    assert not [path for path in run.rglob("*") if path.name.endswith(".new")]
    assert not list((run / "checkpoints").glob(".*"))


def test_resume_removes_outdated_checkpoint_of_killed_run(tmp_path):
    run = stopped_run(tmp_path)
    checkpoints = run / "checkpoints"
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == ["checkpoint-000000000016", "checkpoint-000000000032"]
    shutil.copytree(checkpoints / names[0], checkpoints / "checkpoint-000000000008")
    build(tiny_config(tmp_path, resume=str(run)))
    assert sorted(path.name for path in checkpoints.iterdir()) == names


def test_resume_allows_changed_monitoring_settings(tmp_path):
    run, changes = stopped_run(tmp_path), {"progress": True, "time_limit": 1e6, "logger": "none"}
    build(tiny_config(tmp_path, resume=str(run), **changes)).run()
    assert policy_steps_in(run) == [16, 32, 48, 64]


def test_rows_do_not_depend_on_checkpoint_interval(tmp_path):
    rows = []
    for number, every in enumerate((16, 48)):
        config = tiny_config(tmp_path / str(number), checkpoint_every=every, log_every=32)
        build(config).run()
        rows.append((the_run(tmp_path / str(number)) / "metrics.csv").read_bytes())
    assert rows[0] == rows[1]


def test_resume_rejects_unreadable_checkpoints_folder(tmp_path, monkeypatch):
    run, listed = stopped_run(tmp_path), os.listdir
    rows = (run / "metrics.csv").read_bytes()

    def unreadable(folder):
        if Path(folder).name == "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(os, "listdir", unreadable)
    with raises_setting("checkpoint"):
        build(tiny_config(tmp_path, resume=str(run)))
    assert (run / "metrics.csv").read_bytes() == rows


def test_resume_rejects_config_that_is_not_utf_8(tmp_path):
    run = stopped_run(tmp_path)
    (run / "config.yaml").write_bytes(b"recipe: caf\xe9")
    with raises_setting("resume"):
        build(tiny_config(tmp_path, resume=str(run)))


# ---------------------------------------------------------------------- weights of another run
@pytest.mark.parametrize("recipe", [recipes.ppo, recipes.sac])
def test_init_from_copies_weights_and_normalization(recipe, tmp_path):
    """Its first evaluation is the last one of the other run."""
    env = EnvConfig(
        id="CartPole-v1" if recipe is recipes.ppo else "Pendulum-v1",
        num_envs=2, normalize_observation=True,
    )  # fmt: skip
    if recipe is recipes.ppo:
        one: Any = OnPolicySteps(total_policy_steps=256, steps_per_env=32, evaluation_every=256)
        other: Any = OnPolicySteps(total_policy_steps=128, steps_per_env=16)
    else:
        one = OffPolicySteps(total_policy_steps=200, learning_starts=100, evaluation_every=200)
        other = OffPolicySteps(total_policy_steps=120, learning_starts=110)
    for steps in (one, other):
        steps.evaluation_episodes, steps.minibatch_size = 2, 32
    settings = {"env": env, "log_dir": str(tmp_path), "progress": False, "hidden_sizes": [8]}
    first = recipe.build(recipe.Config(steps=one, **settings))
    first.run()
    wanted = first.evaluate(0)

    second = recipe.build(recipe.Config(steps=other, init_from=str(first.folder), **settings))
    assert second.ledger.policy_steps == 0
    assert second.evaluate(0) == wanted
    assert_equal(weights(first), weights(second))
    second.run()
    assert second.ledger.policy_steps == other.total_policy_steps
    assert SavedRun(second.folder).trainer.evaluate is not None

    shutil.rmtree(first.folder)  # a saved run needs the other one no more
    assert SavedRun(second.folder).policy_steps == other.total_policy_steps
    for start in (None, "latest", str(first.folder)):
        again = recipe.Config(steps=other, init_from=start, resume=str(second.folder), **settings)
        resumed = recipe.build(again)
        assert_equal(weights(second), weights(resumed))
        resumed.shutdown()


def test_resume_uses_defaults_for_settings_missing_in_old_config(tmp_path, monkeypatch):
    plain = kit.runs.run_folder.to_plain

    def older(config):
        return {name: value for name, value in plain(config).items() if name != "squash_actions"}

    with monkeypatch.context() as before:
        before.setattr(kit.runs.run_folder, "to_plain", older)
        build(tiny_config(tmp_path)).run()
    build(tiny_config(tmp_path, resume="latest")).shutdown()
    with raises_setting("resume"):
        build(tiny_config(tmp_path, resume="latest", squash_actions=True))


def test_resume_rejects_changed_init_from(tmp_path):
    build(tiny_config(tmp_path)).run()
    first = str(the_run(tmp_path))
    second = build(tiny_config(tmp_path, init_from=first))
    second.run()
    for run, start in ((first, str(second.folder)), (first, "latest"), (second.folder, "nowhere")):
        with raises_setting("resume"):
            build(tiny_config(tmp_path, init_from=start, resume=str(run)))


@pytest.mark.parametrize(
    ("before", "after", "fits"),
    [
        ("learning_rate: 0.0005", "learning_rate: 0.1", False),
        ("logger: csv", "logger: none", True),
    ],
)
def test_resume_compares_edited_config_with_checkpoint(before, after, fits, tmp_path):
    build(tiny_config(tmp_path)).run()
    folder = the_run(tmp_path)
    text = (folder / "config.yaml").read_text()
    assert text.count(f"\n{before}\n") == 1
    (folder / "config.yaml").write_text(text.replace(before, after))
    config = recipes.ppo.Config(**vars(tiny_config(tmp_path)) | {"resume": str(folder)})
    name, value = after.split(": ")
    setattr(config, name, value if value == "none" else float(value))
    if fits:
        build(config).shutdown()
        return
    with raises_setting("resume"):
        build(config)


def test_resume_without_checkpoint_restores_initial_weights(tmp_path):
    build(tiny_config(tmp_path)).run()
    second = build(tiny_config(tmp_path, init_from=str(the_run(tmp_path)), seed=1))
    wanted = {name: value.clone() for name, value in weights(second).items()}
    second.run()
    shutil.rmtree(second.folder / "checkpoints")
    again = tiny_config(tmp_path, init_from=None, seed=1, resume=str(second.folder))
    assert_equal(wanted, weights(build(again)))


def test_init_from_rejects_missing_or_incompatible_run(tmp_path):
    steps = OnPolicySteps(total_policy_steps=64, steps_per_env=8, minibatch_size=32)
    settings = {"steps": steps, "log_dir": str(tmp_path), "progress": False}
    first = recipes.ppo.build(recipes.ppo.Config(hidden_sizes=[8], **settings))
    with raises_setting("init_from"):
        recipes.ppo.build(recipes.ppo.Config(init_from="elsewhere", **settings))
    first.run()
    with raises_setting("init_from"):
        recipes.ppo.build(recipes.ppo.Config(hidden_sizes=[9], init_from="latest", **settings))
    same = {"hidden_sizes": [8], "init_from": "latest", **settings}
    with raises_setting("init_from"):
        recipes.ppo.build(recipes.ppo.Config(collector="async", **same))


def test_init_from_rejects_run_without_checkpoint(tmp_path):
    build(tiny_config(tmp_path)).run()
    shutil.rmtree(the_run(tmp_path) / "checkpoints")
    with raises_setting("init_from") as refused:
        build(tiny_config(tmp_path, init_from="latest"))
    assert refused.value.works == "Continue the run"


class Numbers(gym.Env[Any, Any]):
    """Observations and actions of so many numbers, with such bounds."""

    def __init__(self, seen: int = 2, chosen: int = 1, high: float = 2.0) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (seen,), np.float32)
        self.action_space = gym.spaces.Box(-high, high, (chosen,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, self.observation_space.shape).astype(np.float32), {}

    def step(self, action):
        observation, info = self.reset()
        return observation, 0.0, False, True, info


gym.register("kit/Numbers-v0", Numbers)


@pytest.mark.parametrize(
    ("theirs", "mine"), [({"chosen": 1}, {"chosen": 2}), ({"seen": 1}, {"seen": 3})]
)
def test_init_from_rejects_weights_that_would_broadcast(theirs, mine, tmp_path):
    """TensorDict copies one row of weights into two."""
    build(tiny_config(tmp_path, env=EnvConfig("kit/Numbers-v0", num_envs=2, kwargs=theirs))).run()
    env = EnvConfig("kit/Numbers-v0", num_envs=2, kwargs=mine)
    with raises_setting("init_from"):
        build(tiny_config(tmp_path, env=env, init_from="latest"))


def rainbow(tmp_path: Path, **changes: Any) -> Trainer:
    """A short run of Rainbow."""
    steps = OffPolicySteps(
        total_policy_steps=60, steps_per_env=1, learning_starts=30, minibatch_size=16
    )
    config = recipes.rainbow.Config(
        env=EnvConfig(num_envs=1), hidden_sizes=[8], log_dir=str(tmp_path), steps=steps,
        progress=False, **changes,
    )  # fmt: skip
    return recipes.rainbow.build(config)


def test_init_from_rejects_weights_with_other_names(tmp_path):
    """TensorDict passes over names that it does not have: the networks would stay untrained."""
    rainbow(tmp_path, noisy=True).run()
    with raises_setting("init_from"):
        rainbow(tmp_path, noisy=False, init_from="latest")


def test_init_from_uses_action_bounds_of_new_env(tmp_path):
    settings: dict[str, Any] = {
        "hidden_sizes": [8], "log_dir": str(tmp_path), "progress": False,
        "steps": OffPolicySteps(total_policy_steps=40, learning_starts=20, minibatch_size=8),
    }  # fmt: skip
    first, second = (EnvConfig("kit/Numbers-v0", 1, kwargs={"high": high}) for high in (2.0, 0.5))
    recipes.td3.build(recipes.td3.Config(env=first, **settings)).run()
    config = recipes.td3.Config(env=second, init_from="latest", **settings)
    actor, _ = recipes.td3.build(config).evaluate.policy.module  # the other is noise, which clips
    rows = TensorDict({"observation": torch.full((1, 2), 1e6)}, [1])
    assert actor(rows)["action"].abs() == 0.5


def test_world_model_uses_action_bounds_of_new_env(tmp_path):
    recipe = recipes.dreamerv3
    first, second = (EnvConfig("kit/Numbers-v0", 1, kwargs={"high": high}) for high in (2.0, 0.5))
    worlds.build(recipe, tmp_path, env=first).run()
    player = worlds.build(recipe, tmp_path, env=second, init_from="latest").evaluate.policy
    code = player.world_model.code
    action = torch.tensor([[-0.5], [0.25]])
    assert code.encode(action).tolist() == [[-1.0], [0.5]]
    assert torch.equal(code.decode(code.encode(action)), action)


def test_init_from_does_not_copy_loss_coefficients(tmp_path):
    """TorchRL keeps coefficients of losses beside their weights; an annealed one would be 0."""
    steps = OnPolicySteps(total_policy_steps=64, steps_per_env=8, minibatch_size=32)
    settings = {"steps": steps, "log_dir": str(tmp_path), "progress": False, "hidden_sizes": [8]}
    first = recipes.ppo.Config(clip_schedule="linear", entropy_coeff=0.0, **settings)
    recipes.ppo.build(first).run()
    given = {"clip_epsilon": 0.3, "entropy_coeff": 0.1, "init_from": "latest"}
    second = recipes.ppo.build(recipes.ppo.Config(**given, **settings)).loss_module
    assert [float(second.clip_epsilon), float(second.entropy_coeff)] == pytest.approx([0.3, 0.1])

    steps = OffPolicySteps(total_policy_steps=60, learning_starts=30, minibatch_size=16)
    settings |= {"steps": steps, "env": EnvConfig(id="Pendulum-v1", num_envs=1)}
    recipes.sac.build(recipes.sac.Config(**settings)).run()
    given = {"gamma": 0.5, "fixed_alpha": True, "initial_alpha": 0.5, "init_from": "latest"}
    loss = recipes.sac.build(recipes.sac.Config(**given, **settings)).loss_module
    assert float(loss._value_estimator.gamma) == 0.5
    assert float(loss.log_alpha.exp()) == pytest.approx(0.5)


def test_init_from_rejects_changed_initial_alpha(tmp_path):
    """A run of the same words goes on: what was its beginning there is its default."""
    recipe, name = recipes.sac, "initial_alpha"
    steps = OffPolicySteps(total_policy_steps=60, learning_starts=30, minibatch_size=16)
    settings = {
        "steps": steps, "log_dir": str(tmp_path), "progress": False, "hidden_sizes": [8],
        "env": EnvConfig(id="Pendulum-v1", num_envs=1),
    }  # fmt: skip
    recipe.build(recipe.Config(**{name: 0.5}, **settings)).run()
    recipe.build(recipe.Config(**{name: 0.5}, init_from="latest", **settings)).shutdown()
    with raises_setting(name):
        recipe.build(recipe.Config(**{name: 0.25}, init_from="latest", **settings))


def test_init_from_rejects_different_activation(tmp_path):
    build(tiny_config(tmp_path, activation="relu")).run()
    with raises_setting("activation"):
        build(tiny_config(tmp_path, init_from="latest"))
    build(tiny_config(tmp_path)).run()
    build(tiny_config(tmp_path, init_from="latest", activation="sigmoid_tanh")).shutdown()


def test_init_from_rejects_different_support_or_head(tmp_path):
    rainbow(tmp_path, support=[-1.0, 5.0]).run()
    for name, mine in (("support", [0.0, 200.0]), ("head", "quantile")):
        with raises_setting(name):
            rainbow(tmp_path, init_from="latest", **{name: mine})
    rainbow(tmp_path, init_from="latest", support=[-1.0, 5.0]).shutdown()


@pytest.mark.parametrize(
    ("theirs", "mine", "message"),
    [
        ((True, True), (False, True), "observation=False.* loaded state normalises .* True"),
        (
            (False, True),
            (True, True),
            "observation=True.* loaded state normalises .* False",
        ),
        ((True, False), (True, True), "reward=True: The run normalises .* False"),
        (
            (False, True),
            (False, False),
            "observation=False: .* uses normalisation. Normalise the same",
        ),
        ((False, False), (False, True), "reward=True: The run .* does not use normalisation"),
    ],
)
def test_init_from_rejects_different_normalization(theirs, mine, message, tmp_path):
    names = ("normalize_observation", "normalize_reward")
    theirs, mine = (EnvConfig(num_envs=2, **dict(zip(names, values))) for values in (theirs, mine))
    build(tiny_config(tmp_path, env=theirs)).run()
    with pytest.raises(SettingError, match=rf"^env\.normalize_{message}"):
        build(tiny_config(tmp_path, env=mine, init_from="latest"))


def test_init_from_allows_disabling_reward_normalization(tmp_path):
    names = ("normalize_observation", "normalize_reward")
    theirs, mine = (EnvConfig(num_envs=2, **dict(zip(names, [True, on]))) for on in (True, False))
    first = build(tiny_config(tmp_path, env=theirs))
    first.run()
    second = build(tiny_config(tmp_path, env=mine, init_from="latest"))
    known = [one.collector.normalizer.observation["observation"] for one in (first, second)]
    assert all(torch.equal(*pair) for pair in zip(*known))
