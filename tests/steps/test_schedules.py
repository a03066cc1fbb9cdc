"""Schedules end exactly at their final value and never pass it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.steps import (
    Constant,
    Cosine,
    Decay,
    Exponential,
    Linear,
    Piecewise,
    make_schedule,
)
from tests.errors import raises_setting

_values = st.floats(1e-9, 1e9)
_kinds = st.sampled_from([Linear, Cosine, Exponential])


@given(_kinds, _values, _values, st.integers(1, 10**12), st.integers(0, 10**13))
def test_ramp_has_exact_ends_and_stays_between_them(kind, start, end, length, count):
    ramp = kind(start, end, length)
    assert ramp(0) == start
    assert ramp(length) == end
    assert ramp(length + count) == end
    assert min(start, end) <= ramp(count) <= max(start, end)


@given(_kinds, _values, _values, st.integers(1, 1000))
def test_a_ramp_is_monotonic(kind, start, end, length):
    values = [kind(start, end, length)(count) for count in range(0, length + 1, length // 50 + 1)]
    assert values == sorted(values, reverse=start > end)


def test_ramps_have_expected_midpoint():
    assert Linear(1.0, 0.0, 10)(5) == 0.5
    assert Cosine(1.0, 0.0, 10)(5) == pytest.approx(0.5)
    assert Exponential(1.0, 0.01, 10)(5) == pytest.approx(0.1)


def test_piecewise_changes_at_boundaries():
    pieces = Piecewise([10, 20], [3.0, 2.0, 1.0])
    assert [pieces(count) for count in (0, 9, 10, 19, 20, 10**9)] == [3, 3, 2, 2, 1, 1]


def test_decay_starts_at_begin_and_approaches_end():
    assert [Decay(1.0, 0.5)(count) for count in range(4)] == [1.0, 0.5, 0.25, 0.125]
    assert [Decay(1.0, 0.5, 0.5, 2)(count) for count in range(5)] == [1.0, 1.0, 1.0, 0.75, 0.625]


def test_make_schedule_creates_schedule_by_name():
    assert make_schedule("constant", 0.5, 0.0, 10)(99) == 0.5
    assert make_schedule("linear", 1.0, 0.0, 4)(1) == 0.75


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Constant(math.nan), "value"),
        (lambda: Linear(math.inf, 0.0, 10), "start"),
        (lambda: Linear(0.0, "low", 10), "end"),
        (lambda: Linear(1.0, 0.0, 0), "duration"),
        (lambda: Exponential(1.0, 0.0, 10), "end"),
        (lambda: Decay(1.0, "slow"), "factor"),
        (lambda: Decay(1.0, 0.5, begin=-1), "begin"),
        (lambda: Piecewise([10], [1.0]), "values"),
        (lambda: Piecewise([10, 10], [1.0, 2.0, 3.0]), "boundaries"),
        (lambda: make_schedule("lineal", 1.0, 0.0, 10), "schedule"),
    ],
)
def test_schedules_reject_invalid_values(make, field):
    with raises_setting(field):
        make()


def test_warmup_rises_from_zero_then_follows_schedule():
    made = make_schedule("warmup 0.25 linear", 1.0, 0.0, 8)
    assert [made(count) for count in range(9)] == [
        0.0, 0.5 * 0.875, *(1 - count / 8 for count in range(2, 9)),
    ]  # fmt: skip
    assert make_schedule("warmup 0.5", 2.0, 0.0, 4)(3) == 2.0
    assert make_schedule("warmup 0.1", 2.0, 2.0, 4)(1) == 2.0  # at least one step


def test_named_piecewise_scales_start_at_fractions_of_run():
    made = make_schedule("piecewise 0.5 0.1 0.75 0.01", 2.0, 0.0, 8)
    assert [made(count) for count in (0, 3, 4, 5, 6, 9)] == [2.0, 2.0, 0.2, 0.2, 0.02, 0.02]


def test_named_exponential_multiplies_once_per_period():
    made = make_schedule("exponential 0.5", 8.0, 0.0, 2)
    assert [made(count) for count in range(4)] == [8.0, 4.0, 2.0, 1.0]
    made = make_schedule("exponential 0.5 2", 8.0, 0.0, 2)
    assert [made(count) for count in range(5)] == [8.0, 8.0, 4.0, 4.0, 2.0]
    made = make_schedule("exponential 0.5 2/3", 8.0, 0.0, 2)
    assert [made(count) for count in range(4)] == [8.0, 4.0, 1.0, 0.5]


@pytest.mark.parametrize(
    "kind",
    [
        "exponential x",
        "exponential 0.5 0",
        "exponential 0.5 1 2",
        "warmup",
        "warmup 1.5 linear",
        "warmup 0 linear",
        "warmup 0.1 lineal",
        "piecewise 0.5 x",
        "piecewise 0.5 0.1 0.4 0.1",
        "piecewise 0.5 0.1 0.7",
        "piecewise 0.5 -1",
        "exponential",
        "warmup 0.1 exponential",
        "exponentail",
        "",
    ],
)
def test_make_schedule_rejects_invalid_strings(kind):
    with raises_setting("lr_schedule") as refused:
        make_schedule(kind, 1.0, 0.0, 8, "lr_schedule")
    assert refused.value.field == "lr_schedule"
