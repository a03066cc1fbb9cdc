"""Hindsight as a setting of recipes: rewards of other goals come from the environment."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import RewardWrapper
from tensordict import TensorDict

import recipes.sac
from kit.buffers import make_replay_buffer
from kit.buffers.goals import GoalReward
from kit.envs import make_env
from kit.experiment import EnvConfig, OffPolicySteps
from kit.testing.envs import Glimpse, Reach
from tests.errors import raises_setting

REACH = "kit.testing.envs:kit/Reach-v0"


class OneByOne(Reach):
    """Computes the reward of one goal at a time."""

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -1.0 if np.linalg.norm(achieved_goal - desired_goal) > self.tolerance else 0.0


class Doubled(RewardWrapper):
    def reward(self, reward):
        return 2 * reward


def configured(**changes):
    steps = OffPolicySteps(
        total_policy_steps=60, learning_starts=58, minibatch_size=40, evaluation_every=None,
        evaluation_episodes=1,
    )  # fmt: skip
    return recipes.sac.Config(
        **{"env": EnvConfig(id=REACH, num_envs=2), "steps": steps, "hidden_sizes": [4],
           "log_dir": None, "progress": False, **changes}
    )  # fmt: skip


@pytest.mark.parametrize("make", [Reach, OneByOne])
def test_goal_reward_matches_env_compute_reward(make):
    env = make()
    reward = GoalReward(make_env(make), "future")
    generator = torch.Generator().manual_seed(0)
    achieved = torch.rand(50, 3, generator=generator) / 5
    desired = achieved + torch.rand(50, 3, generator=generator) / 8
    goals = {"achieved_goal": achieved, "desired_goal": desired}
    found = reward(TensorDict({"next": goals}, [50]))
    wanted = [env.compute_reward(a.numpy(), d.numpy(), {}) for a, d in zip(achieved, desired)]
    assert found.shape == (50, 1)
    assert found.flatten().tolist() == wanted
    assert len(set(wanted)) == 2


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_sac_recomputes_rewards_of_relabeled_goals(strategy):
    trainer = recipes.sac.build(configured(hindsight=strategy))
    trainer.run()
    env = Reach()
    torch.manual_seed(0)
    rows = trainer.buffer.buffer.sample()
    after = rows["next"]
    goals = zip(after["achieved_goal"].numpy(), rows["desired_goal"].numpy())
    wanted = [env.compute_reward(*both, {}) for both in goals]
    assert after["reward"].flatten().tolist() == wanted
    assert wanted.count(0.0) > 2  # without hindsight none is reached in so few steps


@pytest.mark.parametrize(
    "env",
    [EnvConfig(id="Pendulum-v1", num_envs=2), EnvConfig(id=REACH, num_envs=2, action_repeat=2)],
)
def test_hindsight_rejects_env_without_computable_rewards(env):
    with raises_setting("hindsight"):
        recipes.sac.build(configured(env=env, hindsight="final"))


@pytest.mark.parametrize("make", [Glimpse, lambda: Doubled(Reach())])
def test_goal_reward_rejects_missing_or_altered_env_reward(make):
    with raises_setting("hindsight") as refused:
        GoalReward(make_env(make), "future")
    assert refused.value.field == "hindsight"


def test_goal_reward_is_computed_locally_for_async_envs():
    env = make_env(Reach, 1, vectorization="async", num_workers=1, step_timeout=30.0)
    assert GoalReward(env, "future").compute(np.zeros(3), np.ones(3), {}) == -1
    env.close()


def test_hindsight_rejects_sequence_length():
    with raises_setting("hindsight"):
        make_replay_buffer(10, 2, sequence_length=2, strategy="future", reward_fn=lambda _: None)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1])
def test_sac_reaches_goals_only_with_hindsight(seed):
    returns = {}
    for hindsight in ("future", None):
        last = recipes.sac.build(
            configured(
                env=EnvConfig(id=REACH, num_envs=1),
                steps=OffPolicySteps(
                    total_policy_steps=3_000, learning_starts=580, minibatch_size=128,
                    evaluation_every=3_000, evaluation_episodes=20,
                ),
                hidden_sizes=[64, 64], gamma=0.95, initial_alpha=0.1, hindsight=hindsight,
                seed=seed,
            )
        )  # fmt: skip
        last.run()
        returns[hindsight] = last.journal.latest["evaluation/return"]
    assert returns["future"] > -5
    assert returns[None] < -20
