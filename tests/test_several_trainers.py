"""Trainers in one process do not disturb each other, nor the process."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import recipes.ppo
import recipes.sac
from kit.buffers import ReplayMinibatches, make_replay_buffer
from kit.envs import make_env
from kit.experiment import EnvConfig, OffPolicySteps, OnPolicySteps
from kit.hooks import Evaluator
from kit.steps import SettingError
from kit.trainer import Trainer
from tests.errors import raises_setting
from tests.tiny import assert_equal, collector_of, off_policy_plan, weights


def ppo(seed: int, **changes: Any) -> Trainer:
    steps = OnPolicySteps(
        total_policy_steps=64, steps_per_env=8, minibatch_size=8, evaluation_every=32
    )
    settings: dict[str, Any] = {"env": EnvConfig(num_envs=2), "steps": steps, "hidden_sizes": [4]}
    return recipes.ppo.build(recipes.ppo.Config(seed=seed, **{**settings, **QUIET, **changes}))


def sac(seed: int, **changes: Any) -> Trainer:
    steps = OffPolicySteps(total_policy_steps=40, learning_starts=10, minibatch_size=4)
    settings: dict[str, Any] = {"steps": steps, "hidden_sizes": [4], "buffer_size": 50}
    return recipes.sac.build(recipes.sac.Config(seed=seed, **{**settings, **QUIET, **changes}))


QUIET: dict[str, Any] = {"progress": False, "log_dir": None, "logger": "none"}
RECIPES = pytest.mark.parametrize("build", [ppo, sac])


def alone(build: Any, seed: int) -> dict[str, torch.Tensor]:
    """The weights of a run that has the process for itself."""
    trainer = build(seed)
    trainer.run()
    return weights(trainer)


@RECIPES
def test_run_does_not_depend_on_other_builds_or_global_rng(build):
    expected = alone(build, 1), alone(build, 2)
    one, other = build(1), build(2)
    torch.manual_seed(77)
    np.random.seed(77)
    one.run()
    other.run()
    assert_equal(weights(one), expected[0])
    assert_equal(weights(other), expected[1])


def take_turns(*trainers: Trainer) -> None:
    """Iterations of trainers that have begun, one of each after the other."""
    while not trainers[0].schedule.done:
        for trainer in trainers:
            batch = trainer.collect()
            due = trainer.schedule.advance(trainer.batches.collected)
            trainer.train(batch, due.gradient_steps)
            trainer.finish_iteration(batch, due)


def begin_and_take_turns(*trainers: Trainer) -> None:
    for trainer in trainers:
        trainer.begin()
    take_turns(*trainers)
    for trainer in trainers:
        trainer.shutdown()


@RECIPES
def test_interleaved_and_nested_runs_match_separate_runs(build):
    expected = alone(build, 1), alone(build, 2)
    trainers = build(1), build(2)
    with contextlib.ExitStack() as running:
        for trainer in trainers:
            running.enter_context(trainer._lifecycle())
            trainer.begin()
        take_turns(*trainers)
    for trainer, wanted in zip(trainers, expected):
        assert_equal(weights(trainer), wanted)
    outer, inner = build(1), build(2)
    outer.register_op("post_steps", lambda: inner.run() if not inner.policy_steps else None)
    outer.run()
    assert_equal(weights(outer), expected[0])
    assert_equal(weights(inner), expected[1])


@RECIPES
@pytest.mark.parametrize("continues_episodes", [False, True])
def test_custom_loop_matches_run_with_hooks_and_rows(build, continues_episodes, tmp_path):
    if build is ppo:
        build = functools.partial(ppo, lr_schedule="linear")  # a hook with a beginning
    runs = {"log_dir": str(tmp_path), "logger": "csv", "checkpoint_every": 16}
    whole, own = build(1, **runs), build(1, **runs)
    whole.run()
    if continues_episodes:
        own.load(next(iter(sorted((whole.folder / "checkpoints").glob("checkpoint*")))))
    else:
        own.begin()
    take_turns(own)
    own.shutdown()
    assert_equal(weights(own), weights(whole))
    rows = [(one.folder / "metrics.csv").read_text().splitlines() for one in (whole, own)]
    assert rows[1][1:]
    assert rows[1][1:] == rows[0][-len(rows[1]) + 1 :]
    assert continues_episodes or rows[0] == rows[1]


def stores(number: int, buffer: Any, sequence_length: int | None = None, **parts: Any) -> Trainer:
    """A trainer that stores steps which have its number, and trains nothing."""
    plan = off_policy_plan(
        total_policy_steps=24,
        random_steps=24,
        learning_starts=0,
        replay_ratio=None,
        sequence_length=sequence_length,
    )
    env = make_env("CartPole-v1", 1, seed=number)
    collector = collector_of(plan, env, None)
    parts |= {"loss_module": torch.nn.Module(), "progress": False}
    made = Trainer(plan, collector=collector, buffer=buffer, **parts)

    def mark(batch: TensorDict) -> None:
        marked = torch.full(batch.shape, number)
        batch.set("trainer", marked).set(("next", "trainer"), marked.clone())

    made.register_op("batch_process", mark)
    return made


def test_shared_n_step_buffer_does_not_join_steps_of_trainers():
    buffer = make_replay_buffer(100, 4, n_step=3, gamma=0.9)
    begin_and_take_turns(stores(1, buffer), stores(2, buffer))
    rows = buffer.buffer[:]
    assert set(rows["trainer"].tolist()) == {1, 2}
    assert torch.equal(rows["trainer"], rows["next", "trainer"])


@pytest.mark.parametrize("wrapped", ["once", "by each trainer"])
def test_shared_buffer_separates_sequences_of_trainers(wrapped):
    buffer = make_replay_buffer(100, 4, sequence_length=3)
    other = buffer if wrapped == "once" else ReplayMinibatches(buffer.buffer)
    begin_and_take_turns(stores(1, buffer, sequence_length=3), stores(2, other, sequence_length=3))
    rows = buffer.buffer[:]
    changes = rows["trainer"][:-1] != rows["trainer"][1:]
    assert changes.any()
    assert rows["next", "done"][:-1][changes].all()


def test_resume_replaces_contents_of_used_buffer(tmp_path):
    def run(buffer: Any, **parts: Any) -> Any:
        trainer = stores(1, buffer, checkpoint_every=12, **parts)
        trainer.run()
        return dict(buffer.buffer[:].flatten_keys().items())

    whole = run(make_replay_buffer(100, 4, n_step=3, gamma=0.9), folder=tmp_path)
    checkpoint = min((tmp_path / "checkpoints").iterdir())
    used = make_replay_buffer(100, 4, n_step=3, gamma=0.9)
    stores(2, used).run()
    assert_equal(run(used, resume_from=checkpoint), whole)


def test_separate_buffers_do_not_truncate_episodes():
    buffer = make_replay_buffer(100, 4, n_step=3, gamma=0.9)
    begin_and_take_turns(
        stores(1, buffer), stores(2, make_replay_buffer(100, 4, n_step=3, gamma=0.9))
    )
    rows = buffer.buffer[:]
    assert (rows["next", "terminated"] == rows["next", "done"]).all()


def test_trainer_rejects_run_concurrent_with_another_thread():
    one, other, refused = ppo(1), ppo(2), []

    def run_beside():
        with raises_setting("trainer") as error:
            other.run()
        refused.append(error)

    def begin():
        thread = threading.Thread(target=run_beside)
        thread.start()
        thread.join()

    one.register_op("setup", begin)
    one.run()
    assert refused
    other.run()  # now it is alone
    assert_equal(weights(other), alone(ppo, 2))


def of_the_process() -> dict[str, Any]:
    """What is global, and a run could change."""
    return {
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "type": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "validates": torch.distributions.Distribution._validate_args,
        "warnings": [*warnings.filters],
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "path": [*sys.path],
        "signals": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
    }


@RECIPES
def test_build_and_run_leave_process_state_unchanged(build):
    alone(build, 0)  # what is imported and initialised once is there
    before = of_the_process()
    trainer = build(3, threads=2 if torch.get_num_threads() == 1 else 1)
    assert of_the_process() == before
    trainer.run()
    assert of_the_process() == before


@RECIPES
@pytest.mark.parametrize("wrong", [{"gamma": 2.0}, {"collector": "no such"}])
def test_failed_build_leaves_process_state_unchanged(build, wrong):
    alone(build, 0)
    before = of_the_process()
    with pytest.raises(SettingError):
        build(3, threads=2 if torch.get_num_threads() == 1 else 1, **wrong)
    assert of_the_process() == before


def test_run_sets_and_restores_thread_count():
    trainer, seen = ppo(1, threads=1), []
    trainer.register_op("post_steps", lambda: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    trainer.run()
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.gpu
def test_gpu_evaluation_leaves_training_rng_unchanged():
    trainer = sac(1, device="cuda")
    evaluate = trainer.evaluate
    assert isinstance(evaluate, Evaluator)
    with trainer.numbers:
        before = torch.cuda.get_rng_state()
        assert evaluate.play(0) == evaluate.play(0)
        assert torch.equal(torch.cuda.get_rng_state(), before)
    trainer.shutdown()
