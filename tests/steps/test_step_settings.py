"""The settings of a recipe's steps make the plan that they say."""

from __future__ import annotations

import pytest

import recipes.ppo_recurrent
from kit.config.plain import from_plain
from kit.config.plan import make_plan
from kit.steps.settings import OffPolicySteps, OnPolicySteps
from tests.errors import raises_setting


def on_policy(**settings):
    return OnPolicySteps(total_policy_steps=128, steps_per_env=8, update_epochs=1, **settings)


# ---------------------------------------------------------------------- minibatches of a batch
def test_minibatch_size_none_uses_full_batch():
    steps = on_policy(minibatch_size=None)
    for num_envs in (1, 2, 4):
        assert steps.to_plan(num_envs=num_envs).minibatch_sizes(1) == [8 * num_envs]


def test_from_plain_accepts_full_batch_and_minibatches():
    assert from_plain(OnPolicySteps, {"minibatch_size": None}).minibatch_size is None
    assert from_plain(OnPolicySteps, {"minibatches": 4}).minibatches == 4


@pytest.mark.parametrize(("num_envs", "size"), [(1, 2), (2, 4), (4, 8)])
def test_minibatches_divide_batch_equally(num_envs, size):
    plan = on_policy(minibatches=4).to_plan(num_envs=num_envs)
    assert plan.minibatch_sizes(1) == [size] * 4


def test_minibatches_determine_minibatch_size():
    assert on_policy(minibatches=2, minibatch_size=None).to_plan(num_envs=2).minibatch_size == 8


@pytest.mark.parametrize(
    "settings",
    [
        {"minibatches": 3},
        {"minibatches": 17},
        {"minibatches": 2, "minibatch_size": 4},
    ],
)
def test_plan_rejects_minibatches_that_do_not_fit_batch(settings):
    with raises_setting("minibatches"):
        on_policy(**settings).to_plan(num_envs=2)


def test_minibatches_replace_default_size_of_recipe():
    config = recipes.ppo_recurrent.Config()
    config.steps.minibatches = 2  # of 64 sequences
    assert make_plan(config, "ppo_recurrent").minibatch_size == 32
    config.steps.minibatch_size = OnPolicySteps.minibatch_size
    with raises_setting("steps.minibatches"):
        make_plan(config, "ppo_recurrent")


def test_plan_rejects_minibatches_for_complete_episodes():
    steps = OnPolicySteps(steps_per_env=None, min_episodes=2, minibatches=4)
    with raises_setting("minibatches"):
        steps.to_plan()


# ---------------------------------------------------------------------- sequences
def test_replay_samples_can_be_sequences():
    steps = OffPolicySteps(
        total_policy_steps=20, learning_starts=10, minibatch_size=4, sequence_length=5
    )
    plan = steps.to_plan(num_envs=1)
    assert (plan.sequence_length, plan.minibatch_size) == (5, 4)
    assert plan.after(20).samples == plan.after(20).gradient_steps * 4 * 5


# ---------------------------------------------------------------------- rounding
def test_total_is_rounded_up_by_default():
    plan = OnPolicySteps(total_policy_steps=1_000_000).to_plan(num_envs=8)
    assert (plan.total_policy_steps, plan.asked["total_policy_steps"]) == (1_000_448, 1_000_000)
    (row,) = (line for line in plan.table().splitlines() if line.startswith("policy steps"))
    assert row.split() == ["policy", "steps", "1,000,000", "1,000,448"]


def test_total_is_rejected_when_rounding_is_error():
    with raises_setting("total_policy_steps"):
        OnPolicySteps(total_policy_steps=1_000_000, rounding="error").to_plan(num_envs=8)


def test_learning_starts_is_rounded_up_to_steps_of_all_envs():
    plan = OffPolicySteps(learning_starts=1_001).to_plan(num_envs=4)
    assert (plan.learning_starts, plan.random_steps) == (1_004, 1_004)
