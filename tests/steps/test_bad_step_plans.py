"""Each bad setting gets one error that names the field, why, and a value that really works."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.steps import SettingError, StepPlan
from tests.errors import raises_setting

BAD = {
    "no budget": ({"total_policy_steps": None}, "total_policy_steps"),
    "total does not divide": ({"total_policy_steps": 1001}, "total_policy_steps"),
    "total less than one iteration": ({"total_policy_steps": 3}, "total_policy_steps"),
    "total contradicts iterations": ({"iterations": 7}, "total_policy_steps"),
    "negative": ({"num_envs": -1}, "num_envs"),
    "zero envs": ({"num_envs": 0}, "num_envs"),
    "half an env": ({"num_envs": 1.5}, "num_envs"),
    "not a number": ({"num_envs": math.nan}, "num_envs"),
    "infinite": ({"steps_per_env": math.inf}, "steps_per_env"),
    "a text": ({"num_envs": "four"}, "num_envs"),
    "a truth value": ({"num_envs": True}, "num_envs"),
    "beyond any run": ({"total_policy_steps": 10**19}, "total_policy_steps"),
    "two update rules": ({"update_epochs": 2}, "replay_ratio"),
    "negative ratio": ({"replay_ratio": -0.5}, "replay_ratio"),
    "ratio is no number": ({"replay_ratio": "many"}, "replay_ratio"),
    "ratio of nan": ({"replay_ratio": math.nan}, "replay_ratio"),
    "ratio beyond any run": ({"replay_ratio": 1e12}, "replay_ratio"),
    "learning_starts between vector steps": ({"learning_starts": 10}, "learning_starts"),
    "random_steps between vector steps": ({"random_steps": 2}, "random_steps"),
    "prefill between vector steps": ({"prefill_steps": 6}, "prefill_steps"),
    "unknown rule for the last minibatch": ({"last_minibatch": "keep"}, "last_minibatch"),
    "unknown rounding": ({"rounding": "nearest"}, "rounding"),
    "unknown counting": ({"counting": "sheepl"}, "counting"),
    "a rule without its number": ({"counting": "dreamer"}, "counting"),
    "a rule with a word for its number": ({"counting": "sheeprl:many"}, "counting"),
    "a rule with fewer numbers": ({"counting": "torchrl-growing:9,1"}, "counting"),
    "steps and episodes": ({"min_episodes": 2, "steps_per_env": 3}, "steps_per_env"),
    "nothing to collect": ({"steps_per_env": None}, "steps_per_env"),
    "prefill iteration rounded to nothing": (
        {"prefill_steps": 2, "prefill_is_iteration": True, "rounding": "down"},
        "prefill_is_iteration",
    ),
    "prefill iteration without prefill": ({"prefill_is_iteration": True}, "prefill_is_iteration"),
    "neither true nor false": ({"final_evaluation": "yes"}, "final_evaluation"),
    "two cadences": (
        {"evaluation_every": 8, "evaluation_every_iterations": 2},
        "evaluation_every_iterations",
    ),
    "epochs of no batch": ({"minibatches_per_epoch": 3}, "minibatches_per_epoch"),
    "newest of no batch": ({"train_on_newest": 4}, "train_on_newest"),
}

BAD_BATCHES = {
    "pretraining without a buffer": ({"pretrain_steps": 4}, "pretrain_steps"),
    "minibatch larger than the batch": ({"minibatch_size": 100}, "minibatch_size"),
    "sequences that do not fit": ({"sequence_length": 5, "minibatch_size": 1}, "sequence_length"),
    "sequences that do not fit the newest": (
        {"sequence_length": 4, "minibatch_size": 1, "train_on_newest": 24},
        "sequence_length",
    ),
    "sequences that do not fit the first batch": (
        {
            "sequence_length": 8,
            "minibatch_size": 1,
            "prefill_steps": 16,
            "prefill_in_first_batch": True,
        },
        "sequence_length",
    ),
    "sequences that fit the first batch alone": (
        {
            "sequence_length": 12,
            "minibatch_size": 1,
            "prefill_steps": 16,
            "prefill_in_first_batch": True,
        },
        "sequence_length",
    ),
    "newest of some envs": ({"train_on_newest": 6}, "train_on_newest"),
    "carried gradients": (
        {"last_minibatch": "carry", "minibatches_per_gradient_step": 2},
        "last_minibatch",
    ),
    "prefill batch that is not trained on": (
        {"prefill_steps": 8, "prefill_in_first_batch": True, "learning_starts": 44},
        "learning_starts",
    ),
}

OFF_POLICY = {"total_policy_steps": 1000, "num_envs": 4, "replay_ratio": 1, "minibatch_size": 4}
ON_POLICY = {"iterations": 10, "num_envs": 4, "steps_per_env": 8, "update_epochs": 2}

CASES = [(OFF_POLICY, *case) for case in BAD.values()]
CASES += [(ON_POLICY, *case) for case in BAD_BATCHES.values()]


@pytest.mark.parametrize(("good", "bad", "field"), CASES, ids=[*BAD, *BAD_BATCHES])
def test_error_names_field_and_valid_values(good, bad, field):
    StepPlan(**good)
    with pytest.raises(SettingError) as error:
        StepPlan(**good | bad)
    assert error.value.field == field
    assert str(error.value).startswith(f"{field}=")
    if isinstance(error.value.works, str):
        assert error.value.works  # advice, where there is no single value
        return
    assert error.value.works or "must be" in str(error.value) or "whole number" in str(error.value)
    for value in error.value.works:
        settings = good | bad | {field: value}
        if field == "total_policy_steps" and value is None:
            continue
        StepPlan(**settings)


def test_error_does_not_print_huge_integer():
    with raises_setting("num_envs"):
        StepPlan(iterations=1, num_envs=10**5000)


def test_rounding_rule_adjusts_invalid_counts():
    assert StepPlan(total_policy_steps=1001, num_envs=4, rounding="down").total_policy_steps == 1000
    assert StepPlan(total_policy_steps=1001, num_envs=4, rounding="up").total_policy_steps == 1004
    up = StepPlan(iterations=9, num_envs=4, learning_starts=5, replay_ratio=1, rounding="up")
    assert (up.learning_starts, up.asked) == (8, {"learning_starts": 5})


@pytest.mark.parametrize(
    ("counting", "settings", "field", "works"),
    [
        ("dreamer:1", {"minibatch_size": 2}, "replay_ratio", [1]),
        ("sheeprl", {"minibatch_size": 2}, "replay_ratio", [1]),
        ("torchrl", {"replay_ratio": 1, "minibatch_size": 2}, "update_epochs", [1]),
        ("torchrl-growing:9,1,1", {"replay_ratio": 1}, "minibatch_size", [1]),
    ],
)  # fmt: skip
def test_counting_rule_rejects_missing_settings(counting, settings, field, works):
    if not {"replay_ratio", "update_epochs"} & set(settings):
        settings = {"gradient_steps_per_iteration": 1, **settings}
    given = {"steps_per_env": 4, "iterations": 2, "counting": counting, **settings}
    with raises_setting(field) as refused:
        StepPlan(**given)
    assert refused.value.works == works


def test_offline_plan_rejects_budget_of_policy_steps():
    with raises_setting("iterations"):
        StepPlan(
            steps_per_env=0, gradient_steps_per_iteration=1, minibatch_size=4, total_policy_steps=8
        )


def test_rounded_prefill_counts_toward_budget():
    plan = StepPlan(total_policy_steps=28, num_envs=4, prefill_steps=6, rounding="up")
    assert plan.prefill_steps == 8
    assert plan.iterations == 5


def test_error_suggests_nearest_totals_and_rounding():
    with pytest.raises(SettingError) as error:
        StepPlan(total_policy_steps=1001, num_envs=4)
    assert str(error.value) == (
        "total_policy_steps=1001 is not a multiple of the 4 policy steps per iteration. "
        "Try: 1000 or 1004, or rounding=up or down."
    )


_NASTY = [None, True, "", "4", [], {}, -1, 0.5, 1e6, math.nan, math.inf, -math.inf, 10**30, 1e300]
_nasty = st.sampled_from(_NASTY)
_small = st.integers(-2, 40)
_names = sorted(StepPlan.__dataclass_fields__)


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(_names), _small | _nasty, max_size=6))
def test_random_settings_create_plan_or_raise_one_error(given_settings):
    made = outcome({"iterations": 3} | given_settings)
    if isinstance(made, SettingError):
        assert made.field in _names
    else:
        assert made.iterations is None or made.iterations >= 0


def outcome(given_settings):
    try:
        return StepPlan(**given_settings)
    except SettingError as error:
        return error


def test_error_shows_multiline_value_in_one_line():
    assert "\n" not in str(SettingError("space", np.zeros((20, 20)), "is too large", [1]))
