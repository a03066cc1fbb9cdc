"""A cadence fires once per multiple crossed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.steps import Every
from kit.steps.every import multiples_crossed
from tests.errors import raises_setting

_increments = st.lists(st.integers(0, 500), max_size=40)


@given(st.integers(1, 60), st.integers(0, 100), _increments)
def test_it_fires_once_per_multiple_for_any_increments(period, start, increments):
    every, count = Every(period, start), start
    for increment in increments:
        before, count = count, count + increment
        multiples = [n for n in range(before + 1, count + 1) if n % period == 0]
        assert every(count) == len(multiples) == multiples_crossed(period, before, count)


@given(st.integers(1, 60), _increments)
def test_it_fires_where_it_would_have_fired_without_a_resume(period, increments):
    whole, saved, count = Every(period), Every(period), 0
    for increment in increments:
        count += increment
        resumed = Every(period)
        resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
        saved = resumed
        assert whole(count) == saved(count)


def test_a_count_that_falls_back_fires_nothing():
    every = Every(10)
    assert [every(25), every(5), every(29), every(30)] == [2, 0, 0, 1]


def test_none_never_fires():
    assert Every(None)(10**12) == 0


@pytest.mark.parametrize("period", [0, -5, 1.5, "ten"])
def test_a_period_is_at_least_one(period):
    with raises_setting("period"):
        Every(period)
