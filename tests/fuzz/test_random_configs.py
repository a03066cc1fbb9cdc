"""Whatever is set makes a run or one line that says why not: no stack trace, and nothing hangs."""

from __future__ import annotations

import pkgutil
from collections import Counter

import pytest

import recipes
from tests.fuzz.attempts import attempts

RECIPES = [f"recipes.{module.name}" for module in pkgutil.iter_modules(recipes.__path__)]
BUILDS, RUNS = 10_000, 300


def outcomes(recipe: str, numbers: range, *, run: bool) -> Counter[str]:
    """How often each outcome came; anything but a run or a refusal is an error."""
    if recipe == "recipes.ppo_pixels":
        pytest.importorskip("ale_py")
    found: Counter[str] = Counter()
    for attempt in attempts(recipe, numbers, run=run):
        assert attempt.outcome in ("done", "refused"), attempt
        assert attempt.outcome == "done" or len(attempt.text) < 2_000, attempt
        found[attempt.outcome] += 1
    assert found.total() == len(numbers)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_few_random_settings_make_a_run_or_one_error(recipe):
    assert len(outcomes(recipe, range(20), run=False)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_ten_thousand_random_settings_make_a_run_or_one_error(recipe):
    found = outcomes(recipe, range(BUILDS), run=False)
    assert min(found.values()) > BUILDS / 10


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_random_settings_run_as_planned(recipe):
    found = outcomes(recipe, range(BUILDS, BUILDS + RUNS), run=True)
    assert min(found.values()) > RUNS / 10
