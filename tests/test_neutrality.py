"""Observers change nothing: with and without them a run trains bitwise the same weights."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.record.loggers.csv import CSVLogger
from torchrl.trainers import CountFramesLog, EarlyStopping, LogScalar, LogTiming

import recipes.ppo
import recipes.sac
from kit.experiment import EnvConfig, seed_everything
from kit.hooks import BestPolicy, Console, Hook, LearningCurve, NaNGuard, StopWhen, TimeLimit
from kit.logging.loggers import CsvLogger, TorchRLLogger, WandbLogger, make_loggers
from kit.steps.settings import OffPolicySteps, OnPolicySteps
from kit.trainer import Trainer
from tests.tiny import (
    Rows,
    assert_same,
    evaluator_for,
    off_policy_plan,
    on_policy_plan,
    ppo_parts,
    sac_parts,
)

FAMILIES = {
    "ppo": (on_policy_plan(), ppo_parts, "CartPole-v1"),
    "sac": (off_policy_plan(), sac_parts, "Pendulum-v1"),
}
both_families = pytest.mark.parametrize("family", list(FAMILIES))


def end_state(trainer: Trainer) -> dict[str, Any]:
    """Everything that training has made, and where all random numbers are."""
    normalizer = trainer.collector.normalizer
    state = {
        "weights": dict(trainer.loss_module.state_dict()),
        "update": trainer.update.state_dict(),
        "collector": dict(trainer.collector.state_dict()),
        "buffer": trainer.buffer.state_dict(),
        "normalizer": None if normalizer is None else normalizer.state_dict(),
        "random numbers": (torch.get_rng_state(), random.getstate(), np.random.get_state()),
    }
    del state["collector"]["finished"]  # episodes that no row has told yet
    return state


def run(family: str, changes: dict[str, Any] | None = None, **observers: Any) -> dict[str, Any]:
    """Run a small PPO or SAC with some observers and return how it ended."""
    seed_everything(0)
    plan, parts_of, _ = FAMILIES[family]
    plan = plan.replace(**changes or {})
    trainer = Trainer(plan, **parts_of(plan), **observers)
    trainer.run()
    assert trainer.stop_reason is None
    return end_state(trainer)


@pytest.fixture(scope="module")
def alone() -> Callable[[str], dict[str, Any]]:
    """The end of a run without observers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ends = {family: run(family) for family in FAMILIES}
    torch.set_num_threads(threads)
    return ends.__getitem__


# ---------------------------------------------------------------------- one at a time
class Watching(Hook):
    """Looks at everything that observers are shown."""

    STAGES = (
        "batch_process", "pre_steps_log", "pre_epoch_log", "pre_epoch", "process_optim_batch",
        "post_loss", "post_optim_log", "post_epoch_log", "post_steps_log",
    )  # fmt: skip

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def register(self, trainer: Any, name: str | None = None) -> None:
        super().register(trainer, name)
        for stage in self.STAGES:
            trainer.register_op(stage, functools.partial(self.look, stage))
        trainer.register_op("process_loss", lambda minibatch, losses: None)

    def look(self, stage: str, batch: Any) -> None:
        self.seen.add(stage)
        assert all(bool(value.float().isfinite().all()) for value in batch.values(True, True))


Observers = Callable[[Path], dict[str, Any]]
OBSERVERS: dict[str, Observers] = {
    "rows": lambda folder: {"logger": Rows(), "log_every": 1},
    "csv": lambda folder: {"logger": CsvLogger(folder), "log_every": 1},
    "tensorboard": lambda folder: {"logger": make_loggers("tensorboard", folder), "log_every": 1},
    "wandb": lambda folder: {"logger": WandbLogger(folder), "log_every": 8},
    "torchrl's csv": lambda folder: {"logger": TorchRLLogger(CSVLogger("run", str(folder)))},
    "checkpoints": lambda folder: {"folder": folder, "checkpoint_every": 7},
    "console": lambda folder: {"hooks": [Console("a run")], "log_every": 1},
    "learning curve": lambda folder: {
        "hooks": [LearningCurve(folder)], "logger": CsvLogger(folder),
    },
    "guards": lambda folder: {"hooks": [NaNGuard(), TimeLimit(1e9)], "log_every": 1},
    "best policy": lambda folder: {"hooks": [BestPolicy("iterations")], "log_every": 1},
    "stop when": lambda folder: {
        "hooks": [StopWhen("episode/return", reached=1e9, patience=1_000)], "log_every": 1,
    },
    "torchrl's hooks": lambda folder: {
        "hooks": [
            LogScalar(("next", "reward"), logname="reward"), CountFramesLog(frame_skip=1),
            LogTiming(), EarlyStopping(monitor="reward", wait_for=0),
        ],
    },
}  # fmt: skip


@both_families
@pytest.mark.parametrize("name", list(OBSERVERS))
def test_observer_leaves_training_unchanged(name, family, alone, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert_same(run(family, **OBSERVERS[name](tmp_path)), alone(family))


@both_families
def test_read_only_hooks_leave_training_unchanged(family, alone):
    # A hook inside the gradient step has the loss run eagerly, which is bitwise the same.
    watching = Watching()
    assert_same(run(family, hooks=[watching], log_every=1), alone(family))
    assert watching.seen == set(Watching.STAGES)


@both_families
def test_evaluation_leaves_training_unchanged(family, alone):
    plan, parts_of, env = FAMILIES[family]
    often = plan.replace(
        evaluation_every=8, initial_evaluations=2, final_evaluation=True, evaluation_episodes=2
    )
    seed_everything(0)
    parts = parts_of(often)
    trainer = Trainer(often, **parts, evaluate=evaluator_for(parts, often, env))
    trainer.run()
    assert trainer.ledger.evaluations == {"ppo": 2 + 4, "sac": 2 + 5}[family]
    assert_same(end_state(trainer), alone(family))


@both_families
def test_comparison_detects_changed_weight(family, alone):
    def nudge(trainer: Trainer) -> None:
        if trainer.ledger.gradient_steps == 3:
            with torch.no_grad():
                next(trainer.loss_module.parameters()).view(-1)[0] += 1e-6

    class Meddling(Hook):
        def register(self, trainer: Any, name: str | None = None) -> None:
            super().register(trainer, name)
            trainer.register_op("post_optim", lambda: nudge(trainer))

    with pytest.raises(AssertionError):
        assert_same(run(family, hooks=[Meddling()])["weights"], alone(family)["weights"])


# ---------------------------------------------------------------------- recipes with everything
def ppo_config(**changes: Any) -> recipes.ppo.Config:
    env = EnvConfig(num_envs=2, normalize_observation=True, normalize_reward=True)
    steps = OnPolicySteps(
        total_policy_steps=256, steps_per_env=16, minibatch_size=16, update_epochs=2,
        evaluation_every=None, evaluation_episodes=2,
    )  # fmt: skip
    return recipes.ppo.Config(env=env, steps=steps, hidden_sizes=[8], **changes)


def sac_config(**changes: Any) -> recipes.sac.Config:
    env = EnvConfig(id="Pendulum-v1", num_envs=1, normalize_observation=True)
    steps = OffPolicySteps(
        total_policy_steps=64, learning_starts=16, minibatch_size=8, evaluation_every=None,
        evaluation_episodes=2,
    )  # fmt: skip
    return recipes.sac.Config(env=env, steps=steps, hidden_sizes=[8], n_step=2, **changes)


@pytest.mark.parametrize(
    ("recipe", "config"), [(recipes.ppo, ppo_config), (recipes.sac, sac_config)]
)
def test_recipe_trains_alike_with_observers_on_or_off(
    recipe, config, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    watched = config(
        logger="wandb,tensorboard", log_dir=str(tmp_path), log_every=1, checkpoint_every=16,
        time_limit=1e9, progress=True,
    )  # fmt: skip
    watched.steps.evaluation_every = 32
    hooks = [StopWhen(reached=1e9), LogScalar(("next", "reward"), logname="reward")]
    trainer = recipe.build(watched, hooks=hooks)
    trainer.run()
    with_everything = end_state(trainer)
    (folder,) = tmp_path.glob("*/*/*")
    written = {path.name for path in folder.iterdir()}
    assert written >= {"curve.png", "metrics.csv", "checkpoints", "wandb", "tensorboard"}
    assert "policy steps" in capsys.readouterr().out

    trainer = recipe.build(config(log_dir=None, progress=False))
    trainer.run()
    assert trainer.folder is None
    assert capsys.readouterr().out == ""
    assert_same(end_state(trainer), with_everything)
