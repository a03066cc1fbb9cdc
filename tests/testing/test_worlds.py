"""What the conformance suite knows of its environments."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from kit.collectors import VectorCollector
from kit.envs.tensor.cartpole import ANGLE_LIMIT, POSITION_LIMIT
from kit.testing import CARTPOLE, COUNTING, REPEATING
from kit.testing.batches import ages
from kit.testing.cartpole import ROUNDING
from tests.collectors.kinds import amounts


def ends(world, vectorization):
    """How the episodes of a world's first case end: terminated, truncated, both at once."""
    case = world.cases[0]
    env = world.env(case, vectorization)
    collector = VectorCollector(env, world.policy(env), **amounts(case))
    batches = torch.cat(list(collector), dim=1)
    collector.shutdown()
    terminated, truncated = batches["next", "terminated"], batches["next", "truncated"]
    return [
        int(flags.sum())
        for flags in (terminated & ~truncated, truncated & ~terminated, terminated & truncated)
    ]


@pytest.mark.parametrize("world", [COUNTING, CARTPOLE], ids=["counting", "cartpole"])
@pytest.mark.parametrize("vectorization", ["sync", "native", "tensor"])
def test_episodes_end_by_termination_truncation_and_both(world, vectorization):
    assert all(ends(world, vectorization))


@pytest.mark.parametrize("vectorization", ["sync", "tensor"])
def test_episodes_end_in_all_ways_with_action_repeat(vectorization):
    assert all(ends(REPEATING, vectorization))


def test_episodes_end_in_all_ways_in_envpool():
    pytest.importorskip("envpool")
    assert all(ends(CARTPOLE, "envpool"))


# ---------------------------------------------------------------------- CartPole
def test_cartpole_expectation_matches_gymnasium():
    env = gym.make("CartPole-v1").unwrapped
    state = torch.tensor([2.39, 1.0, -0.1, -2.0], dtype=torch.float64)
    for action in (0, 1):
        env.reset()
        env.state = state.numpy()
        _, reward, terminated, *_ = env.step(action)
        outcome = CARTPOLE.expected(state[None].float(), torch.tensor([action]))
        np.testing.assert_allclose(outcome.observation[0].numpy(), env.state, atol=1e-6)
        assert outcome.reward.tolist() == [[reward]]
        assert outcome.terminated.tolist() == [[terminated]]
        assert outcome.truncated is None


@pytest.mark.parametrize(
    ("position", "angle", "terminated", "undecided"),
    [
        (0.0, 0.0, False, False),
        (POSITION_LIMIT + 2 * ROUNDING, 0.0, True, False),
        (POSITION_LIMIT - 2 * ROUNDING, 0.0, False, False),
        (-POSITION_LIMIT - ROUNDING / 2, 0.0, True, True),
        (-POSITION_LIMIT + ROUNDING / 2, 0.0, False, True),
        (0.0, ANGLE_LIMIT + 2 * ROUNDING, True, False),
        (0.0, ANGLE_LIMIT - ROUNDING / 2, False, True),
    ],
)
def test_cartpole_rounding_decides_only_near_bounds(position, angle, terminated, undecided):
    standing = torch.tensor([[position, 0.0, angle, 0.0]], dtype=torch.float64)
    outcome = CARTPOLE.expected(standing, torch.tensor([1]))
    assert outcome.terminated.item() is terminated
    assert outcome.undecided.item() is undecided


def test_cartpole_recognizes_initial_observations():
    observation = torch.tensor([[0.05, -0.05, 0.0, 0.05], [0.0, 0.06, 0.0, 0.0]])
    assert CARTPOLE.begins(observation).tolist() == [True, False]


# ---------------------------------------------------------------------- in general
def test_world_creates_environment_for_case():
    case = replace(CARTPOLE.cases[0], num_envs=2, seed=7)
    one, other = CARTPOLE.env(case), CARTPOLE.env(case, "native")
    assert one.num_envs == other.num_envs == 2
    again = CARTPOLE.env(case, "sync", seed=8)
    seen = [env.start()["observation"] for env in (one, CARTPOLE.env(case), again)]
    assert np.array_equal(seen[0], seen[1])
    assert not np.array_equal(seen[0], seen[2])


def test_ages_count_steps_since_episode_start():
    done = torch.tensor([0, 0, 1, 1, 0, 1, 0], dtype=torch.bool)
    assert ages(done).tolist() == [1, 2, 3, 1, 1, 2, 1]
