"""Every kind of collector, by its name, in the recipes as a user runs them."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from kit.collectors import COLLECTORS
from kit.experiment import EnvConfig
from kit.steps.settings import OffPolicySteps, OnPolicySteps
from recipes import ppo, sac
from tests.errors import raises_setting

OF_STEPS = [name for name in COLLECTORS if name != "episode"]
NORMALIZED = {"normalize_observation": True, "normalize_reward": True}


def run_ppo(collector, tmp_path, id="CartPole-v1", hooks=(), **changes):
    """Two iterations of PPO with its defaults, normalisation included; returns the trainer."""
    few = OnPolicySteps(total_policy_steps=128, steps_per_env=16, minibatch_size=32)
    config = ppo.Config(
        env=EnvConfig(id=id, num_envs=4, **NORMALIZED),
        **{"steps": few, "collector": collector, "log_dir": str(tmp_path), "progress": False}
        | changes,
    )
    trainer = ppo.build(config, hooks=hooks)
    trainer.run()
    return trainer


def run_sac(collector, tmp_path, **changes):
    steps = OffPolicySteps(
        **{
            "total_policy_steps": 96,
            "learning_starts": 32,
            "replay_ratio": "1/4",
            "minibatch_size": 16,
        }
        | changes
    )
    config = sac.Config(
        env=EnvConfig(id="Pendulum-v1", num_envs=2, max_episode_steps=20),
        steps=steps,
        buffer_size=200,
        collector=collector,
        log_dir=str(tmp_path),
        progress=False,
    )
    trainer = sac.build(config)
    trainer.run()
    return trainer


def planned_and_counted(trainer):
    planned, ledger = trainer.plan.after(trainer.plan.iterations), trainer.ledger
    names = ("iterations", "policy_steps", "random_policy_steps", "gradient_steps")
    return (
        {name: getattr(planned, name) for name in names if hasattr(planned, name)},
        {name: getattr(ledger, name) for name in names if hasattr(planned, name)},
    )


# ---------------------------------------------------------------------- by name
@pytest.mark.parametrize(
    "collector",
    [pytest.param(n, marks=pytest.mark.slow if n == "ray" else ()) for n in OF_STEPS],
)
def test_ppo_counts_match_plan_with_each_collector(collector, tmp_path):
    trainer = run_ppo(collector, tmp_path)
    assert type(trainer.collector) is COLLECTORS[collector]
    planned, counted = planned_and_counted(trainer)
    assert planned == counted
    assert counted["policy_steps"] == trainer.ledger.env_steps == 128
    assert counted["gradient_steps"] == 2 * 10 * 2
    assert trainer.evaluate.env.normalizer.observation["observation"].count > 1


@pytest.mark.parametrize("collector", ["vector", "tensor", "torchrl"])
def test_ppo_counts_match_plan_with_continuous_actions(collector, tmp_path):
    planned, counted = planned_and_counted(run_ppo(collector, tmp_path, id="Pendulum-v1"))
    assert planned == counted


@pytest.mark.parametrize(
    "collector",
    [pytest.param(n, marks=pytest.mark.nightly if n in ("async", "ray") else ()) for n in OF_STEPS],
)
def test_sac_counts_match_plan_with_each_collector(collector, tmp_path):
    trainer = run_sac(collector, tmp_path)
    assert type(trainer.collector) is COLLECTORS[collector]
    planned, counted = planned_and_counted(trainer)
    assert planned == counted
    assert counted["gradient_steps"] == (96 - 32 + 2) // 4


def test_collector_kwargs_are_passed_to_collector(tmp_path):
    late = run_ppo("async", tmp_path, collector_kwargs={"max_staleness": 0}).collector
    assert (late.max_staleness, late.staleness) == (0, 0)
    exact = run_ppo("vector", tmp_path, collector_kwargs={"fast_policy": "exact"}).collector
    assert exact.exact_policy
    assert exact.policy_path.name == "program"


@pytest.mark.parametrize("collector", ["episode", None])
def test_ppo_collects_complete_episodes_when_configured(collector, tmp_path):
    steps = OnPolicySteps(total_policy_steps=200, steps_per_env=None, min_steps=50, min_episodes=4)
    trainer = run_ppo(collector, tmp_path, steps=steps)
    assert type(trainer.collector) is COLLECTORS["episode"]
    ledger = trainer.ledger
    assert ledger.policy_steps == ledger.env_steps >= 200
    assert ledger.episodes >= 4 * ledger.iterations


def test_sac_collects_complete_episodes_when_configured(tmp_path):
    trainer = run_sac("episode", tmp_path, steps_per_env=None, min_episodes=1)
    assert trainer.ledger.policy_steps == trainer.ledger.env_steps == 100
    assert trainer.ledger.episodes == 5


def test_evaluation_shares_normalizer_of_tensor_collector(tmp_path):
    trainer = run_ppo("tensor", tmp_path)
    assert trainer.evaluate.env.normalizer is trainer.collector.normalizer
    # A reset of 4 copies and 128 policy steps, on top of the first 1e-4.
    seen = trainer.collector.normalizer.observation["observation"].count
    assert seen == pytest.approx(132.0001)


# ---------------------------------------------------------------------- what does not fit
def test_recipe_rejects_unknown_collector_name(tmp_path):
    with raises_setting("collector"):
        run_ppo("tensors", tmp_path)


# ---------------------------------------------------------------------- resumed, learning
def test_tensor_collector_run_resumes_bitwise(tmp_path):
    class Stop:
        def register(self, trainer, name="stop"):
            trainer.register_op("post_steps", lambda: trainer.request_stop("for the test"))

    steps = OnPolicySteps(total_policy_steps=256, steps_per_env=16, minibatch_size=32)
    whole = run_ppo("tensor", tmp_path / "whole", steps=steps)
    stopped = run_ppo("tensor", tmp_path / "stopped", steps=steps, hooks=[Stop()])
    assert stopped.ledger.policy_steps == 64
    resumed = run_ppo("tensor", tmp_path / "stopped", steps=steps, resume=str(stopped.folder))
    assert resumed.ledger.policy_steps == 256
    ours, theirs = resumed.loss_module.state_dict(), whole.loss_module.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert resumed.collector.normalizer.state_dict() == whole.collector.normalizer.state_dict()


def test_ppo_learns_cartpole_with_tensor_collector(tmp_path):
    steps = OnPolicySteps(total_policy_steps=15_360, evaluation_every=None)
    returns = []
    for seed in range(5):
        config = ppo.Config(
            collector="tensor", steps=steps, seed=seed, log_dir=str(tmp_path), progress=False
        )
        trainer = ppo.build(config)
        trainer.run()
        returns.append(trainer.journal.latest["evaluation/return"])
    assert median(returns) >= 475
