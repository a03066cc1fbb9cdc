"""The torch environments against Gymnasium's own: same states, rewards and ends, step by step."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from kit.envs.tensor import TENSOR_ENVS, make_tensor_env

IDS = [id for id in TENSOR_ENVS if "/" not in id]  # without those of kit.testing
EXACT = {"rtol": 1e-9, "atol": 1e-9}
"""Double precision: processors differ in the last bits of a sine, and a step multiplies them."""
SINGLE = {"Acrobot-v1": {"rtol": 5e-3, "atol": 5e-3}}
ANY_SINGLE = {"rtol": 1e-5, "atol": 1e-5}
"""What float32 may differ by after one step; Acrobot's fastest states amplify the rounding."""

# Where random states are drawn from: beyond every wall, goal and limit of a step.
LOW = {
    "CartPole": (-2.5, -3.0, -0.25, -3.0),
    "Pendulum": (-20.0, -8.0),
    "MountainCar": (-1.2, -0.07),
    "Acrobot": (-np.pi, -np.pi, -4 * np.pi, -9 * np.pi),
}
HIGH = {
    "CartPole": (2.5, 3.0, 0.25, 3.0),
    "Pendulum": (20.0, 8.0),
    "MountainCar": (0.6, 0.07),
    "Acrobot": (np.pi, np.pi, 4 * np.pi, 9 * np.pi),
}


class Reference:
    """Gymnasium's environment, put into any state before each step."""

    def __init__(self, id):
        self.env = gym.make(id, disable_env_checker=True)
        self.env.reset(seed=0)
        self.rounds_state = id == "MountainCarContinuous-v0"  # it keeps float32

    def step(self, state, action):
        self.env.unwrapped.state = np.array(state, dtype=np.float64)
        if action.dtype == torch.int64:
            result = self.env.step(int(action))
        else:
            result = self.env.step(action.double().numpy())
        observation, reward, terminated, truncated, _ = result
        return np.array(self.env.unwrapped.state), observation, reward, terminated, truncated


def random_states(id, num, seed=0):
    name = id.split("-")[0].removesuffix("Continuous")
    low, high = torch.tensor(LOW[name]).double(), torch.tensor(HIGH[name]).double()
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(low), num, generator=generator, dtype=torch.float64)
    return low[:, None] + (high - low)[:, None] * uniform


def random_actions(env, generator):
    if env.num_actions:
        return torch.randint(env.num_actions, (env.num_envs,), generator=generator)
    # Half of them beyond the limits, where they are clipped.
    uniform = torch.rand(env.num_envs, 1, generator=generator, dtype=torch.float64)
    return (uniform * 4 - 2) * env.action_limit


def assert_same_state(ours, reference, theirs, tolerance):
    if reference.rounds_state and tolerance is EXACT:
        np.testing.assert_array_equal(ours.float().numpy(), theirs)
    else:
        np.testing.assert_allclose(ours.double().numpy(), theirs, **tolerance)


@pytest.mark.parametrize("id", IDS)
def test_one_step_matches_gymnasium_from_random_states(id):
    env, reference = make_tensor_env(id, 3000, dtype=torch.float64), Reference(id)
    states = random_states(id, env.num_envs)
    actions = random_actions(env, torch.Generator().manual_seed(1))
    physics, reward, terminated = env.transition(states, actions)
    observation = env.observe(physics)
    for copy in range(env.num_envs):
        reference.env.reset()
        theirs = reference.step(states[:, copy], actions[copy])
        assert_same_state(physics[:, copy], reference, theirs[0], EXACT)
        np.testing.assert_allclose(observation[copy].numpy(), theirs[1], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(reward[copy].item(), theirs[2], **EXACT)
        assert terminated[copy].item() == theirs[3]
    if id != "Pendulum-v1":
        assert 10 < terminated.sum() < env.num_envs - 10


@pytest.mark.parametrize("id", IDS)
def test_single_precision_stays_close_to_double(id):
    single, double = make_tensor_env(id, 3000), make_tensor_env(id, 3000, dtype=torch.float64)
    states = random_states(id, single.num_envs).float()
    actions = random_actions(single, torch.Generator().manual_seed(1))
    near, reward, terminated = single.transition(states, actions)
    exact, exact_reward, exact_terminated = double.transition(states.double(), actions)
    seen = single.observe(near)
    assert near.dtype == reward.dtype == seen.dtype == torch.float32
    assert (terminated == exact_terminated).double().mean() > 0.999
    tolerance = SINGLE.get(id, ANY_SINGLE)
    torch.testing.assert_close(seen.double(), double.observe(exact), **tolerance)
    same = terminated == exact_terminated
    torch.testing.assert_close(reward[same].double(), exact_reward[same], **tolerance)


@pytest.mark.parametrize("id", IDS)
def test_long_runs_with_resets_match_gymnasium(id):
    env = make_tensor_env(id, 4, dtype=torch.float64, seed=3)
    references = [Reference(id) for _ in range(env.num_envs)]
    generator = torch.Generator().manual_seed(4)
    limit = gym.spec(id).max_episode_steps
    assert env.max_episode_steps == limit
    length, total, ends = np.zeros(env.num_envs, int), np.zeros(env.num_envs), 0
    for _ in range(limit + 20):
        before, action = env.physics.clone(), random_actions(env, generator)
        step = env.step_tensors(action)
        after = env.physics.clone()
        for copy, reference in enumerate(references):
            state, observation, reward, terminated, truncated = reference.step(
                before[:, copy], action[copy]
            )
            length[copy] += 1
            total[copy] += reward
            np.testing.assert_allclose(
                step.next_observation[copy].numpy(), observation, rtol=1e-6, atol=1e-7
            )
            np.testing.assert_allclose(step.reward[copy].item(), reward, **EXACT)
            assert step.terminated[copy].item() == terminated
            assert step.truncated[copy].item() == truncated
            assert step.episode_length[copy].item() == length[copy]
            np.testing.assert_allclose(step.episode_return[copy].item(), total[copy], **EXACT)
            if terminated or truncated:
                reference.env.reset()
                length[copy], total[copy], ends = 0, 0.0, ends + 1
            else:
                assert_same_state(after[:, copy], reference, state, EXACT)
            assert torch.equal(step.observation[copy], env.observe(after)[copy])
    assert ends >= env.num_envs


@pytest.mark.parametrize("id", ["CartPole-v1", "MountainCar-v0", "Pendulum-v1"])
def test_action_repeat_holds_action_and_stops_with_episode(id):
    env = make_tensor_env(id, 500, dtype=torch.float64, action_repeat=4)
    reference, states = Reference(id), random_states(id, env.num_envs)
    env.physics.copy_(states)
    actions = random_actions(env, torch.Generator().manual_seed(1))
    step = env.step_tensors(actions)
    for copy in range(env.num_envs):
        reference.env.reset()
        state, total, env_steps, terminated = states[:, copy], 0.0, 0, False
        while env_steps < 4 and not terminated:
            state, observation, reward, terminated, _ = reference.step(state, actions[copy])
            total, env_steps = total + reward, env_steps + 1
        assert step.env_steps[copy].item() == env_steps
        assert step.terminated[copy].item() == terminated
        np.testing.assert_allclose(step.reward[copy].item(), total, **EXACT)
        np.testing.assert_allclose(
            step.next_observation[copy].numpy(), observation, rtol=1e-6, atol=1e-6
        )
    if id != "Pendulum-v1":
        assert (step.env_steps < 4).sum() > 0
    assert (step.episode_length == 1).all()


@pytest.mark.parametrize("id", IDS)
def test_initial_states_match_gymnasium_distribution(id):
    env = make_tensor_env(id, 20_000, dtype=torch.float64, seed=0)
    reference = gym.make(id, disable_env_checker=True)
    theirs = []
    for seed in range(2000):
        reference.reset(seed=seed)
        theirs.append(np.array(reference.unwrapped.state, dtype=np.float64))
    ours, theirs = env.physics, torch.tensor(np.stack(theirs, axis=1))
    spread = theirs.amax(1) - theirs.amin(1)
    assert ((ours.amin(1) - theirs.amin(1)).abs() <= 0.01 * spread).all()
    assert ((ours.amax(1) - theirs.amax(1)).abs() <= 0.01 * spread).all()
    assert ((ours.mean(1) - theirs.mean(1)).abs() <= 0.05 * spread).all()
    correlation = torch.corrcoef(ours[: env.uniform_size])
    off_diagonal = correlation - torch.eye(env.uniform_size)
    assert env.uniform_size == 1 or off_diagonal.abs().max() < 0.05
