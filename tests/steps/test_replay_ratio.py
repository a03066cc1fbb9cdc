"""Gradient steps per policy step: an exact running floor, for any run length."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.steps import ReplayRatio
from tests.errors import raises_setting

RATIOS = ["1/3", 0.3, 0.0625, 2.5]


@pytest.mark.parametrize("ratio", RATIOS)
def test_replay_ratio_does_not_drift_after_many_steps(ratio):
    running, exact = ReplayRatio(ratio), Fraction(str(ratio))
    due = running.advance(10**12)
    for step in range(1, 2000):
        due += running.advance(1)
        assert due == math.floor(exact * (10**12 + step))


@given(st.fractions(0, 20, max_denominator=1000), st.lists(st.integers(0, 10**15), max_size=30))
def test_due_steps_equal_floor_for_any_increments(ratio, increments):
    running, due, played = ReplayRatio(ratio), 0, 0
    for steps in increments:
        due, played = due + running.advance(steps), played + steps
        assert due == math.floor(ratio * played)


@given(st.fractions(0, 5, max_denominator=50), st.lists(st.integers(0, 50), max_size=20))
def test_replay_ratio_continues_after_resume(ratio, increments):
    running, saved = ReplayRatio(ratio), ReplayRatio(ratio)
    for steps in increments:
        again = ReplayRatio(ratio)
        again.load_state_dict(json.loads(json.dumps(saved.state_dict())))
        saved = again
        assert running.advance(steps) == saved.advance(steps)


@pytest.mark.parametrize(
    ("given_ratio", "exact"),
    [
        (0.3, Fraction(3, 10)),
        (1 / 3, Fraction(1, 3)),
        (0.1 + 0.2, Fraction("0.30000000000000004")),
        ("0.25", Fraction(1, 4)),
        (" 2/7 ", Fraction(2, 7)),
        ("1e-3", Fraction(1, 1000)),
        (7, Fraction(7)),
        (1e-300, Fraction("1e-300")),
    ],
)
def test_float_ratio_becomes_simplest_fraction(given_ratio, exact):
    assert ReplayRatio(given_ratio).ratio == exact
    assert float(exact) == float(ReplayRatio(given_ratio).ratio)


@pytest.mark.parametrize(
    "bad", [-1, -0.5, "-1/2", math.nan, math.inf, "1/0", "one", None, [], True, "1e999999999999"]
)
def test_replay_ratio_rejects_invalid_values(bad):
    with raises_setting("replay_ratio"):
        ReplayRatio(bad)
