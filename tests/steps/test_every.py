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
def test_every_fires_once_per_multiple_for_any_increments(period, start, increments):
    every, count = Every(period, start), start
    for increment in increments:
        before, count = count, count + increment
        multiples = [n for n in range(before + 1, count + 1) if n % period == 0]
        assert every(count) == len(multiples) == multiples_crossed(period, before, count)


@given(st.integers(1, 60), _increments)
def test_every_fires_at_same_counts_after_resume(period, increments):
    whole, saved, count = Every(period), Every(period), 0
    for increment in increments:
        count += increment
        resumed = Every(period)
        resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
        saved = resumed
        assert whole(count) == saved(count)


def test_every_does_not_fire_when_count_decreases():
    every = Every(10)
    assert [every(25), every(5), every(29), every(30)] == [2, 0, 0, 1]


def test_every_never_fires_without_period():
    assert Every(None)(10**12) == 0


@pytest.mark.parametrize("period", [0, -5, 1.5, "ten"])
def test_every_rejects_invalid_period(period):
    with raises_setting("period"):
        Every(period)
