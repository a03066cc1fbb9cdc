"""Copies as one environment of TorchRL: what it tells of episodes."""

from __future__ import annotations

import torch
from torchrl.collectors import Collector

from kit.collectors import VectorCollector
from kit.envs import make_env


def collect(collector_of, batches: int = 4):
    """Episodes of a few batches of CartPole, whose rewards are normalised, with random actions."""
    env = make_env("CartPole-v1", 3, seed=5, normalize_reward=True)
    collector = collector_of(env)
    iterator = iter(collector)
    rewards = [next(iterator)["next", "reward"] for _ in range(batches)]
    take = env if isinstance(collector, Collector) else collector
    finished = take.take_episodes()
    again = take.take_episodes()
    collector.shutdown()
    return finished, again, torch.cat(rewards)


def test_steps_with_tensordicts_leave_the_episodes_that_ended():
    finished, again, rewards = collect(
        lambda env: Collector(env, None, frames_per_batch=120, total_frames=-1)
    )
    assert len(finished) > 5
    # Returns are those before normalisation.
    assert all(e.episode_return == e.length == e.env_steps for e in finished)
    assert {e.env for e in finished} == {0, 1, 2}
    assert sum(e.length for e in finished) <= 480
    assert again == []
    assert not (rewards == 1).all()


def test_a_collector_of_the_kit_counts_by_itself():
    env = make_env("CartPole-v1", 3, seed=5)
    collector = VectorCollector(env, None, frames_per_batch=120)
    next(iter(collector))
    assert env.take_episodes() == []
    assert len(collector.take_episodes()) > 2
    collector.shutdown()


def test_a_forced_reset_begins_a_new_episode():
    env = make_env("Pendulum-v1", 2, seed=0, max_episode_steps=4)
    env.rollout(3, break_when_any_done=False)
    env.rollout(4, break_when_any_done=False)
    assert [(e.env, e.length) for e in env.take_episodes()] == [(0, 4), (1, 4)]
    env.close()
