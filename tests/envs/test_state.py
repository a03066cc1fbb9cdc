"""Environments are captured and restored as they stand, whatever a simulator holds just then."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from kit.envs.state import capture, restore

pytest.importorskip("mujoco")


@pytest.mark.parametrize("id", ["HalfCheetah-v5", "Hopper-v5", "Ant-v5"])
def test_an_environment_of_mujoco_goes_on_exactly_from_any_step(id):
    env, again = gym.make(id), gym.make(id)
    env.reset(seed=0)
    again.reset(seed=1)
    env.action_space.seed(0)
    for _ in range(60):  # in the air, touching the ground, and between the two
        restore(again, capture(env))
        assert capture(again) == capture(env)
        action = env.action_space.sample()
        ours, theirs = env.step(action), again.step(action)
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1:4] == theirs[1:4]
        if ours[2] or ours[3]:
            env.reset()
    env.close()
    again.close()
