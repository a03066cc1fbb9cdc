"""Whatever is typed makes a plan or one clear error, and never a stack trace."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest

from kit.dialects import dialect
from kit.steps import SettingError, StepPlan
from tests.dialects.random_settings import EVERY_DIALECT, random_settings
from tests.errors import raises_setting

SETTINGS = 10_000


def outcome(name, settings):
    """The plan, or the error that says why there is none."""
    try:
        return dialect(name).from_settings(settings).to_plan()
    except SettingError as error:
        return error


@pytest.mark.parametrize("name", EVERY_DIALECT)
def test_random_settings_give_plan_or_setting_error(name):
    draw = random.Random(name)
    plans = errors = 0
    for number in range(SETTINGS):
        settings = random_settings(name, draw, nasty=0.02 * (number % 6))
        made = outcome(name, settings)
        if isinstance(made, StepPlan):
            plans += 1
        else:
            errors += 1
            assert isinstance(made, SettingError)
            assert made.field
            assert len(str(made)) < 800
    assert plans > SETTINGS / 40
    assert errors > SETTINGS / 20


@pytest.mark.parametrize("name", EVERY_DIALECT)
def test_explain_accepts_every_valid_plan(name):
    from kit.dialects.explain import explain

    draw = random.Random(name)
    for _ in range(300):
        settings = random_settings(name, draw, nasty=0.02)
        if isinstance(outcome(name, settings), StepPlan):
            explained = explain(dialect(name).from_settings(settings))
            assert explained.text()
            assert explained.to_dict()


@pytest.mark.parametrize("name", EVERY_DIALECT)
def test_from_settings_rejects_unknown_setting_with_suggestion(name):
    cls = dialect(name)
    field = next(f.name for f in fields(cls) if not f.kw_only)
    with pytest.raises(SettingError, match=rf"Try: {field}\b"):
        cls.from_settings({field[:-1]: 3})


@pytest.mark.parametrize("name", EVERY_DIALECT)
def test_to_plan_rejects_unknown_algorithm_or_version(name):
    cls = dialect(name)
    with raises_setting("algo"):
        cls(algo="world_peace").to_plan()
    with raises_setting("version"):
        cls(version="0.0.0").to_plan()
