"""A plan knows every count of a run before it runs."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given

from kit.steps import RunSchedule, SettingError, StepPlan
from tests.errors import raises_setting
from tests.steps.step_plans import cut, episode_plans, simulate, step_plans


def test_on_policy_plan_derives_counts_from_settings():
    plan = StepPlan(
        total_policy_steps=65_536,
        num_envs=8,
        steps_per_env=128,
        update_epochs=4,
        minibatch_size=256,
    )
    assert plan.frames_per_batch == 1024
    assert plan.iterations == 64
    after = plan.after(64)
    assert (after.policy_steps, after.gradient_steps, after.samples) == (65_536, 1024, 262_144)
    assert plan.minibatch_sizes(1) == [256] * 16


def test_off_policy_plan_trains_from_learning_starts():
    plan = StepPlan(
        total_policy_steps=40, num_envs=4, learning_starts=16, replay_ratio=1, minibatch_size=8
    )
    assert [plan.gradient_steps(k) for k in range(1, 11)] == [0, 0, 0, 4, 4, 4, 4, 4, 4, 4]
    assert plan.first_training_iteration == 4
    assert plan.random_steps == 16


def test_plan_counts_all_processes_and_local_steps():
    plan = StepPlan(
        iterations=3, num_envs=2, steps_per_env=5, world_size=3, update_epochs=1, minibatch_size=5
    )
    after = plan.after(3)
    assert after.policy_steps == 3 * 2 * 5 * 3
    assert after.local_gradient_steps == 3 * 2
    assert after.gradient_steps == 3 * after.local_gradient_steps


def test_action_repeat_affects_only_env_steps():
    plan = StepPlan(iterations=10, num_envs=2, action_repeat=4)
    assert plan.total_policy_steps == 20
    assert plan.env_steps_after(10, episode_env_steps=100) == 80


@pytest.mark.parametrize(
    ("length", "repeat", "limit", "env_steps"),
    [(5, 2, None, 2 * (5 + 5 + 5 + 2)), (100, 4, 3, 2 * 40), (5, 1, None, 20), (4, 8, None, 80)],
)
def test_episode_can_end_inside_action_repeat(length, repeat, limit, env_steps):
    plan = StepPlan(iterations=10, num_envs=2, action_repeat=repeat, max_episode_steps=limit)
    assert plan.env_steps_after(10, length) == env_steps


def test_plan_is_inexact_for_unknown_episode_length():
    plan = StepPlan(iterations=2, min_episodes=4)
    assert not plan.is_exact
    with raises_setting("episode_length"):
        plan.after(1)


@pytest.mark.parametrize("iteration", [1.5, -1, 4])
def test_after_rejects_iteration_outside_plan(iteration):
    with raises_setting("iteration"):
        StepPlan(iterations=3).after(iteration)


def test_prefill_can_join_first_on_policy_batch():
    plan = StepPlan(
        iterations=2,
        num_envs=2,
        steps_per_env=10,
        prefill_steps=16,
        prefill_in_first_batch=True,
        update_epochs=1,
        minibatch_size=15,
        last_minibatch="merge",
    )
    assert [plan.minibatch_sizes(k) for k in (1, 2)] == [[15, 21], [20]]
    schedule = RunSchedule(plan)
    assert [schedule.advance(20).gradient_steps for _ in range(2)] == [2, 1]


def test_train_on_newest_limits_rows_of_batch():
    plan = StepPlan(
        iterations=2, num_envs=4, steps_per_env=16, update_epochs=1, minibatch_size=8,
        train_on_newest=32,
    )  # fmt: skip
    assert plan.minibatch_sizes(1) == [8] * 4
    assert plan.after(2).samples == 64


def test_carry_moves_leftover_rows_to_next_epoch():
    plan = StepPlan(
        iterations=3, num_envs=5, steps_per_env=8, update_epochs=2, minibatch_size=12,
        last_minibatch="carry",
    )  # fmt: skip
    assert [plan.minibatch_sizes(k) for k in (1, 2, 3)] == [
        [12, 12, 12, 4, 12, 12],
        [12, 4, 12, 12, 12, 4],
        [12, 12, 12, 4, 12, 12],
    ]
    assert plan.after(3).samples == sum(sum(plan.minibatch_sizes(k)) for k in (1, 2, 3))


def test_recurrent_minibatches_contain_complete_sequences():
    plan = StepPlan(
        iterations=1, num_envs=4, steps_per_env=32, update_epochs=2, minibatch_size=3,
        sequence_length=16,
    )  # fmt: skip
    assert plan.minibatch_sizes(1) == [3, 3, 2] * 2
    assert plan.after(1).samples == 2 * 4 * 32
    assert plan.unseen_samples(1, 4) == (3 + 2) * 16


def test_offline_plan_collects_nothing():
    plan = StepPlan(
        iterations=3, steps_per_env=0, gradient_steps_per_iteration=10, minibatch_size=8
    )
    assert plan.offline
    assert plan.total_policy_steps == 0
    assert plan.after(3).gradient_steps == 30
    assert "stored (offline)" in plan.table()


def test_minibatches_per_gradient_step_multiply_minibatches():
    plan = StepPlan(
        iterations=2, steps_per_env=4, gradient_steps_per_iteration=5, minibatch_size=8,
        minibatches_per_gradient_step=3,
    )  # fmt: skip
    assert plan.minibatch_sizes(1) == [8] * 15
    assert plan.minibatch_counts(2) == {8: 15}


def test_offline_evaluations_follow_gradient_steps():
    plan = StepPlan(
        iterations=4, steps_per_env=0, gradient_steps_per_iteration=10, pretrain_steps=5,
        minibatch_size=8, evaluation_every=20,
    )  # fmt: skip
    assert [plan.gradient_steps_after(k) for k in range(5)] == [0, 15, 25, 35, 45]
    assert [plan.evaluations(k) for k in range(5)] == [0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"update_epochs": 2},
            r"update_epochs=2 needs policy steps.* gradient_steps",
        ),
        (
            {"replay_ratio": 1},
            r"replay_ratio='1' needs policy steps.* gradient_steps",
        ),
        ({"learning_starts": 5}, r"learning_starts=5 needs policy steps.*Try: 0\."),
        ({"prefill_steps": 5}, r"prefill_steps=5 needs policy steps.*Try: 0\."),
    ],
)
def test_offline_plan_rejects_counts_of_policy_steps(settings, message):
    with pytest.raises(SettingError, match=message):
        StepPlan(iterations=3, steps_per_env=0, minibatch_size=8, **settings)


# -------------------------------------------------------------------- simulation
@given(step_plans() | episode_plans())
def test_plan_counts_match_step_by_step_simulation(plan):
    story = simulate(plan)
    for iteration, (played, random, updates, evaluated) in enumerate(story):
        counts = plan.after(iteration)
        assert counts.policy_steps == played
        assert counts.random_policy_steps == random
        assert counts.local_gradient_steps == updates
        assert counts.evaluations == evaluated


@given(step_plans())
def test_minibatch_sizes_match_cut_of_batch(plan):
    for k in range(1, plan.iterations + 1):
        if plan.on_policy and k >= plan.first_training_iteration:
            rows = plan.rows(k)
            one = cut(rows, plan.minibatch_size or rows, plan.last_minibatch)
            one = one[: plan.minibatches_per_epoch]
            assert plan.minibatch_sizes(k) == [len(m) for m in one] * plan.update_epochs
        if plan.on_policy or plan.minibatch_size is not None:
            sizes = plan.minibatch_sizes(k)
            counts = plan.minibatch_counts(k)
            assert {size: sizes.count(size) for size in set(sizes)} == counts
            trained = plan.samples_after(k) - plan.samples_after(k - 1)
            assert trained == sum(sizes)


# -------------------------------------------------------------------- in and out
@given(step_plans() | episode_plans())
def test_plan_survives_json_and_pickle(plan):
    assert StepPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(StepPlan.from_dict(plan.to_dict())) == hash(plan)


def test_from_dict_rejects_unknown_setting():
    with raises_setting("num_env"):
        StepPlan.from_dict({"num_env": 3, "iterations": 1})


def test_replace_recomputes_iterations():
    plan = StepPlan(total_policy_steps=100, num_envs=10)
    assert plan.replace(num_envs=5).iterations == 20
    assert plan.replace(iterations=3).total_policy_steps == 30


# -------------------------------------------------------------------- equality
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"replay_ratio": "1/4"}, {"gradient_steps_per_iteration": 1}),
        ({"replay_ratio": 0}, {}),
        ({"learning_starts": 4, "random_steps": 0}, {"learning_starts": 0}),
        ({"evaluation_every": 8}, {"evaluation_every_iterations": 2}),
        ({"evaluation_every": 40, "final_evaluation": False}, {"final_evaluation": True}),
        ({"update_epochs": 1, "minibatch_size": 4}, {"update_epochs": 1}),
        (
            {"update_epochs": 1, "minibatch_size": 2, "last_minibatch": "drop"},
            {"update_epochs": 1, "minibatch_size": 2, "last_minibatch": "merge"},
        ),
    ],
)
def test_plans_are_equal_when_runs_are_identical(one, other):
    first = StepPlan(iterations=10, num_envs=4, **one)
    second = StepPlan(iterations=10, num_envs=4, **other)
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    "change",
    [
        {"iterations": 11},
        {"num_envs": 2},
        {"replay_ratio": 1},
        {"replay_ratio": "1/3"},
        {"action_repeat": 2},
        {"evaluation_every": 8},
        {"initial_evaluations": 1},
        {"random_steps": 8},
        {"minibatch_size": 16},
        {"prefill_steps": 4},
    ],
)
def test_plans_with_different_counts_are_unequal(change):
    settings = {"iterations": 10, "num_envs": 4, "replay_ratio": "1/4", "minibatch_size": 8}
    assert StepPlan(**settings) != StepPlan(**settings | change)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"minibatch_size": 3}, {"minibatch_size": 3, "last_minibatch": "drop"}),
        (
            {"minibatch_size": 1, "minibatches_per_epoch": 3, "last_minibatch": "carry"},
            {"minibatch_size": 1, "minibatches_per_epoch": 3},
        ),
        ({"steps_per_env": None, "min_steps": 40}, {"steps_per_env": None, "min_steps": 80}),
    ],
)
def test_plans_with_different_cutting_or_min_steps_are_unequal(one, other):
    settings = {"iterations": 10, "num_envs": 4, "update_epochs": 1}
    assert StepPlan(**settings, **one) != StepPlan(**settings, **other)


@given(step_plans(), step_plans())
def test_equal_plans_have_equal_counts(one, other):
    if one == other:
        ours = [one.after(k) for k in range(one.iterations + 1)]
        assert ours == [other.after(k) for k in range(other.iterations + 1)]


def test_table_shows_requested_and_planned_counts():
    plan = StepPlan(total_policy_steps=1000, num_envs=3, rounding="down")
    table = plan.table()
    assert plan.total_policy_steps == 999
    assert plan.asked == {"total_policy_steps": 1000}
    assert "1,000" in table
    assert "999" in table


def test_table_supports_batches_of_any_size():
    plan = StepPlan(
        iterations=2, num_envs=1000, steps_per_env=10**9, update_epochs=10, minibatch_size=1
    )
    assert "10,000,000,000,000 x 1" in plan.table()


def test_replace_updates_default_random_steps():
    plan = StepPlan(total_policy_steps=400, learning_starts=100, replay_ratio=1, minibatch_size=8)
    assert plan.replace(learning_starts=200).random_steps == 200
    assert plan.replace(learning_starts=200, random_steps=50).random_steps == 50
    assert plan.replace(random_steps=50).replace(learning_starts=200).random_steps == 50


def test_plan_of_episodes_shorter_than_sequence_round_trips():
    episodes = {"min_episodes": 1, "episode_length": 1, "sequence_length": 2}
    plan = StepPlan(iterations=1, update_epochs=2, minibatch_size=2, **episodes)
    assert plan == StepPlan.from_dict(plan.to_dict())


def test_plan_without_iterations_has_no_prefill():
    prefill = {"prefill_steps": 30, "prefill_is_iteration": True}
    plan = StepPlan(iterations=0, steps_per_env=10, gradient_steps_per_iteration=1, **prefill)
    assert plan.total_policy_steps == 0
    assert plan.replace(action_repeat=2).iterations == 0


@pytest.mark.parametrize(
    ("last", "row"),
    [
        ("smaller", "  last of each epoch, partial"),
        ("drop", "  left out of each epoch"),
        ("merge", None),
    ],
)
def test_table_lists_rows_that_fill_no_minibatch(last, row):
    settings = {"total_policy_steps": 1_000, "num_envs": 4, "steps_per_env": 25}
    settings |= {"update_epochs": 2, "last_minibatch": last}
    lines = StepPlan(**settings, minibatch_size=64).table().splitlines()
    found = [line.split("36 of 64")[0].rstrip() for line in lines if line.endswith(" 36 of 64")]
    assert found == ([] if row is None else [row])
    assert " of 50" not in StepPlan(**settings, minibatch_size=50).table()


def test_plans_with_different_last_minibatch_are_unequal():
    settings = {"iterations": 10, "num_envs": 4, "update_epochs": 1, "minibatch_size": 3}
    smaller, drop = (StepPlan(**settings, last_minibatch=last) for last in ("smaller", "drop"))
    assert smaller != drop


def test_plans_with_different_min_steps_are_unequal():
    plan = StepPlan(iterations=10, steps_per_env=None, min_steps=8)
    assert plan != plan.replace(min_steps=16)
