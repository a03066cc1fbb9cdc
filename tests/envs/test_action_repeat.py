"""An action that is held for several env steps, which are counted one by one."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from kit.collectors import VectorCollector
from kit.envs import ActionRepeat, make_env
from kit.envs.single_env import make_single_env
from tests.envs.odd_envs import Steps
from tests.errors import raises_setting


class Rewards(Steps):
    """Gives its step's number as reward; terminates, or truncates, after ``length`` env steps."""

    def __init__(self, length: int = 7, truncates: bool = False) -> None:
        super().__init__(length)
        self.truncates, self.actions = truncates, []

    def step(self, action):
        self.actions.append(action)
        self.count += 1
        over = self.count >= self.length
        flags = (over and not self.truncates, over and self.truncates)
        return self._seen(), float(self.count), *flags, {"note": self.count}


@pytest.mark.parametrize("truncates", [False, True])
def test_action_repeat_sums_rewards_and_stops_at_episode_end(truncates):
    inner = Rewards(7, truncates)
    env = ActionRepeat(inner, 3)
    env.reset()
    steps = [env.step(action) for action in (0, 1, 0)]
    assert [step[1] for step in steps] == [1 + 2 + 3, 4 + 5 + 6, 7]
    assert [step[4]["env_steps"] for step in steps] == [3, 3, 1]
    assert [float(step[0][0]) for step in steps] == [3, 6, 7]  # what the last env step showed
    assert [step[2:4] for step in steps][:2] == [(False, False)] * 2
    assert steps[-1][2:4] == (not truncates, truncates)
    assert inner.actions == [0, 0, 0, 1, 1, 1, 0]  # none after the end
    assert steps[0][4]["note"] == 3


def test_repeated_action_is_unaffected_by_in_place_changes():
    class Doubles(gym.Wrapper):
        action_space = gym.spaces.Dict({"force": gym.spaces.Box(-9, 9, (2,), np.float32)})

        def step(self, action):
            given.append(action["force"].tolist())
            action["force"] *= 2
            return self.env.step(0)

    given: list[list[float]] = []
    env = make_env(lambda: Doubles(Steps(5)), 1, action_repeat=3)
    env.start()
    actions = {("action", "force"): np.array([[1.0, 2.0]], np.float32)}
    env.step_arrays(actions, env.new_step())
    assert given == [[1.0, 2.0]] * 3


def test_action_repeat_stops_when_mask_forbids_action():
    class Forbids(Steps):
        """Action 1 is forbidden from the second env step on; its mask is in ``info``."""

        action_space = gym.spaces.Discrete(2, start=3)

        def _masked(self, returned):
            *values, info = returned
            return *values, {**info, "action_mask": np.array([1, self.count < 2])}

        def reset(self, **settings):
            return self._masked(super().reset(**settings))

        def step(self, action):
            return self._masked(super().step(action))

    env = make_single_env(Forbids, 3, action_mask=True)
    for action, env_steps in ((4, 2), (3, 3)):
        env.reset()
        assert env.step(np.int64(action))[4]["env_steps"] == env_steps


def test_action_repeat_stops_when_multi_discrete_mask_forbids():
    class Forbids(Steps):
        action_space = gym.spaces.MultiDiscrete([2, 3])
        observation_space = gym.spaces.Dict({"action_mask": gym.spaces.MultiBinary(5)})

        def _seen(self):
            return {"action_mask": np.array([1, 1, 1, 1, self.count < 2], np.int8)}

    env = make_single_env(Forbids, 3)
    for action, env_steps in (([1, 2], 2), ([1, 1], 3)):
        env.reset()
        assert env.step(np.array(action))[4]["env_steps"] == env_steps


def test_action_repeat_of_one_is_identity():
    env = ActionRepeat(Rewards(2), 1)
    env.reset()
    assert env.step(1)[1:4] == (1.0, False, False)
    assert env.step(1)[1:4] == (2.0, True, False)


@pytest.mark.parametrize("repeat", [0, -1, 1.5, None])
def test_action_repeat_rejects_invalid_counts(repeat):
    with raises_setting("action_repeat"):
        ActionRepeat(Rewards(), repeat)
    with raises_setting("env.action_repeat"):
        make_env(Rewards, action_repeat=repeat)


def env_steps_of(env, steps: int) -> list[list[int]]:
    env.start()
    counted = []
    for _ in range(steps):
        step = env.new_step()
        env.step_arrays({"action": np.zeros(2, np.int64)}, step)
        counted.append(step.env_steps.tolist())
    env.close()
    return counted


def test_env_steps_are_exact_for_each_env():
    lengths = iter([7, 4])
    env = make_env(lambda: Rewards(next(lengths)), 2, action_repeat=3)
    assert env_steps_of(env, 4) == [[3, 3], [3, 1], [1, 3], [3, 1]]


def test_worker_processes_report_env_steps():
    env = make_env(Steps, 2, length=7, action_repeat=3, vectorization="async")
    assert env_steps_of(env, 4) == [[3, 3], [3, 3], [1, 1], [3, 3]]


def test_env_may_define_env_steps_attribute():
    class Counts(Steps):
        env_steps = 0

    assert env_steps_of(make_env(Counts, 2), 2) == [[1, 1], [1, 1]]
    assert env_steps_of(make_env(Counts, 2, action_repeat=2), 2) == [[2, 2], [1, 1]]


def collector_of(env, steps: int) -> VectorCollector:
    def act(observation):
        return torch.zeros(len(observation), dtype=torch.int64)

    policy = TensorDictModule(act, in_keys=["observation"], out_keys=["action"])
    return VectorCollector(env, policy, frames_per_batch=steps, total_frames=steps)


def test_collector_counts_policy_steps_and_env_steps_separately():
    collector = collector_of(make_env(lambda: Rewards(7), 2, action_repeat=3), 12)
    (batch,) = collector
    assert batch.shape == (2, 6)
    assert collector.policy_steps == 12
    assert collector.env_steps == 2 * (3 + 3 + 1) * 2  # two episodes of each copy
    episodes = collector.take_episodes()
    assert [one[1:] for one in episodes] == [(28.0, 3, 7, True, {"note": 7.0})] * 4
    collector.shutdown()
