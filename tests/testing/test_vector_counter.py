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
def test_batches_match_single_environments_bitwise(native):
    for one, other in zip(vector(CASE), native(CASE), strict=True):
        keys = set(one.keys(True, True))
        assert keys == set(other.keys(True, True))
        assert all(torch.equal(one[key], other[key]) for key in keys)


def test_single_seed_is_incremented_for_each_environment():
    env = gym.make_vec(COUNTER, 3, vectorization_mode="vector_entry_point")
    first, _ = env.reset(seed=5)
    assert np.array_equal(first, env.reset(seed=[5, 6, 7])[0])
    assert len(set(first[:, 0])) == 3


def test_reset_mask_resets_only_selected_environments():
    env = gym.make_vec(COUNTER, 3, vectorization_mode="vector_entry_point")
    first, _ = env.reset(seed=0)
    mask = np.array([False, True, False])
    now, _ = env.reset(options={"reset_mask": mask})
    assert ((now != first).any(-1) == mask).all()


def test_vector_env_respects_max_episode_steps():
    env = make_env(COUNTER, 2, vectorization="native", max_episode_steps=1)
    env.start()
    result = env.new_step()
    env.step_arrays({"action": np.zeros(2, np.int64)}, result)
    assert result.truncated.all()
