"""Statistics of observations from random steps before the first iteration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kit.config.plan import make_plan
from kit.dialects import Nip
from kit.envs import make_env
from kit.envs.normalize import Normalizer
from kit.experiment import EnvConfig, OnPolicySteps
from recipes import ppo
from tests.errors import raises_setting
from tests.tiny import assert_equal, weights


def built(collector: str = "vector", log_dir: str | None = None, steps: Any = (), **changes: Any):
    """40 random steps, then 4 iterations of 4 x 16 policy steps."""
    amounts = {
        "total_policy_steps": 40 + 256, "steps_per_env": 16, "minibatch_size": 32,
        "num_normalization_steps": 40, "evaluation_every": None, "evaluation_episodes": 1,
    }  # fmt: skip
    vectorization = "tensor" if collector == "tensor" else "sync"
    env = EnvConfig("CartPole-v1", 4, vectorization=vectorization, normalize_observation=True)
    settings = {"env": env, "hidden_sizes": [8], "progress": False, "log_dir": log_dir}
    return ppo.build(
        ppo.Config(
            collector=collector, steps=OnPolicySteps(**{**amounts, **dict(steps)}),
            checkpoint_every=64, **{**settings, **changes},
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "collector", ["vector", "tensor", pytest.param("async", marks=pytest.mark.nightly)]
)
def test_normalization_steps_count_as_random_and_fix_statistics(collector):
    trainer = built(collector)
    seen = []
    trainer.register_op("pre_steps_log", lambda batch: seen.append(batch.clone()) or {})
    ledger = trainer.run()
    assert ledger.compare(trainer.plan) == []
    assert (ledger.policy_steps, ledger.random_policy_steps) == (296, 40)
    assert (ledger.iterations, ledger.gradient_steps, ledger.samples) == (4, 4 * 2 * 10, 2_560)
    moments = trainer.evaluate.env.normalizer.observation["observation"]
    assert float(moments.count) == pytest.approx(1e-4 + 4 + 40)  # the first reset and 10 steps of 4
    assert [tuple(batch.shape) for batch in seen] == [(4, 10)] + [(4, 16)] * 4


@pytest.mark.parametrize("vectorization", ["sync", "tensor"])
def test_nip_estimates_statistics_before_run(vectorization):
    steps = Nip(
        frames_per_batch=40, max_message_rounds=8, num_iterations=2, num_epochs=1,
        minibatch_size=20, num_test_iterations=1, num_normalization_steps=10,
    )  # fmt: skip
    env = EnvConfig("CartPole-v1", vectorization=vectorization, normalize_observation=True)
    config = ppo.Config(env=env, steps=steps, hidden_sizes=[8], progress=False, log_dir=None)
    trainer = ppo.build(config)
    moments = trainer.evaluate.env.normalizer.observation["observation"]
    before = {name: moment.clone() for name, moment in moments._asdict().items()}
    assert float(before["count"]) == pytest.approx(1e-4 + 80)  # 2 keys, 8 steps in 5 envs (nip-000)
    ledger = trainer.run()
    assert ledger.compare(trainer.plan) == []
    assert (ledger.policy_steps, ledger.random_policy_steps) == (80, 0)
    assert_equal(before, moments._asdict())
    assert trainer.plan.normalization_steps == 80
    assert "random steps before the run" in trainer.plan.table(ledger)


def test_plan_has_no_normalization_steps_without_normalization():
    env = EnvConfig("CartPole-v1", normalize_observation=False)
    plan = make_plan(ppo.Config(env=env, steps=Nip(max_message_rounds=10)), "ppo")
    assert plan.normalization_steps == 0


def test_statistics_use_only_first_observations():
    env = make_env("CartPole-v1", 2, normalize_observation=True, normalization_steps=6)
    normalizer = env.normalizer
    leaves, raw = env.observation_leaves, torch.randn(7, 2, 4, dtype=torch.float64)
    on_tensors = Normalizer(leaves, 2, observation=True, reward=False, most=8)
    statistics = on_tensors.first_tensors(on_tensors.statistics, raw[0])
    normalizer.first({"observation": raw[0].numpy().copy()}, learn=True)
    for values in raw[1:]:
        normalizer.first({"observation": values.numpy().copy()}, learn=True)
        statistics = on_tensors.first_tensors(statistics, values)
    seen = raw[:4].flatten(0, 1)  # 2 of the reset and 6 after it
    for moments in (normalizer.observation["observation"], statistics.observation):
        torch.testing.assert_close(moments.mean, seen.mean(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(moments.var, seen.var(0, correction=0), rtol=1e-3, atol=1e-4)
        assert float(moments.count) == pytest.approx(1e-4 + 8)


def test_resumed_run_matches_uninterrupted_run(tmp_path):
    whole = built()
    whole.run()
    broken = built(log_dir=str(tmp_path))
    broken.register_op(
        "post_steps", lambda: broken.request_stop() if broken.policy_steps == 168 else None
    )
    broken.run()
    resumed = built(log_dir=str(tmp_path), resume=str(broken.folder))
    resumed.run()
    assert resumed.ledger.counters() == whole.ledger.counters()
    assert_equal(weights(resumed), weights(whole))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"env": EnvConfig(num_envs=4, normalize_observation=False, normalize_reward=False)},
            "steps.num_normalization_steps",
        ),
        ({"steps": {"num_normalization_steps": 42}}, "steps.num_normalization_steps"),
        (
            {"steps": {"total_policy_steps": 64, "num_normalization_steps": 64}},
            "steps.num_normalization_steps",
        ),
        ({"steps": {"steps_per_env": None, "min_steps": 64}}, "steps.num_normalization_steps"),
        ({"collector": "torchrl"}, "collector"),
        ({"steps": {"total_policy_steps": 300, "rounding": "error"}}, "steps.total_policy_steps"),
    ],
)
def test_build_rejects_incompatible_normalization_steps(changes, message):
    with raises_setting(message):
        built(**changes)
