"""The ledger counts what happened, and is compared with the plan."""

from __future__ import annotations

import json

from hypothesis import given

from kit.steps import StepLedger, StepPlan
from tests.steps.step_plans import simulate, step_plans


def run(plan: StepPlan) -> StepLedger:
    """Count a run that keeps its plan."""
    ledger, before = StepLedger(plan.world_size), (0, 0, 0, 0)
    for iteration, reached in enumerate(simulate(plan)):
        steps, random, updates, evaluations = (n - b for n, b in zip(reached, before))
        own, own_random = steps // plan.world_size, random // plan.world_size
        ledger.collected(own, own * plan.action_repeat, 0, own_random)
        trained = plan.samples_after(iteration) - (
            plan.samples_after(iteration - 1) if iteration else 0
        )
        ledger.updated(trained, updates)
        for _ in range(evaluations):
            ledger.evaluated(plan.evaluation_episodes)
        ledger.iterations = iteration
        before = reached
    return ledger


@given(step_plans())
def test_compare_finds_no_difference_for_planned_run(plan):
    assert run(plan).compare(plan) == []


def test_compare_names_each_different_count():
    plan = StepPlan(iterations=10, num_envs=4, replay_ratio=1, minibatch_size=8)
    ledger = run(plan)
    ledger.collected(4, 4, 0)
    ledger.updated(8, 1)
    ledger.evaluated(10)
    shown = {difference.name: str(difference) for difference in ledger.compare(plan)}
    assert shown["policy_steps"] == "policy_steps: planned 40, counted 44"
    assert shown["gradient_steps"] == "gradient_steps: planned 40, counted 41"
    assert set(shown) == {"policy_steps", "gradient_steps", "samples", "evaluations"}


def test_compare_accepts_env_steps_up_to_action_repeat():
    plan = StepPlan(iterations=10, action_repeat=4)
    ledger = run(plan)
    assert ledger.compare(plan) == []
    ledger.local_env_steps = 41
    assert [d.name for d in ledger.compare(plan)] == ["env_steps"]
    ledger.local_env_steps = 25
    assert ledger.compare(plan) == []


def test_compare_uses_completed_iterations_of_stopped_run():
    plan = StepPlan(iterations=10, num_envs=2, final_evaluation=False)
    ledger = StepLedger()
    for _ in range(3):
        ledger.collected(2, 2, 0)
        ledger.iterations += 1
    assert ledger.compare(plan) == []


def test_totals_combine_local_counts_of_all_processes():
    ledger = StepLedger(world_size=3)
    ledger.collected(5, 10, 1, random_policy_steps=2)
    ledger.updated(64)
    assert (ledger.policy_steps, ledger.random_policy_steps) == (15, 6)
    assert (ledger.gradient_steps, ledger.samples) == (3, 192)
    ledger.synchronize(env_steps=31, episodes=4)
    assert (ledger.env_steps, ledger.episodes) == (31, 4)


@given(step_plans())
def test_ledger_restores_counters_after_resume(plan):
    ledger = run(plan)
    again = StepLedger(plan.world_size)
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert again.counters() == ledger.counters()
