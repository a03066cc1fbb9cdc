"""A plan is explained iteration by iteration, and translated."""

from __future__ import annotations

import json

from hypothesis import given, settings

from kit.dialects import SB3, CleanRL, Dreamer, DreamerPaper, Sheeprl, Tianshou
from kit.dialects.explain import explain, iteration_row, listed
from kit.dialects.translation import compare_text, translate
from kit.hooks.annealing import _length
from kit.steps import StepPlan
from kit.steps.counts import can_count, can_follow
from tests.errors import raises_setting
from tests.steps.step_plans import episode_plans, step_plans


@settings(max_examples=60)
@given(step_plans() | episode_plans())
def test_explain_supports_any_plan(plan):
    explained = explain(plan)
    assert explained.text()
    data = json.loads(json.dumps(explained.to_dict()))
    totals = plan.after(plan.iterations)
    assert data["totals"]["gradient_steps"] == totals.gradient_steps
    assert data["totals"]["policy_steps"] == totals.policy_steps


@settings(max_examples=60)
@given(step_plans() | episode_plans())
def test_iteration_rows_sum_to_totals(plan):
    rows = [iteration_row(plan, k) for k in range(1, plan.iterations + 1)]
    if rows:
        assert sum(row["policy_steps"] for row in rows) == plan.after(plan.iterations).policy_steps
        assert rows[-1]["total_gradient_steps"] == plan.after(plan.iterations).gradient_steps


def test_listed_iterations_surround_first_training():
    plan = StepPlan(iterations=1000, learning_starts=500, replay_ratio=1, minibatch_size=1)
    assert listed(plan, 8) == [1, 2, None, 499, 500, 501, 502, 503, None, 1000]
    assert listed(StepPlan(iterations=5), 12) == [1, 2, 3, 4, 5]


def test_explanation_shows_approximate_counts_for_long_run():
    plan = Dreamer(train_ratio=33.3, steps=10**12).to_plan()
    assert not can_count(plan)
    text = explain(plan).text()
    assert "about" in text
    assert "this plan is too long" in text
    assert "about" in plan.table()
    assert _length(plan, "policy_steps") == plan.total_policy_steps
    with raises_setting("counter"):
        _length(plan, "gradient_steps")


def test_can_follow_limits_dreamer_plan_by_policy_steps():
    plan = Dreamer(train_ratio=33.3, envs=4, steps=10**6).to_plan()
    assert [can_follow(plan, iteration, most=40) for iteration in (10, 11)] == [True, False]


def test_explanation_shows_settings_version_and_caveats():
    text = explain(SB3(algo="sac", n_envs=4, total_timesteps=1000)).text()
    assert text.startswith("Stable-Baselines3 2.9.2, sac (off-policy)")
    assert "replay ratio of 1/4" in " ".join(text.split())


def test_explanation_notes_setting_without_effect():
    explained = explain(Tianshou(algo="ppo", update_per_step=0.5, num_train_envs=1))
    assert explained.notes[0] == "update_per_step=0.5 has no effect for ppo in tianshou."


# -------------------------------------------------------------------- translate
def test_translate_finds_equivalent_settings():
    made = translate(SB3(algo="ppo", n_envs=8, n_steps=128, total_timesteps=65_536), CleanRL)
    assert made.differences == []
    assert "The same plan" in made.text()
    assert made.settings() == {
        "total_timesteps": 65_536,
        "num_envs": 8,
        "num_steps": 128,
        "num_minibatches": 16,
        "update_epochs": 10,
    }


def test_translate_lists_inexpressible_settings():
    made = translate(SB3(algo="sac", n_envs=4, gradient_steps=1, total_timesteps=1000), Sheeprl)
    assert made.settings()["replay_ratio"] == 0.25
    assert made.differences == [("first_training_iteration", 26, 25)]
    text = made.text()
    assert "Not expressible in sheeprl" in text
    assert "First difference in iteration 25" in text
    data = json.loads(json.dumps(made.to_dict()))
    assert data["same_run"] is False
    assert data["not_expressible"][0]["setting"] == "first_training_iteration"


def test_translate_turns_dreamer_paper_loop_into_interleaved():
    made = translate(DreamerPaper(steps=50_000), Sheeprl)
    plan, interleaved = made.target.to_plan(), DreamerPaper(steps=50_000).interleaved()
    assert plan.replay_ratio == interleaved.replay_ratio
    assert plan.after(plan.iterations) == interleaved.after(plan.iterations)


def test_translate_rejects_plan_without_equivalent():
    with raises_setting("update_epochs"):
        translate(CleanRL(algo="ppo"), Dreamer)


# -------------------------------------------------------------------- compare
def test_compare_text_reports_identical_runs():
    text = compare_text(
        SB3(algo="sac", n_envs=4, gradient_steps=-1, total_timesteps=400).to_plan(),
        SB3(algo="sac", n_envs=4, gradient_steps=4, total_timesteps=400).to_plan(),
        ("one", "other"),
    )
    assert text.startswith("Identical runs")


def test_compare_text_shows_first_difference():
    one = SB3(algo="sac", n_envs=4, total_timesteps=400).to_plan()
    other = Sheeprl(algo="sac", num_envs=4, total_steps=400, replay_ratio=1.0).to_plan()
    text = compare_text(one, other, ("sb3", "sheeprl"))
    assert "gradient steps per iteration    1        4" in text
    assert (
        "First difference in iteration 25: sb3 has 100 policy steps and 0 gradient steps, "
        "sheeprl has 100 policy steps and 4 gradient steps." in text
    )
