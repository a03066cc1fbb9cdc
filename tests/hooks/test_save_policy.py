"""A policy alone: what its folder has, and who reads it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import recipes.dqn
import recipes.ppo
from kit.evaluate import SavedRun
from kit.experiment import EnvConfig
from kit.hooks import Hook, NonFiniteError, SavePolicy, StopWhen, TimeLimit
from kit.logging import RowLogger
from kit.steps.settings import OffPolicySteps, OnPolicySteps
from tests.errors import raises_setting
from tests.tiny import on_policy_plan, ppo_trainer, weights


def ppo(tmp_path: Path, **changes) -> recipes.ppo.Config:
    """Two iterations of 16 policy steps, each followed by an evaluation."""
    settings = {
        "env": EnvConfig(num_envs=2, normalize_observation=True),
        "steps": OnPolicySteps(
            total_policy_steps=32, steps_per_env=8, update_epochs=1, minibatch_size=8,
            evaluation_every=16, evaluation_episodes=2,
        ),
        "hidden_sizes": [8], "log_dir": str(tmp_path / "runs"), "progress": False,
        "save_policy": True,
    }  # fmt: skip
    return recipes.ppo.Config(**{**settings, **changes})


class Kept(RowLogger):
    """Keeps what it is told of policies."""

    def __init__(self) -> None:
        self.told: list[tuple[Path, int]] = []

    def log_policy(self, folder, row):
        self.told.append((folder, row["policy_steps"]))


class Stops(Hook):
    operations: ClassVar = {"post_steps": "stop"}

    def stop(self):
        if self.trainer.policy_steps == 32:
            raise OSError("a power cut")


def test_resumed_run_writes_policy_missing_from_finished_run(tmp_path):
    trainer = recipes.ppo.build(ppo(tmp_path, save_policy=False))
    trainer.run()
    resumed = recipes.ppo.build(ppo(tmp_path, resume=str(trainer.folder)))
    resumed.run()
    assert SavedRun(trainer.folder / "policy").policy_steps == 32


@pytest.mark.parametrize("best", [False, True])
def test_moved_policy_folder_restores_last_and_best_policy(best, tmp_path):
    trainer = recipes.ppo.build(ppo(tmp_path))
    trainer.run()
    elsewhere = Path(shutil.move(trainer.folder / "policy", tmp_path / "elsewhere"))
    alone, whole = (SavedRun(folder, best=best) for folder in (elsewhere, trainer.folder))
    assert (alone.policy_steps, alone.gradient_steps) == (whole.policy_steps, whole.gradient_steps)
    expected, found = weights(whole.trainer), weights(alone.trainer)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    normalizers = [run.trainer.collector.env.normalizer.state_dict() for run in (alone, whole)]
    assert repr(normalizers[0]) == repr(normalizers[1])
    assert alone.evaluator(3, seed=5)(0) == whole.evaluator(3, seed=5)(0)


def test_new_run_initialises_from_saved_policy(tmp_path):
    trainer = recipes.ppo.build(ppo(tmp_path))
    trainer.run()
    new = recipes.ppo.build(ppo(tmp_path, init_from=str(trainer.folder / "policy")))
    begun, ended = weights(new), weights(trainer)
    assert all(torch.equal(value, begun[name]) for name, value in ended.items())


def test_saved_policy_omits_training_state_and_rejects_resume(tmp_path):
    config = recipes.dqn.Config(
        steps=OffPolicySteps(
            total_policy_steps=40, steps_per_env=1, learning_starts=20, minibatch_size=8
        ),
        log_dir=str(tmp_path), progress=False, save_policy=True,
    )  # fmt: skip
    trainer = recipes.dqn.build(config)
    trainer.run()
    folder = trainer.folder / "policy"
    (checkpoint,) = (folder / "checkpoints").iterdir()
    parts = {path.name.partition("-")[2] for path in (checkpoint / "components").iterdir()}
    assert parts == {"loss_module", "hook%20best_policy"}
    config.resume = str(folder)
    with raises_setting("checkpoint"):
        recipes.dqn.build(config)


def test_run_writes_policy_once_and_passes_it_to_loggers(tmp_path):
    kept = Kept()
    trainer = recipes.ppo.build(ppo(tmp_path, checkpoint_every=16), logger=[kept])
    trainer.run()
    assert kept.told == [(trainer.folder / "policy", 32)]


def test_run_stopped_by_hook_saves_policy(tmp_path):
    kept = Kept()
    stop = StopWhen("evaluation/return", reached=0)
    trainer = recipes.ppo.build(ppo(tmp_path), logger=[kept], hooks=[stop])
    trainer.run()
    assert kept.told == [(trainer.folder / "policy", 16)]


def test_run_stopped_while_saving_logs_last_row_and_policy(tmp_path):
    kept = Kept()
    config = ppo(tmp_path, checkpoint_every=16, log_every=32)
    config.steps.evaluation_every = None
    trainer = recipes.ppo.build(config, logger=[kept])
    trainer.register_op("save", lambda: trainer.request_stop())
    trainer.run()
    assert trainer.ledger.policy_steps == trainer.journal.latest["policy_steps"] == 16
    assert kept.told == [(trainer.folder / "policy", 16)]


def test_failed_run_saves_no_policy_until_resumed(tmp_path):
    first = recipes.ppo.build(ppo(tmp_path, checkpoint_every=16), hooks=[Stops()])
    with pytest.raises(RuntimeError, match="a power cut"):
        first.run()
    assert not (first.folder / "policy").exists()
    recipes.ppo.build(ppo(tmp_path, checkpoint_every=16, resume=str(first.folder))).run()
    assert SavedRun(first.folder / "policy").policy_steps == 32


def test_run_with_non_finite_loss_saves_no_policy(tmp_path):
    config, kept = ppo(tmp_path, log_every=32), Kept()
    config.steps.evaluation_every = None
    trainer = recipes.ppo.build(config, logger=[kept], hooks=[TimeLimit(1e-9)])
    trainer.register_op("process_loss", lambda _, losses: losses.apply(lambda one: one * math.nan))
    with pytest.raises(NonFiniteError):
        trainer.run()
    assert kept.told == []
    assert not (trainer.folder / "policy").exists()


def test_saving_policy_does_not_change_run(tmp_path):
    plain, saved = (recipes.ppo.build(ppo(tmp_path, save_policy=it)) for it in (False, True))
    plain.run()
    saved.run()
    without, with_policy = weights(plain), weights(saved)
    assert all(torch.equal(value, with_policy[name]) for name, value in without.items())
    rows = [(trainer.folder / "metrics.csv").read_bytes() for trainer in (plain, saved)]
    assert rows[0] == rows[1]


def test_save_policy_requires_run_folder(tmp_path):
    with raises_setting("save_policy"):
        recipes.ppo.build(ppo(tmp_path, log_dir=None))
    with raises_setting("SavePolicy"):
        ppo_trainer(on_policy_plan(), hooks=[SavePolicy(tmp_path / "policy")])
