"""A schedule says, collection by collection, what is due; it agrees with the plan."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.steps import RunSchedule, StepPlan
from tests.errors import raises_setting
from tests.steps.step_plans import episode_plans, step_plans

PERIODS = st.none() | st.integers(1, 60)


@st.composite
def offline_plans(draw) -> StepPlan:
    """Plans that collect nothing."""
    return StepPlan(
        iterations=draw(st.integers(0, 10)),
        steps_per_env=0,
        gradient_steps_per_iteration=draw(st.integers(0, 9)),
        pretrain_steps=draw(st.integers(0, 9)),
        minibatch_size=8,
        evaluation_every=draw(PERIODS),
        initial_evaluations=draw(st.integers(0, 2)),
        final_evaluation=draw(st.booleans()),
    )


plans = step_plans() | episode_plans() | offline_plans()


def follow(schedule: RunSchedule, plan: StepPlan):
    """What is due in every iteration, and whether the run is done after it."""
    for iteration in range(1, plan.iterations + 1):
        assert not schedule.done
        yield schedule.advance(plan.collected(iteration))
    assert schedule.done


# ---------------------------------------------------------------------- agreement with the plan
@given(plans)
def test_schedule_matches_gradient_steps_and_evaluations_of_plan(plan):
    schedule = RunSchedule(plan)
    assert schedule.initial_evaluations == plan.evaluations(0)
    for iteration, due in enumerate(follow(schedule, plan), start=1):
        assert due.gradient_steps == plan.gradient_steps(iteration)
        assert due.evaluations == plan.evaluations(iteration)
        assert schedule.policy_steps == plan.policy_steps_after(iteration)


@given(plans, PERIODS, PERIODS)
def test_rows_and_checkpoints_occur_at_multiples_of_periods(plan, log, save):
    schedule = RunSchedule(plan, log_every=log, checkpoint_every=save)
    before = schedule.progress
    for iteration, due in enumerate(follow(schedule, plan), start=1):
        crossed = set(range(before + 1, schedule.progress + 1))
        last = iteration == plan.iterations
        saves = any(step % schedule.checkpoint_every == 0 for step in crossed)
        assert due.checkpoint == (saves and not last)
        logs = any(step % schedule.log_every == 0 for step in crossed)
        assert due.row == (logs or due.evaluations > 0 or last)
        before = schedule.progress


@given(plans, PERIODS, st.integers(0, 14))
def test_resumed_schedule_continues_unchanged(plan, log, stop):
    whole = list(follow(RunSchedule(plan, log_every=log), plan))
    schedule, due = RunSchedule(plan, log_every=log), []
    for iteration in range(1, plan.iterations + 1):
        if iteration == stop:
            saved = json.loads(json.dumps(schedule.state_dict()))
            schedule = RunSchedule(plan, log_every=log)
            schedule.load_state_dict(saved)
        due.append(schedule.advance(plan.collected(iteration)))
    assert due == whole


# ---------------------------------------------------------------------- periods
def test_default_periods_give_100_rows_and_10_checkpoints():
    schedule = RunSchedule(StepPlan(total_policy_steps=5_000))
    assert (schedule.log_every, schedule.checkpoint_every) == (50, 500)


def test_offline_periods_count_gradient_steps():
    plan = StepPlan(iterations=10, steps_per_env=0, gradient_steps_per_iteration=100)
    assert RunSchedule(plan).log_every == 10
    schedule = RunSchedule(plan, log_every=250, checkpoint_every=500)
    due = list(follow(schedule, plan))
    assert [k for k, each in enumerate(due, 1) if each.checkpoint] == [5]
    assert [k for k, each in enumerate(due, 1) if each.row] == [3, 5, 8, 10]


@pytest.mark.parametrize("field", ["log_every", "checkpoint_every"])
@pytest.mark.parametrize("value", [0, -5, 1.5, math.nan])
def test_schedule_rejects_invalid_periods(field, value):
    with raises_setting(field):
        RunSchedule(StepPlan(iterations=1), **{field: value})


# ---------------------------------------------------------------------- whole episodes
def test_episode_schedule_ends_when_steps_are_reached():
    plan = StepPlan(total_policy_steps=50, min_episodes=1, evaluation_every=20)
    schedule = RunSchedule(plan, log_every=1_000, checkpoint_every=1_000)
    assert schedule.initial_evaluations == 0
    due = []
    for steps in (15, 10, 14, 12):
        assert not schedule.done
        due.append(schedule.advance(steps).evaluations)
    assert schedule.done
    assert due == [0, 1, 0, 1]


def test_evaluation_before_update_counts_one_iteration_early():
    plan = StepPlan(
        iterations=4, min_episodes=1, evaluation_every_iterations=2, evaluation_before_update=True,
        final_evaluation=False,
    )  # fmt: skip
    schedule = RunSchedule(plan)
    assert schedule.initial_evaluations == 1
    assert [schedule.advance(7).evaluations for _ in range(4)] == [0, 1, 0, 0]


def test_episode_schedule_counts_actual_prefill_steps():
    plan = StepPlan(
        total_policy_steps=60, min_episodes=1, prefill_steps=20, learning_starts=30,
        replay_ratio=1, minibatch_size=4, evaluation_every=50,
    )  # fmt: skip
    schedule = RunSchedule(plan)
    schedule.prefilled(27)
    assert schedule.policy_steps == 27
    due = [schedule.advance(steps) for steps in (8, 6, 20)]
    assert [each.gradient_steps for each in due] == [0, 6, 20]
    assert [each.evaluations for each in due] == [0, 0, 1]
    assert schedule.done
