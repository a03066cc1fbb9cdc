"""Collectors by name, with what a plan says."""

from __future__ import annotations

import pytest
from torchrl.collectors import Collector, MultiSyncCollector

from kit.collectors import COLLECTORS, EpisodeCollector, StepsCollector, make_collector
from kit.envs import make_env
from kit.modules import make_actor
from kit.steps import SettingError, StepPlan


def plan(**changes):
    settings = {"total_policy_steps": 48, "num_envs": 2, "steps_per_env": 8, "minibatch_size": 8}
    return StepPlan(**{**settings, "update_epochs": 1, "final_evaluation": False, **changes})


def made(name, plan, **kwargs):
    env = make_env("CartPole-v1", 2)
    return make_collector(name, env, make_actor(env, (8,)), plan, **kwargs)


@pytest.mark.parametrize("name", ["vector", "tensor", "torchrl"])
def test_a_name_makes_a_collector_of_the_plans_batches(name):
    collector = made(name, plan())
    assert type(collector) is COLLECTORS[name]
    assert [batch.shape for batch in collector] == [(2, 8)] * 3
    collector.shutdown()


def test_a_plan_of_whole_episodes_makes_a_collector_of_them():
    episodes = plan(steps_per_env=None, total_policy_steps=None, iterations=2, min_episodes=3)
    collector = made("episode", episodes)
    assert isinstance(collector, EpisodeCollector)
    assert len(collector.collect()) == 3


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("vectors", {}, "what works: vector"),
        ("episode", {}, "collects whole episodes, where the plan has steps_per_env=8"),
        (MultiSyncCollector, {}, "collector='MultiSyncCollector' takes other arguments than the"),
        (type("Mine", (Collector,), {}), {}, "collector='Mine' takes other arguments than the kit"),
        ("tensor", {"id": "HalfCheetah-v5"}, "needs an environment written in torch"),
    ],
)
def test_a_collector_that_does_not_fit_is_refused(name, settings, reason):
    env = make_env(settings.get("id", "CartPole-v1"), 2)
    with pytest.raises(SettingError, match=reason):
        make_collector(name, env, None, plan())


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (lambda env, policy: None, r"\(env, policy, seed, device, .*\): got an unexpected keyword"),
        (lambda env, policy, size, **others: None, "missing a required argument: 'size'"),
    ],
)
def test_make_collector_rejects_a_factory_with_other_arguments(factory, reason):
    with pytest.raises(SettingError, match=f"collector='<lambda>' cannot be called with.*{reason}"):
        make_collector(factory, make_env("CartPole-v1", 2), None, plan())


def test_random_steps_that_are_no_whole_batches_of_torchrls_collector_are_refused():
    env = make_env("CartPole-v1", 2)
    off_policy = StepPlan(
        total_policy_steps=48, num_envs=2, steps_per_env=4, minibatch_size=8, replay_ratio=1,
        random_steps=12, learning_starts=16, final_evaluation=False,
    )  # fmt: skip
    message = r"^random_steps=12 is not a whole number of TorchRL's batches of 8 policy steps; what"
    with pytest.raises(SettingError, match=message) as refused:
        make_collector("torchrl", env, make_actor(env, (8,)), off_policy)
    assert refused.value.works == [8, 16]


def test_an_environment_that_is_written_in_torch_already_is_taken_as_it_is():
    env = make_env("CartPole-v1", 2, vectorization="tensor")
    collector = make_collector("tensor", env, None, plan())
    assert collector.env is env.backend.env
    assert collector.collect().shape == (2, 8)


def test_an_argument_that_a_collector_of_ones_own_does_not_act_on_is_refused(monkeypatch):
    class Own(StepsCollector):
        """Passes on what it is given, as that of the docs."""

        def __init__(self, env, policy, **amounts):
            super().__init__(env.num_envs, **amounts)

    monkeypatch.setitem(COLLECTORS, "own", Own)
    with pytest.raises(SettingError, match="reset_at_each_iter=True is no argument of Own"):
        made("own", plan(), reset_at_each_iter=True)
