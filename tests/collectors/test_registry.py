"""Collectors by name, with what a plan says."""

from __future__ import annotations

import pytest

from kit.collectors import COLLECTORS, EpisodeCollector, make_collector
from kit.envs import make_env
from kit.modules import make_actor
from kit.steps import StepPlan
from tests.errors import raises_setting


def plan(**changes):
    settings = {"total_policy_steps": 48, "num_envs": 2, "steps_per_env": 8, "minibatch_size": 8}
    return StepPlan(**{**settings, "update_epochs": 1, "final_evaluation": False, **changes})


def made(name, plan, **kwargs):
    env = make_env("CartPole-v1", 2)
    return make_collector(name, env, make_actor(env, (8,)), plan, **kwargs)


@pytest.mark.parametrize("name", ["vector", "tensor", "torchrl"])
def test_make_collector_builds_named_collector_from_plan(name):
    collector = made(name, plan())
    assert type(collector) is COLLECTORS[name]
    assert [batch.shape for batch in collector] == [(2, 8)] * 3
    collector.shutdown()


def test_make_collector_builds_episode_collector_from_plan():
    episodes = plan(steps_per_env=None, total_policy_steps=None, iterations=2, min_episodes=3)
    collector = made("episode", episodes)
    assert isinstance(collector, EpisodeCollector)
    assert len(collector.collect()) == 3


@pytest.mark.parametrize(
    ("name", "settings"), [("vectors", {}), ("tensor", {"id": "HalfCheetah-v5"})]
)
def test_make_collector_rejects_unknown_name_or_unsupported_env(name, settings):
    env = make_env(settings.get("id", "CartPole-v1"), 2)
    with raises_setting("collector"):
        make_collector(name, env, None, plan())


def test_make_collector_uses_tensor_env_unchanged():
    env = make_env("CartPole-v1", 2, vectorization="tensor")
    collector = make_collector("tensor", env, None, plan())
    assert collector.env is env.backend.env
    assert collector.collect().shape == (2, 8)
