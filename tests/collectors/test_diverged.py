"""A policy that has become NaN is named, not the environment that it upsets."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from kit.collectors import AsyncCollector, EpisodeCollector, TensorCollector, VectorCollector
from kit.collectors.base import PolicyError, check_policy
from kit.envs import make_env
from kit.envs.errors import EnvError
from kit.modules import make_actor
from tests.envs.odd_envs import Returns

KINDS = {
    "vector": lambda env, actor: VectorCollector(env, actor, steps_per_env=8),
    "exact": lambda env, actor: VectorCollector(env, actor, steps_per_env=8, fast_policy="exact"),
    "episode": lambda env, actor: EpisodeCollector(env, actor, min_episodes=2),
    "tensor": lambda env, actor: TensorCollector(env, actor, steps_per_env=8),
    "async": lambda env, actor: AsyncCollector(env, actor, steps_per_env=8, max_staleness=0),
}


def collector_and_actor(kind, id):
    vectorization = "tensor" if kind == "tensor" else "sync"
    env = make_env(id, 2, vectorization=vectorization, max_episode_steps=8)
    actor = make_actor(env, (8,))
    return KINDS[kind](env, actor), actor


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("id", "key"), [("Pendulum-v1", "action"), ("CartPole-v1", "action_log_prob")]
)
def test_policy_error_names_env_and_step_when_output_is_nan(kind, id, key):
    collector, actor = collector_and_actor(kind, id)
    first = collector.collect()
    taken = collector.policy_steps // 2
    with torch.no_grad():
        next(actor.parameters()).fill_(torch.nan)
    collector.update_policy_weights_()
    before = collector.policy_steps, collector.env_steps, collector.episodes
    with pytest.raises(PolicyError, match=f"env 0, after {taken} .* its output {key} is NaN"):
        collector.collect()
    collector.shutdown()
    assert first.numel()
    assert (collector.policy_steps, collector.env_steps, collector.episodes) == before


def test_nan_observation_raises_env_error():
    env = make_env(lambda: Returns(np.full(1, np.nan, np.float32)), 1)
    collector = VectorCollector(env, make_actor(env, (8,)), steps_per_env=8)
    with pytest.raises(EnvError, match="NaN"):
        collector.collect()


def test_check_policy_ignores_nan_output_after_nan_observation():
    good, bad = torch.zeros(1, 3, 1), torch.tensor([[[0.0], [torch.nan], [0.0]]])
    written = {"action": torch.tensor([[[0.0], [torch.nan], [torch.nan]]])}
    check_policy(written, {"observation": bad}, ["action"], 0)
    with pytest.raises(PolicyError, match="env 0, after 11 policy steps"):
        check_policy(written, {"observation": good}, ["action"], 10)
    infinite = {"action": torch.tensor([[[torch.inf], [-torch.inf], [0.0]]])}
    check_policy(infinite, {"observation": good}, ["action"], 0)


def test_collector_starts_new_episodes_after_policy_error():
    collector, actor = collector_and_actor("vector", "Pendulum-v1")
    numbers = collector.collect()["collector", "traj_ids"].unique()
    good = next(actor.parameters()).clone()
    with torch.no_grad():
        next(actor.parameters()).fill_(torch.nan)
        with pytest.raises(PolicyError):
            collector.collect()
        next(actor.parameters()).copy_(good)
    batch = collector.collect()
    assert not set(numbers.tolist()) & set(batch["collector", "traj_ids"].unique().tolist())
    assert batch["next", "truncated"][:, -1].all()  # the eighth step of a new episode
    assert [episode.length for episode in collector.take_episodes()] == [8] * 4


def test_policy_error_is_picklable():
    fault = pickle.loads(pickle.dumps(PolicyError(("agents", "action"), 3, 17)))
    assert (fault.key, fault.env, fault.policy_step) == (("agents", "action"), 3, 17)
    assert "env 3, after 17 policy steps: its output agents.action is NaN" in str(fault)
