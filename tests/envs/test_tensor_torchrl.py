"""The torch environments as TorchRL's ``EnvBase``: specs, rollouts, resets, collector."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import check_env_specs

from kit.envs.tensor import TENSOR_ENVS, make_tensor_env

IDS = [id for id in TENSOR_ENVS if "/" not in id]  # without those of kit.testing
every_env = pytest.mark.parametrize("id", IDS)


@every_env
@pytest.mark.parametrize("settings", [{}, {"action_repeat": 3}, {"dtype": torch.float64}])
def test_env_passes_check_env_specs(id, settings):
    env = make_tensor_env(id, 3, seed=0, **settings)
    check_env_specs(env)
    assert env.batch_locked
    assert env.batch_size == (3,)
    assert env.rand_action()["action"].shape == ((3,) if env.num_actions else (3, 1))


@every_env
def test_rollout_matches_tensor_steps(id):
    env, twin = (make_tensor_env(id, 8, max_episode_steps=12, seed=0) for _ in range(2))
    first = env.reset()
    assert torch.equal(first["observation"], twin.reset_tensors())
    data = env.rollout(20, tensordict=first, auto_reset=False)
    assert data["next", "reward"].shape == data["next", "done"].shape == (*data.shape, 1)
    for time in range(data.shape[1]):
        step, now = twin.step_tensors(data["action"][:, time]), data["next"][:, time]
        assert torch.equal(now["observation"], step.next_observation)
        assert torch.equal(now["reward"].squeeze(-1), step.reward)
        assert torch.equal(now["terminated"].squeeze(-1), step.terminated)
        assert torch.equal(now["truncated"].squeeze(-1), step.truncated)
    assert now["done"].any()


@every_env
def test_long_rollout_resets_finished_envs(id):
    env = make_tensor_env(id, 8, max_episode_steps=7, seed=0)
    env = TransformedEnv(env, Compose(StepCounter(), RewardSum()))
    data = env.rollout(30, break_when_any_done=False)
    assert data.shape == (8, 30)
    done, count = data["next", "done"], data["next", "step_count"]
    assert (done == (data["next", "terminated"] | data["next", "truncated"])).all()
    assert torch.equal(data["next", "truncated"], count == 7)
    assert done.sum() >= 8 * 4
    going_on = ~done[:, :-1].squeeze(-1)
    same = (data["observation"][:, 1:] == data["next", "observation"][:, :-1]).all(-1)
    assert torch.equal(same, going_on)


def test_rollout_freezes_finished_envs_until_all_are_done():
    env = make_tensor_env("CartPole-v1", 8, seed=0)
    data = env.rollout(200, break_when_any_done=False, break_when_all_done=True)
    done = data["next", "done"].squeeze(-1)
    assert done[:, -1].all()
    assert not done[:, -2].all()
    assert (done.long().diff(dim=1) >= 0).all()


def test_partial_step_leaves_other_envs_unchanged():
    env = make_tensor_env("CartPole-v1", 4, seed=0)
    data = env.rand_action(env.reset())
    before = env.state_dict()
    moving = torch.tensor([True, False, True, False])
    result = env.step(data.set("_step", moving))["next"]
    changed = (env.physics != before["physics"]).any(0)
    assert torch.equal(changed, moving)
    assert torch.equal(env.episode_length, moving.long())
    assert torch.equal(result["observation"][~moving], data["observation"][~moving])


@every_env
def test_partial_reset_leaves_other_envs_unchanged(id):
    env = make_tensor_env(id, 6, seed=0)
    data = env.rollout(5, break_when_any_done=False)[:, -1]["next"]
    before = env.state_dict()
    mask = torch.tensor([True, False, False, True, False, False])
    fresh = env.reset(data.clone().set("_reset", mask.unsqueeze(-1)))
    assert torch.equal((env.physics != before["physics"]).any(0), mask)
    assert torch.equal(env.episode_length == 0, mask)
    assert torch.equal(env.episode_return == 0, mask)
    same = (fresh["observation"] == data["observation"]).all(-1)
    assert torch.equal(same, ~mask)
    assert torch.equal(fresh["observation"], env.observe(env.physics))


def test_later_steps_leave_tensordicts_unchanged():
    env = make_tensor_env("CartPole-v1", 4, seed=0)
    first = env.reset()
    data = env.step(env.rand_action(first)).clone()
    kept = data.clone()
    env.step(env.rand_action(data["next"].clone()))
    assert (data == kept).all()


@every_env
def test_set_seed_reproduces_rollout(id):
    runs = []
    for _ in range(2):
        env = make_tensor_env(id, 6, max_episode_steps=5)
        env.set_seed(3)
        torch.manual_seed(0)
        runs.append(env.rollout(20, break_when_any_done=False))
    assert (runs[0] == runs[1]).all()


def test_step_accepts_actions_of_different_dtype():
    env = make_tensor_env("Pendulum-v1", 3, seed=0)
    action = TensorDict({"action": torch.zeros(3, 1, dtype=torch.float64)}, [3])
    result = env.step(env.reset().update(action))["next"]
    assert result["observation"].dtype == result["reward"].dtype == torch.float32
