"""Running statistics of observations and rewards: exact, saved, and frozen in evaluation."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.envs import Normalizer, StepArrays, VectorEnv, make_env
from kit.envs.spaces import Leaf
from kit.envs.tensor import TensorStep
from tests.envs.odd_envs import ManySpaces, Steps
from tests.errors import raises_setting


class Noisy(gym.Env):
    """Observes and rewards random numbers; truncated after 5 steps. Keeps what it showed."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.shown: list[np.ndarray] = []
        self.rewards: list[float] = []
        self.ends: list[bool] = []

    def _see(self):
        seen = self.np_random.normal([1.0, -2.0, 3.0], [1.0, 5.0, 0.1]).astype(np.float32)
        self.shown.append(seen)
        return seen

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._see(), {}

    def step(self, action):
        self.count += 1
        reward = float(self.np_random.normal(3.0, 2.0))
        self.rewards.append(reward)
        self.ends.append(self.count == 5)
        seen = self.np_random.normal(size=3).astype(np.float32)
        if self.count < 5:
            seen = self._see()
        return seen, reward, False, self.count == 5, {}


def stepped(env: VectorEnv, steps: int) -> list:
    """Step with arrays and return all results."""
    env.start()
    results = []
    for _ in range(steps):
        step = env.new_step()
        env.step_arrays({"action": np.zeros(env.num_envs, np.int64)}, step)
        results.append(step)
    return results


def made(copies: int = 2, **settings) -> tuple[VectorEnv, list[Noisy]]:
    envs: list[Noisy] = []

    def make() -> Noisy:
        envs.append(Noisy())
        return envs[-1]

    return make_env(make, copies, seed=1, action_mask=False, **settings), envs


def test_observation_statistics_match_all_seen_observations():
    env, envs = made(normalize_observation=True)
    results = stepped(env, 50)
    shown = np.concatenate([one.shown for one in envs]).astype(np.float64)
    (statistics,) = env.normalizer.observation.values()
    assert len(shown) == 2 * 51
    np.testing.assert_allclose(statistics.mean, shown.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(statistics.var, shown.var(0), rtol=1e-3)
    last = (torch.from_numpy(envs[0].shown[-1]) - statistics.mean) / (statistics.var + 1e-8).sqrt()
    np.testing.assert_allclose(results[-1].observation["observation"][0], last, rtol=1e-5)


def test_next_observation_equals_following_one_within_episode():
    env, _ = made(normalize_observation=True)
    for step in stepped(env, 12):
        going_on = ~(step.terminated | step.truncated)
        there, next_one = step.next_observation["observation"], step.observation["observation"]
        assert (there[going_on] == next_one[going_on]).all()
        assert (there[~going_on] != next_one[~going_on]).all()


def test_normalizer_divides_rewards_by_std_of_discounted_sums():
    env, envs = made(copies=1, normalize_reward=True, gamma=0.5)
    results = stepped(env, 20)
    sums, running = [], 0.0
    for reward, end in zip(envs[0].rewards, envs[0].ends):
        running = running * 0.5 + np.float32(reward)
        sums.append(running)
        running = 0.0 if end else running
    assert [float(s.raw_reward[0]) for s in results] == [float(np.float32(r)) for r in
                                                         envs[0].rewards]  # fmt: skip
    assert env.normalizer.reward.count == pytest.approx(20, abs=1e-3)
    np.testing.assert_allclose(env.normalizer.reward.var, np.var(sums), rtol=1e-3)
    expected = envs[0].rewards[-1] / np.sqrt(env.normalizer.reward.var + 1e-8)
    np.testing.assert_allclose(results[-1].reward[0], expected, rtol=1e-5)
    assert results[-1].reward[0] > 0  # divided, not shifted


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 5), st.floats(0, 1))
def test_batched_reward_normalisation_matches_stepwise(seed, steps, copies, gamma):
    numbers = np.random.default_rng(seed)
    leaf = Leaf("observation", (), None, (2,), np.dtype(np.float32))
    settings = {"observation": False, "reward": True, "gamma": gamma}
    one, other = (Normalizer([leaf], copies, **settings) for _ in range(2))
    for learn in (True, True, False):  # statistics go on with the next steps, and stay
        shape = steps, copies
        flags, seen = np.zeros(shape, bool), {"observation": np.zeros((*shape, 2), np.float32)}
        apart = StepArrays(
            seen, seen, numbers.normal(3, 20, shape).astype(np.float32), flags,
            numbers.random(shape) < 0.3, np.ones(shape, np.int32), np.empty(shape, np.float32),
        )  # fmt: skip
        together = apart._replace(
            reward=apart.reward.copy(), raw_reward=np.empty_like(apart.reward)
        )
        for row in apart.rows():
            one.step(row, learn)
        other.rewards(together, learn)
        assert np.array_equal(together.raw_reward, apart.raw_reward)
        np.testing.assert_allclose(together.reward, apart.reward, rtol=1e-6)
        np.testing.assert_array_equal(other.returns, one.returns)
        np.testing.assert_allclose(other.reward, one.reward, rtol=1e-9)


def test_normalizer_clips_outlier_observations():
    class Spike(Steps):
        def _seen(self):
            return np.array([1e9 if self.count == 40 else self.count % 2], np.float32)

    env = make_env(lambda: Spike(1_000), 1, normalize_observation=True).eval()
    env.normalizer.observation["observation"].var.fill_(1.0)
    assert stepped(env, 40)[-1].observation["observation"].tolist() == [[10.0]]


def test_statistics_update_only_in_training():
    env, _ = made(normalize_observation=True, normalize_reward=True)
    stepped(env, 10)
    before = env.normalizer.state_dict()
    env.eval()
    stepped(env, 10)
    env.restart()
    assert env.normalizer.state_dict() == before
    env.train()
    stepped(env, 1)
    assert env.normalizer.state_dict()["reward"]["count"] > before["reward"]["count"]


def test_normalizer_restores_statistics_exactly():
    first, _ = made(normalize_observation=True, normalize_reward=True)
    stepped(first, 7)
    second, _ = made(normalize_observation=True, normalize_reward=True)
    second.normalizer.load_state_dict(first.normalizer.state_dict())
    assert second.normalizer.state_dict() == first.normalizer.state_dict()
    third, _ = made(copies=5, normalize_observation=True, normalize_reward=True)
    third.normalizer.load_state_dict(first.normalizer.state_dict())  # other copies, as evaluated
    assert len(third.normalizer.returns) == 5


def test_merged_copies_equal_one_normalizer_that_saw_everything():
    env = make_env("CartPole-v1", 2, normalize_observation=True, normalize_reward=True)
    whole, draw = env.normalizer, np.random.default_rng(0)
    copies = [env.make_again().normalizer for _ in range(3)]
    merged = env.make_again().normalizer
    for _ in range(50):
        known = merged.snapshot()
        for copy in copies:
            copy.restore(known)
            values = draw.normal(3.0, 2.0, (2, 4)).astype(np.float32)
            for one in (copy, whole):
                one.first({"observation": values.copy()}, learn=True)
        merged.merge([copy.learned_since(known) for copy in copies])
    for found, expected in zip(merged.snapshot(), whole.snapshot()):
        for value, other in zip(found, expected):
            np.testing.assert_allclose(value, other, rtol=1e-12)
    assert round(float(merged.observation["observation"].count) - 1e-4, 6) == 50 * 3 * 2


def test_load_state_dict_rejects_mismatched_observation_shape():
    first, second = (make_env(id, normalize_observation=True) for id in (Noisy, "CartPole-v1"))
    saved = second.normalizer.state_dict()
    with raises_setting("env.normalize_observation"):
        first.normalizer.load_state_dict(saved)
    saved["observation observation"] = {"mean": [5.0], "var": [1.0], "count": 1.0}
    with raises_setting("env.normalize_observation"):
        first.normalizer.load_state_dict(saved)
    assert not first.normalizer.observation["observation"].mean.any()


def test_evaluation_leaves_shared_normalizer_unchanged():
    train, _ = made(normalize_observation=True, normalize_reward=True)
    test, _ = made(copies=4, normalize_observation=True, normalize_reward=True)
    test.normalizer = train.normalizer
    stepped(train, 6)
    before = train.normalizer.state_dict()
    stepped(test.eval(), 12)
    assert train.normalizer.state_dict() == before


def test_normalizer_applies_only_to_float_observations():
    env = make_env(ManySpaces, 2, normalize_observation=True)
    assert list(env.normalizer.observation) == [("body", "position")]
    rollout = env.rollout(4, break_when_any_done=False)
    assert rollout["camera"].dtype.is_floating_point is False


def test_make_env_rejects_normalising_discrete_observations():
    class Numbers(Steps):
        observation_space = gym.spaces.Discrete(5)

    with raises_setting("env.normalize_observation"):
        make_env(Numbers, normalize_observation=True)


# ---------------------------------------------------------------------- as tensors
def pushed(step: int, rows: int) -> tuple[StepArrays, TensorStep]:
    """The same step as arrays and as tensors: observations far from 0, some episodes ending."""
    numbers = np.random.default_rng(step)
    seen, then = numbers.normal([100.0, -2.0], [1.0, 5.0], (2, rows, 2)).astype(np.float32)
    reward = numbers.normal(3.0, 2.0, rows).astype(np.float32)
    ended, cut = numbers.random((2, rows)) < 0.2
    ones = np.ones(rows, np.int32)
    tensors = map(torch.from_numpy, (seen, then, reward, ended, cut, ones, reward, ones))
    as_tensors = TensorStep(*(tensor.clone() for tensor in tensors))
    arrays = {"observation": then}, {"observation": seen}
    return StepArrays(*arrays, reward, ended, cut, ones, np.zeros_like(reward)), as_tensors


def test_tensor_functions_match_array_normalisation():
    steps, rows, largest = 40, 7, 120.0
    leaf = Leaf("observation", (), None, (2,), np.dtype(np.float32))
    arrays, tensors = (Normalizer([leaf], rows, observation=True, reward=True) for _ in range(2))
    first, _ = pushed(1_000, rows)
    statistics = tensors.first_tensors(
        tensors.statistics, torch.from_numpy(first.observation["observation"].copy())
    )
    arrays.first(first.observation, learn=True)
    for number in range(steps):
        here, there = pushed(number, rows)
        arrays.step(here, learn=True)
        statistics, there = tensors.step_tensors(statistics, there, learn=True)
        one_float32 = {"rtol": 2 * np.finfo(np.float32).eps, "atol": 1e-6}
        np.testing.assert_allclose(here.reward, there.reward, **one_float32)
        then = here.next_observation["observation"]
        np.testing.assert_allclose(then, there.next_observation, **one_float32)
    # Sums over rows are made in another order; an update has fewer than 20 roundings.
    rounding = 20 * (steps + 1) * rows * np.finfo(np.float64).eps * largest**2
    for one, other in zip(arrays.statistics.tensors(), statistics.tensors(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=rounding)


def test_array_path_uses_statistics_written_by_tensor_path():
    normalizer = made(normalize_observation=True, normalize_reward=True)[0].normalizer
    _, step = pushed(0, 2)
    step = step._replace(observation=torch.ones(2, 3), next_observation=torch.ones(2, 3))
    known = normalizer.statistics
    learnt, _ = normalizer.step_tensors(known, step, learn=True)
    for present, after in zip(known.tensors(), learnt.tensors()):
        present.copy_(after)  # as a collector does, in place
    seen = {"observation": np.ones((2, 3), np.float32)}
    normalizer.first(seen, learn=False)
    expected = (1.0 - learnt.observation.mean) / (learnt.observation.var + 1e-8).sqrt()
    np.testing.assert_allclose(seen["observation"][0], expected, rtol=1e-6)
