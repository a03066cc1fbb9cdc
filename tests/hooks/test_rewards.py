"""Rewards that are learned from are standardised and scaled; returns are as they were."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import recipes.dqn
import recipes.dreamerv3
import recipes.sac
from kit.experiment import EnvConfig, OffPolicySteps
from kit.hooks import ScaleReward, SignReward
from tests.errors import raises_setting


def minibatch(rewards: list[float]) -> TensorDict:
    reward = torch.tensor(rewards).unsqueeze(-1)
    return TensorDict({"next": {"reward": reward}}, [len(rewards)])


def rewards_of(found: TensorDict) -> list[float]:
    return found["next", "reward"].flatten().tolist()


def test_scale_reward_multiplies_rewards():
    assert rewards_of(ScaleReward(0.5).scaled(minibatch([1.0, -2.0, 4.0]))) == [0.5, -1.0, 2.0]


def test_scale_reward_standardises_before_scaling():
    found = ScaleReward(3.0, standardize=True).scaled(minibatch([1.0, 3.0]))
    assert rewards_of(found) == pytest.approx([-3 / 2**0.5, 3 / 2**0.5])  # as pyrado: n - 1
    assert rewards_of(ScaleReward(standardize=True).scaled(minibatch([7.0]))) == [0.0]


def test_scale_reward_standardises_equal_rewards_to_zero():
    found = ScaleReward(standardize=True).scaled(minibatch([5.0, 5.0, 5.0]))
    assert rewards_of(found) == [0.0, 0.0, 0.0]


def test_sign_reward_returns_signs():
    assert rewards_of(SignReward().signs(minibatch([5.0, 0.0, -0.5]))) == [1.0, 0.0, -1.0]


@pytest.mark.parametrize(
    "settings", [{"reward_scale": 0.01}, {"standardize_reward": True}], ids=str
)
def test_run_trains_on_changed_and_logs_original_rewards(settings):
    steps = OffPolicySteps(total_policy_steps=400, learning_starts=64, evaluation_every=None)
    env = EnvConfig(id="Pendulum-v1", num_envs=1)
    how = {"steps": steps, "env": env, "log_dir": None, "progress": False, "seed": 3}
    trainers = [recipes.sac.build(recipes.sac.Config(**how, **more)) for more in ({}, settings)]
    seen: list[list[float]] = [[], []]
    for trainer, found in zip(trainers, seen):
        trainer.register_op("post_optim_log", lambda m, found=found: found.append(rewards_of(m)))
        trainer.run()
    stored = trainers[1].buffer.buffer[:]["next", "reward"]
    assert float(stored.min()) < -1.0
    assert max(map(min, seen[0])) < -1.0
    if "reward_scale" in settings:
        assert min(map(min, seen[1])) > -0.17  # a hundredth of Pendulum's least, -16.3
    else:
        assert all(abs(sum(rewards)) < 1e-2 for rewards in seen[1])
    returns = [trainer.journal.latest["episode/return"] for trainer in trainers]
    assert all(value < -200.0 for value in returns)


@pytest.mark.parametrize("settings", [{}, {"reward_scale": 0.5}], ids=str)
def test_sac_rejects_training_without_replay_buffer(settings):
    config = recipes.sac.Config(log_dir=None, progress=False, **settings)
    trainer = recipes.sac.build(config, buffer=None)
    with raises_setting("buffer"):
        trainer.run()


@pytest.mark.parametrize(("n_step", "refused"), [(3, True), (1, False)])
def test_sign_reward_rejects_n_step_returns(n_step, refused):
    config = recipes.dqn.Config(log_dir=None, progress=False, n_step=n_step)
    if not refused:
        assert recipes.dqn.build(config, hooks=[SignReward()])
        return
    with raises_setting("hook"):
        recipes.dqn.build(config, hooks=[SignReward()])
    with raises_setting("hook"):
        recipes.dqn.build(config).add(SignReward()).run()


@pytest.mark.parametrize(("n_step", "refused"), [(3, True), (1, False)])
def test_scale_reward_rejects_standardising_n_step_returns(n_step, refused):
    """Where an episode ends, fewer are summed: their mean is not that of the others."""
    config = recipes.dqn.Config(
        log_dir=None, progress=False, n_step=n_step, standardize_reward=True, reward_scale=0.5
    )
    if not refused:
        assert recipes.dqn.build(config)
        return
    with raises_setting("hook"):
        recipes.dqn.build(config)


@pytest.mark.parametrize("hook", [SignReward(), ScaleReward(0.1)], ids=lambda hook: hook.name)
def test_dreamer_rejects_reward_hooks(hook):
    config = recipes.dreamerv3.Config(log_dir=None, progress=False)
    with raises_setting("hook"):
        recipes.dreamerv3.build(config, hooks=[hook])
