"""Whatever a person sets makes a run as planned or an error: nothing dies, and nothing hangs."""

from __future__ import annotations

import pytest

from tests.fuzz.__main__ import BUILDS, RECIPES, RUNS, WRONG, tried


def outcomes(recipe: str, builds: int, runs: int) -> tuple[int, int, int]:
    """Settings that were built, refused, and run as planned; anything else is an error."""
    built, ran = tried(recipe, builds, runs)
    assert not any(found[outcome] for found in (built, ran) for outcome in WRONG)
    assert built.total() == builds
    return built["built"], built["refused"], ran["ran"]


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
def test_few_random_configs_run_or_raise_one_error(recipe):
    built, refused, _ = outcomes(recipe, 20, 0)
    assert built
    assert refused


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
def test_many_random_configs_run_or_raise_one_error(recipe):
    built, refused, ran = outcomes(recipe, BUILDS, RUNS)
    assert min(built, refused) > BUILDS / 100
    assert ran == RUNS
