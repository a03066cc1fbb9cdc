"""Environments that a user or a hook steps, resets or seeds before or between two batches."""

from __future__ import annotations

import numpy as np
import pytest
from torchrl.envs import StepCounter, TransformedEnv

from kit.collectors import AsyncCollector, EpisodeCollector, TensorCollector, VectorCollector
from kit.envs import make_env

KINDS = pytest.mark.parametrize("kind", [VectorCollector, TensorCollector, EpisodeCollector])
MEDDLE = pytest.mark.parametrize("meddle", [lambda env: env.rollout(4), lambda env: env.reset()])


def environment(kind):
    vectorization = "tensor" if kind is TensorCollector else "sync"
    return make_env("Pendulum-v1", 2, max_episode_steps=10, vectorization=vectorization)


def made(kind, env, steps=6):
    """A collector whose second batch ends all episodes that the first one began."""
    amount = {"min_episodes": 2} if kind is EpisodeCollector else {"steps_per_env": steps}
    return kind(env, **amount)


def lengths(collector):
    return [episode.length for episode in collector.take_episodes()]


def numbers(batch):
    return set(batch["collector", "traj_ids"].flatten().tolist())


@KINDS
@pytest.mark.parametrize("collector_first", [False, True])
def test_first_batch_starts_new_episodes_after_external_rollout(kind, collector_first):
    env = environment(kind)
    collector = made(kind, env) if collector_first else None
    env.rollout(7)
    collector = made(kind, env) if collector is None else collector
    collector.collect()
    collector.collect()
    assert lengths(collector)[:2] == [10, 10]


@KINDS
@MEDDLE
@pytest.mark.parametrize("steps", [1, 6])
def test_next_batch_starts_new_episodes_after_external_steps(kind, meddle, steps):
    env = environment(kind)
    collector = made(kind, env, steps)
    before = [collector.collect() for _ in range(6 // steps)][-1]
    collector.take_episodes()
    meddle(env)
    after = collector.collect()
    assert collector.continues_episodes == (kind is EpisodeCollector)
    for _ in range(12 // steps - 1):
        collector.collect()
    assert lengths(collector)[:2] == [10, 10]
    assert numbers(before).isdisjoint(numbers(after))


@pytest.mark.parametrize("kind", [VectorCollector, EpisodeCollector])
def test_next_batch_starts_new_episodes_after_partial_reset(kind):
    env = environment(kind)
    collector = made(kind, env)
    collector.collect()
    collector.take_episodes()
    env.restart(np.array([True, False]))
    for _ in range(2):
        collector.collect()
    assert lengths(collector)[:2] == [10, 10]


@MEDDLE
@pytest.mark.parametrize("kind", [VectorCollector, EpisodeCollector])
def test_external_steps_are_detected_through_transforms(kind, meddle):
    env = TransformedEnv(environment(kind), StepCounter())
    collector = made(kind, env)
    collector.collect()
    collector.take_episodes()
    meddle(env)
    batch = collector.collect()
    collector.collect()
    assert batch["step_count"][:, 0].eq(0).all()
    assert lengths(collector)[:2] == [10, 10]


@KINDS
@MEDDLE
def test_resumed_collector_resets_after_external_steps(kind, meddle):
    env = environment(kind)
    collector, resumed = made(kind, env), made(kind, environment(kind))
    collector.collect()
    meddle(env)
    resumed.load_state_dict(collector.state_dict())
    for _ in range(3):
        assert (collector.collect() == resumed.collect()).all()
    found = collector.take_episodes()
    assert {episode.length for episode in found} == {10}
    assert resumed.take_episodes() == found


@pytest.mark.parametrize("kind", [VectorCollector, TensorCollector, AsyncCollector])
def test_set_seed_starts_new_episodes(kind):
    more = {"max_staleness": 0} if kind is AsyncCollector else {}
    collector = kind(environment(kind), steps_per_env=6, **more)
    try:
        collector.collect()
        before = collector.collect()
        assert collector.continues_episodes
        collector.set_seed(3)
        after = collector.collect()
        assert not collector.continues_episodes
        assert numbers(before).isdisjoint(numbers(after))
    finally:
        collector.shutdown()
