"""Copies as one environment of TorchRL: what it tells of episodes."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchrl.collectors import Collector
from torchrl.envs import StepCounter, TransformedEnv

from kit.collectors import VectorCollector
from kit.envs import make_env
from kit.envs.episodes import EpisodeStatistics
from kit.envs.errors import EnvError
from kit.testing.counter import VectorCounter
from tests.errors import raises_setting
from tests.tiny import Scripted


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


def test_env_records_episodes_of_torchrl_collector():
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


def test_env_records_no_episodes_under_kit_collector():
    env = make_env("CartPole-v1", 3, seed=5)
    collector = VectorCollector(env, None, frames_per_batch=120)
    next(iter(collector))
    assert env.take_episodes() == []
    assert len(collector.take_episodes()) > 2
    collector.shutdown()


def test_forced_reset_starts_new_episode():
    env = make_env("Pendulum-v1", 2, seed=0, max_episode_steps=4)
    env.rollout(3, break_when_any_done=False)
    env.rollout(4, break_when_any_done=False)
    assert [(e.env, e.length) for e in env.take_episodes()] == [(0, 4), (1, 4)]
    env.close()


# ---------------------------------------------------------------------- what is refused or counted
def test_make_env_rejects_same_object_for_several_envs():
    one = Scripted()
    with raises_setting("env.id"):
        make_env(lambda: one, 3)
    assert make_env(lambda: one, 1).num_envs == 1


@pytest.mark.parametrize(
    "name",
    ["action", "reward", "done", "next", "collector", "index", "state_value", "advantage",
     "is_init", "td_error", "steps_to_next_obs", "latent", "before", "priority_weight"],
)  # fmt: skip
def test_make_env_rejects_reserved_observation_names(name):
    space = gym.spaces.Dict({name: gym.spaces.Box(0, 1, (2,)), "position": gym.spaces.Discrete(3)})
    with raises_setting("observation_space"):
        make_env(lambda: Scripted(observation_space=space), 2)


@pytest.mark.parametrize("kind", ["observation_space", "action_space"])
@pytest.mark.parametrize("name", ["shape", "device", "dtype", "space"])
def test_make_env_rejects_spec_attribute_names_at_any_depth(kind, name):
    space = gym.spaces.Dict({"arm": gym.spaces.Dict({name: Box(0, 1, (2,))})})
    with raises_setting(kind):
        make_env(lambda: Scripted(**{kind: space}), 2)


class Sees(Scripted):
    """Observes what it is told to, in its first step."""

    def __init__(self, space, seen):
        super().__init__(observation_space=space)
        self.seen = seen

    def reset(self, **kwargs):
        super().reset(**kwargs)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.seen, *super().step(action)[1:]


BYTES = Box(0, 255, (2,), np.uint8)
NOT_HELD = [
    (BYTES, np.array([1, 0.7]), "0.7"),
    (BYTES, np.array([3, 300]), "300"),
    (BYTES, [3, -1], "-1"),
    (Box(-5, 5, (2,), np.int64), np.array([2, np.nan]), "nan"),
    (Discrete(5), 5, "5"),
    (Discrete(5, start=2), np.int64(1), "1"),
    (Discrete(5), 0.5, "0.5"),
    (MultiDiscrete([2, 3], start=[0, 4]), np.array([1, 7]), "7"),
    (gym.spaces.MultiBinary(3), np.array([0, 2, 1]), "2"),
]


@pytest.mark.parametrize(("space", "seen", "number"), NOT_HELD)
def test_collect_rejects_integer_observation_outside_space(space, seen, number):
    for whole, told in ((space, seen), (gym.spaces.Dict(inner=space), {"inner": seen})):
        env = make_env(lambda whole=whole, told=told: Sees(whole, told), 2)
        with pytest.raises(EnvError, match=rf"env 0.* returned {number} as .* not in "):
            VectorCollector(env, None, steps_per_env=4).collect()


@pytest.mark.parametrize(
    ("space", "seen"),
    [
        (BYTES, np.array([3.0, 255.0])),
        (BYTES, [3, 4]),
        (Discrete(5, start=2), 6),
        (gym.spaces.MultiBinary(2), np.array([True, False])),
        (Box(0, 1, (2,), np.int64), np.array([9, 9])),  # bounds are the environment's affair
    ],
)
def test_collect_accepts_integer_observations_of_other_types(space, seen):
    batch = VectorCollector(make_env(lambda: Sees(space, seen)), None, steps_per_env=1).collect()
    first = batch["next", "observation"][0, 0]
    assert first.tolist() == (np.asarray(seen) - getattr(space, "start", 0)).tolist()


def test_vector_env_rejects_fractional_integer_observations():
    class Bytes(VectorCounter):
        def __init__(self):
            super().__init__(2)
            self.single_observation_space = Box(0, 255, (3,), np.uint8)

        def reset(self, **kwargs):
            seen, info = super().reset(**kwargs)
            return seen.astype(np.uint8), info

        def step(self, actions):
            seen, *rest = super().step(actions)
            return seen + 0.5, *rest

    with pytest.raises(EnvError, match=r"returned \d.* as observation, .* not in Box"):
        VectorCollector(make_env(Bytes()), None, steps_per_env=1).collect()


def test_env_records_episodes_cut_by_torchrl_step_counter():
    env = make_env(lambda: Scripted(length=7), 2)
    limited = TransformedEnv(env, StepCounter(3))
    limited.rollout(6, break_when_any_done=False)
    finished = env.take_episodes()
    assert [(e.env, e.episode_return, e.length, e.terminated) for e in finished] == [
        (0, 3.0, 3, False), (1, 3.0, 3, False),
    ]  # fmt: skip
    assert env.env_steps_made == 12


def test_make_env_rejects_normalisation_below_transforms():
    inner = TransformedEnv(make_env("CartPole-v1", 2, normalize_observation=True), StepCounter())
    with raises_setting("env.normalize_observation"):
        make_env(inner)
    inner = TransformedEnv(make_env("CartPole-v1", 2, normalize_reward=True), StepCounter())
    with raises_setting("env.normalize_reward"):
        make_env(inner)


def rewards_and_ends(rewards):
    return st.lists(st.tuples(rewards, st.booleans()), min_size=1, max_size=30)


@given(
    st.one_of(
        rewards_and_ends(st.floats(-1e6, 1e6, width=32)),
        rewards_and_ends(st.floats(-(2.0**100), 2.0**100, width=32)),  # whole, but for the small
        rewards_and_ends(st.integers(-9, 9).map(float)),
        rewards_and_ends(st.sampled_from([1.0, -1.0, 2.0**54, 2.0**60])),
    ),
    st.integers(1, 5),
)
@example([(1.0, True), (1e-20, True)], 2)  # a sum of which is whole
@example([(1.0, True), (2.0**53, True)], 2)
@settings(max_examples=200)
def test_episode_return_sums_rewards_for_any_chunk_size(steps, at_a_time):
    reward = np.array([[value] for value, _ in steps], np.float32)
    ended = np.array([[end] for _, end in steps])
    wanted, total = [], 0.0
    for value, end in zip(reward[:, 0].tolist(), ended[:, 0].tolist()):
        total += value
        if end:
            wanted.append(total)
            total = 0.0
    statistics, found = EpisodeStatistics(1), []
    for start in range(0, len(reward), at_a_time):
        part = slice(start, start + at_a_time)
        one, never = np.ones(reward[part].shape, np.int32), np.zeros_like(ended[part])
        found += statistics.add(reward[part], ended[part], never, one, {})
    assert [episode.episode_return for episode in found] == wanted
    assert statistics.returns.tolist() == [total]
