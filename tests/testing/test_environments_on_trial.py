"""The conformance suite finds what is wrong with an environment, as a collector hands it out."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from kit.testing import CARTPOLE, COUNTING, ConformanceError, check_collector
from tests.collectors.kinds import vector

WORLDS = pytest.mark.parametrize("world", [COUNTING, CARTPOLE], ids=["counting", "cartpole"])
KINDS = pytest.mark.parametrize("kind", [vector])


class Nudged(gym.Wrapper):
    """Moves the cart by a tenth of a millimetre in the third step of each episode."""

    def reset(self, **kwargs):
        self.steps = 0
        return super().reset(**kwargs)

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            self.unwrapped.state = self.unwrapped.state + np.array([1e-4, 0, 0, 0])
        return super().step(action)


class OneRewardMore(gym.RewardWrapper):
    """Gives a little more."""

    def reward(self, reward):
        return reward + 1e-3


class Unyielding(gym.Wrapper):
    """Does not terminate."""

    def step(self, action):
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, False, truncated, info


def on_trial(kind, world, spoil=lambda env: env, **kwargs):
    """Check a right collector of an environment that is not."""

    def make(case):
        env = world.env(case, **kwargs)
        spoil(env)
        return kind(case, env)

    check_collector(make, world=world)


@KINDS
def test_check_detects_single_wrong_transition(kind):
    with pytest.raises(ConformanceError, match=r"^transitions: next observation is"):
        on_trial(kind, CARTPOLE, wrappers=[Nudged])


@KINDS
@WORLDS
def test_check_detects_wrong_reward(kind, world):
    with pytest.raises(ConformanceError, match=r"^transitions: next reward is"):
        on_trial(kind, world, wrappers=[OneRewardMore])


@pytest.mark.filterwarnings("ignore:.*You are calling 'step")
@KINDS
@WORLDS
def test_check_detects_missing_termination(kind, world):
    with pytest.raises(ConformanceError, match=r"^transitions: next terminated is"):
        on_trial(kind, world, wrappers=[Unyielding])


def leave_the_pole(env):
    """Have CartPole's own vector environment begin to count again, but go on from where it is."""
    core, reset = env.backend.vector.unwrapped, env.backend.reset

    def broken(observation, seeds=None, mask=None):
        if mask is None:
            reset(observation, seeds)
        else:
            core.steps[mask] = 0
            core.prev_done[mask] = False

    env.backend.reset = broken


@KINDS
def test_check_detects_episode_that_continues_after_end(kind):
    with pytest.raises(ConformanceError, match=r"^continuity: observations are"):
        on_trial(kind, CARTPOLE, leave_the_pole, vectorization="native")


def test_check_accepts_correct_collector_and_environment():
    on_trial(vector, CARTPOLE)
