"""A plan that a dialect can say comes back as it was, and what it cannot say it refuses."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.dialects import dialect
from kit.steps import RunSchedule, SettingError, StepLedger, StepPlan
from tests.dialects.random_settings import EVERY_DIALECT, VERSIONS, random_settings
from tests.steps.step_plans import episode_plans, step_plans

every_dialect = pytest.mark.parametrize("name", EVERY_DIALECT)
every_version = pytest.mark.parametrize(
    ("name", "version"), [(name, version) for name in EVERY_DIALECT for version in VERSIONS[name]]
)


def said(name, plan, **kept):
    """The plan in the words of a dialect, or the reason why it cannot be said."""
    try:
        return dialect(name).from_plan(plan, **kept)
    except SettingError as error:
        return error


@every_dialect
@settings(max_examples=150)
@given(plan=step_plans() | episode_plans())
def test_plan_round_trips_through_dialect(name, plan):
    for version in dialect(name).VERSIONS:
        made = said(name, plan, version=version)
        if isinstance(made, SettingError):
            assert made.field
            assert made.why
        else:
            assert made.to_plan() == plan


@every_version
@settings(max_examples=120)
@given(seed=st.integers(0, 2**32))
def test_plan_of_version_round_trips_without_algorithm(name, version, seed):
    chosen, plan = settings_of_a_plan(name, version, random.Random(seed))
    algo = dialect(name).from_settings(chosen).resolved().algo
    assert dialect(name).from_plan(plan, version=version, algo=algo).to_plan() == plan
    assert dialect(name).from_plan(plan, version=version).to_plan() == plan


def settings_of_a_plan(name, version, draw):
    """The first settings drawn that make a plan of not too many iterations, and the plan."""
    while True:
        chosen = random_settings(name, draw, nasty=0) | {"version": version}
        chosen.pop("use_sde_at_warmup", None)  # not part of a plan
        plan = plan_of(name, chosen)
        if plan is not None and plan.iterations is not None and plan.iterations <= 10**5:
            return chosen, plan


def plan_of(name, given_settings):
    try:
        return dialect(name).from_settings(given_settings).to_plan()
    except SettingError:
        return None


@every_dialect
def test_dialect_plan_round_trips_through_json(name):
    draw = random.Random(name)
    for _ in range(200):
        plan = plan_of(name, random_settings(name, draw, nasty=0))
        if plan is not None:
            assert StepPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@every_dialect
def test_run_schedule_follows_plan_and_continues_after_resume(name):
    draw = random.Random(name)
    for _ in range(150):
        plan = plan_of(name, random_settings(name, draw, nasty=0))
        if plan is None or not plan.is_exact or plan.iterations < 3:
            continue
        last = min(plan.iterations, 60)
        schedule, due = RunSchedule(plan), []
        for k in range(1, last + 1):
            if k == last // 2:
                saved = json.loads(json.dumps(schedule.state_dict()))
                schedule = RunSchedule(plan)
                schedule.load_state_dict(saved)
            due.append(schedule.advance(plan.collected(k)).gradient_steps)
        assert due == [plan.gradient_steps(k) for k in range(1, last + 1)]


@every_dialect
def test_ledger_matches_plan_when_run_follows_schedule(name):
    draw = random.Random(name)
    for _ in range(200):
        plan = plan_of(name, random_settings(name, draw, nasty=0))
        if plan is None or not plan.is_exact or plan.iterations > 300:
            continue
        ledger, schedule = StepLedger(plan.world_size), RunSchedule(plan)
        prefill = 0 if plan.prefill_is_iteration else plan.local_prefill_steps
        count(ledger, plan, prefill, 0)
        for iteration in range(1, plan.iterations + 1):
            steps = plan.collected(iteration)
            count(ledger, plan, steps, iteration, schedule.advance(steps).gradient_steps)
        assert ledger.compare(plan) == []


def count(ledger, plan, steps, iteration, due=0):
    """Count one iteration as a trainer does; 0 is what comes before the first one."""
    before = ledger.policy_steps
    after = before + steps * plan.world_size
    random_steps = plan.random_steps_until(after) - plan.random_steps_until(before)
    ledger.collected(steps, steps, 0, random_steps // plan.world_size)
    if due:
        sampled = plan.on_policy or plan.minibatch_size is not None
        seen = sum(plan.minibatch_sizes(iteration)) if sampled else 0
        ledger.updated(seen * (plan.sequence_length or 1), due)
    for _ in range(plan.evaluations(iteration)):
        ledger.evaluated(plan.evaluation_episodes)
    ledger.iterations = iteration
