"""The environment that counts, stepping all its environments itself."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from kit.envs import make_env
from kit.testing import CollectorCase
from kit.testing.counter import COUNTER
from tests.collectors.kinds import vector, vector_native, vector_native_by_mask

CASE = CollectorCase(num_envs=4, steps_per_env=30)


@pytest.mark.parametrize("native", [vector_native, vector_native_by_mask])
def test_its_batches_are_those_of_single_environments_bit_by_bit(native):
    for one, other in zip(vector(CASE), native(CASE), strict=True):
        keys = set(one.keys(True, True))
        assert keys == set(other.keys(True, True))
        assert all(torch.equal(one[key], other[key]) for key in keys)


def test_one_seed_gives_each_environment_the_next_one():
    env = gym.make_vec(COUNTER, 3, vectorization_mode="vector_entry_point")
    first, _ = env.reset(seed=5)
    assert np.array_equal(first, env.reset(seed=[5, 6, 7])[0])
    assert len(set(first[:, 0])) == 3


def test_only_the_environments_of_the_mask_are_reset():
    env = gym.make_vec(COUNTER, 3, vectorization_mode="vector_entry_point")
    first, _ = env.reset(seed=0)
    mask = np.array([False, True, False])
    now, _ = env.reset(options={"reset_mask": mask})
    assert ((now != first).any(-1) == mask).all()


def test_a_limit_of_its_own_is_kept():
    env = make_env(COUNTER, 2, vectorization="native", max_episode_steps=1)
    env.start()
    result = env.new_step()
    env.step_arrays({"action": np.zeros(2, np.int64)}, result)
    assert result.truncated.all()
