"""Settings are plain values: written, read, checked and explained."""

from __future__ import annotations

import importlib
import math
import pkgutil
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from torchrl.objectives import ClipPPOLoss

import recipes.bc
import recipes.ppo
import recipes.sac
from kit.cli.help import GROUPS, RARE, help_text, kind_of, recipe_settings
from kit.config import (
    FiniteFloat,
    NonNegativeFloat,
    NumFrames,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    ScheduleName,
    UnitInterval,
)
from kit.config.parts import resolve
from kit.config.plain import check, from_plain, settings, to_plain
from kit.config.plan import make_plan
from kit.dialects import DIALECTS, dialect
from kit.experiment import EnvConfig
from kit.steps import SettingError, StepPlan
from kit.steps.settings import OnPolicySteps
from tests.errors import raises_setting

RECIPES = [
    importlib.import_module(f"recipes.{module.name}")
    for module in pkgutil.iter_modules(recipes.__path__)
]


@dataclass
class Inner:
    """A group."""

    size: PositiveInt = 2
    """rows."""


@dataclass
class Settings:
    """Settings of all kinds."""

    inner: Inner = field(default_factory=Inner)
    count: PositiveInt = 3
    """things."""
    maybe: PositiveInt | None = None
    rate: PositiveFloat = 0.1
    weight: NonNegativeFloat = 0.0
    discount: UnitInterval = 0.9
    kind: Literal["red", "green"] = "red"
    sizes: list[int] = field(default_factory=lambda: [4, 4])
    layer: tuple[int, str] = (4, "relu")
    scales: tuple[float, ...] = ()
    name: str = "me"
    flag: bool = False
    anything: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------- in and out
def test_dataclass_round_trips_through_plain_values():
    made = Settings(
        Inner(5),
        maybe=7,
        sizes=[1],
        layer=(2, "elu"),
        scales=(0.5, 2.0),
        extra={"a": [1, {"b": None}]},
    )
    plain = to_plain(made)
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain
    assert from_plain(Settings, plain) == made


def comes_back(config):
    plain = to_plain(config)
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain
    assert from_plain(type(config), plain) == config


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_config_round_trips(recipe):
    comes_back(recipe.Config())


@pytest.mark.parametrize("name", DIALECTS)
def test_config_with_dialect_round_trips(name):
    comes_back(recipes.ppo.Config(steps=dialect(name)()))


def test_offline_recipe_rejects_dialect():
    """Settings that count policy steps mean nothing where none are collected."""
    config = recipes.bc.Config(steps=dialect("sb3")())
    message = "steps='sb3': Other libraries count policy steps, but an offline recipe collects none"
    for attempt in (
        lambda: check(config),
        lambda: from_plain(recipes.bc.Config, to_plain(config)),
        lambda: help_text(recipes.bc.Config, "sb3"),
    ):
        with pytest.raises(SettingError, match=message) as raised:
            attempt()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_plan_round_trips(recipe):
    config = recipe.Config()
    config.steps = make_plan(config, "any")
    check(config)
    assert from_plain(recipe.Config, to_plain(config)) == config
    assert make_plan(config, "any") == config.steps


def test_offline_recipe_rejects_plan_that_collects():
    config = recipes.bc.Config(steps=StepPlan(total_policy_steps=64, steps_per_env=8))
    with raises_setting("steps_per_env"):
        make_plan(config, "bc")


def test_missing_settings_use_defaults():
    assert from_plain(Settings, {"inner": {}, "count": 4}) == Settings(count=4)


def test_from_plain_converts_between_integers_and_floats():
    made = from_plain(Settings, {"count": 1e3, "rate": 1, "name": 5, "sizes": (8, 8.0)})
    assert (made.count, made.rate, made.name, made.sizes) == (1000, 1.0, "5", [8, 8])
    assert [type(v) for v in (made.count, made.rate, *made.sizes)] == [int, float, int, int]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuont": 1}, "cuont=1 is not a setting of Settings. Try: count or discount."),
        ({"inner": {"siz": 1}}, "inner.siz=1 is not a setting of Inner. Try: size."),
        ({"inner": 3}, "inner=3: A group of settings is expected. Use inner=Inner(...), or"),
        ({"inner": {"size": 0}}, "inner.size=0: The value must be at least 1"),
        ({"count": 0}, "count=0: The value must be at least 1"),
        ({"count": 2.5}, "count=2.5 is not a whole number. Try: 2 or 3."),
        ({"count": True}, "count=True is not a whole number."),
        ({"count": None}, "count=None is not a whole number."),
        ({"maybe": -1}, "maybe=-1: The value must be at least 1"),
        ({"maybe": "x"}, "maybe='x' is not a whole number"),
        ({"rate": 0}, "rate=0.0: The value must be above 0."),
        ({"rate": math.inf}, "rate=inf: The value must be at most 3.4e+38."),
        ({"rate": math.nan}, "rate=nan is not a number."),
        ({"weight": -0.1}, "weight=-0.1: The value must be at least 0"),
        ({"discount": 1.01}, "discount=1.01: The value must be at least 0 and at most 1."),
        ({"kind": "gren"}, "kind='gren' is not a valid choice. Try: green or red."),
        ({"sizes": 4}, "sizes=4 is not a list whose entries are each a whole number"),
        ({"sizes": "x"}, "sizes='x' is not a list whose entries are each a whole number"),
        ({"sizes": [4, "x"]}, "sizes='x' is not a whole number"),
        (
            {"layer": [4]},
            "layer=[4] is not a list of a whole number and a string. Give",
        ),
        ({"layer": ["x", "relu"]}, "layer='x' is not a whole number"),
        ({"scales": ["x"]}, "scales='x' is not a number"),
        ({"flag": 1}, "flag=1 is neither true nor false. Try: True or False."),
        ({"name": None}, "name=None is not a string. Give a string."),
        ({"extra": 3}, "extra=3 is not a mapping"),
    ],
)
def test_from_plain_error_names_invalid_setting_and_fix(values, message):
    with pytest.raises(SettingError) as raised:
        from_plain(Settings, values)
    assert str(raised.value).startswith(message)


def test_check_rejects_unknown_attribute():
    config = recipes.bc.Config()
    config.env.num_env = 8  # type: ignore[attr-defined]
    with raises_setting("env.num_env"):
        check(config)


def test_error_is_one_line_for_multiline_value():
    with raises_setting("dataset") as raised:
        check(recipes.bc.Config(dataset="a\nb"))  # type: ignore[arg-type]
    assert len(str(raised.value).splitlines()) == 1


def test_from_plain_accepts_values_at_limits():
    lowest = {"count": 1, "maybe": 1, "weight": 0.0, "discount": 0.0, "rate": 2e-38}
    assert from_plain(Settings, lowest) == Settings(**lowest)
    assert from_plain(Settings, {"discount": 1}).discount == 1.0


def test_check_validates_dataclass_created_in_python():
    check(Settings())
    with raises_setting("inner.size"):
        check(Settings(Inner(0)))
    with raises_setting("count"):
        check(Settings(count="many"))  # type: ignore[arg-type]


def test_check_converts_compatible_values():
    made = Settings(Inner(5.0), count=1e3, rate=1, sizes=[8.0], name=3)  # type: ignore[arg-type]
    check(made)
    assert made == Settings(Inner(5), count=1000, rate=1.0, sizes=[8], name="3")
    values = (made.inner.size, made.count, made.rate, *made.sizes)
    assert [type(value) for value in values] == [int, int, float, int]


def test_check_converts_numpy_scalars():
    made = Settings(count=np.int64(7), rate=np.float32(0.5))  # type: ignore[arg-type]
    check(made)
    assert (type(made.count), made.count, type(made.rate), made.rate) == (int, 7, float, 0.5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_settings_have_limits_and_reject_infinite_values(recipe):
    for name, value, kind, _ in settings(recipe.Config()):
        if name.startswith("steps.") or not kind.startswith(("a number", "a whole number")):
            continue  # a plan has limits of its own
        assert kind.split(" or ")[0] not in ("a number", "a whole number"), name
        del value
        *groups, last = name.split(".")
        for number in (math.inf, -math.inf, math.nan, 10**400):
            values: dict[str, Any] = {last: number}
            for group in reversed(groups):
                values = {group: values}
            with raises_setting(name):
                from_plain(recipe.Config, values)


def test_from_plain_creates_dialect_by_name():
    made = from_plain(recipes.ppo.Config, {"steps": {"dialect": "sb3", "n_steps": 16}})
    assert type(made.steps) is dialect("sb3")
    assert made.steps.n_steps == 16
    ours = from_plain(recipes.ppo.Config, {"steps": {"steps_per_env": 16}})
    assert ours.steps == OnPolicySteps(steps_per_env=16)


# ---------------------------------------------------------------------- names
def test_resolve_accepts_name_path_or_class():
    for name in ("ClipPPOLoss", "torchrl.objectives:ClipPPOLoss", ClipPPOLoss):
        assert resolve(name) is ClipPPOLoss


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ClipPPOLos", "'torchrl.objectives' has no attribute 'ClipPPOLos'"),
        ("kit.steps:StepPlam", "'kit.steps' has no attribute 'StepPlam'"),
        ("nowhere_at_all:Loss", "No module named 'nowhere_at_all'"),
    ],
)
def test_resolve_rejects_unknown_name(name, message):
    with pytest.raises((AttributeError, ImportError), match=message):
        resolve(name)


# ---------------------------------------------------------------------- documentation
UNITS = (
    "policy steps", "env steps", "gradient steps", "environments", "transitions", "episodes",
    "passes", "threads", "seconds", "q-networks", "rewards summed", "sequences", "minibatches",
    "time steps", "units", "frames", "iterations", "lengths", "records", "latents", "models",
    "actions", "epochs", "atoms", "quantiles",
)  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_settings_have_documentation_and_counts_have_unit(recipe):
    for name, _, kind, text in settings(recipe.Config()):
        assert text.endswith("."), name
        counts = kind.startswith("a whole number") and name != "seed"
        assert not counts or any(unit in text.lower() for unit in UNITS), f"{name}: {text}"


@pytest.mark.parametrize("name", DIALECTS)
def test_dialect_settings_have_documentation(name):
    undocumented = [dotted for dotted, _, _, text in settings(dialect(name)()) if not text]
    assert not undocumented


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_has_each_setting_with_default_type_and_text(recipe):
    text = " ".join(help_text(recipe.Config, everything=True).split())
    for name, *_, documentation in settings(recipe.Config()):
        assert f"{name}=" in text
        assert documentation.replace("``", "") in text
    assert "env.max_episode_steps=null int > 0 or null: " in text
    if hasattr(recipe.Config, "gamma"):
        gamma = recipe.Config().gamma
        assert f" gamma={gamma} float in [0, 1]: Discount factor." in text
    assert not {"<class", "typing", "Annotated"} & set(text.split())
    assert ("steps=NAME" in text) == (recipe.Config.FAMILY != "offline")


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_puts_algorithm_first_and_omits_rare_settings(recipe):
    short, long = (help_text(recipe.Config, everything=e).splitlines() for e in (False, True))
    titles = [line.removesuffix(":") for line in short if line.removesuffix(":") in GROUPS]
    assert titles[0] == "Algorithm"
    assert titles[-1] == "Hardware"
    assert titles == [title for title in GROUPS if title in titles]
    assert len(short) < len(long)
    assert not [line for line in short if line.startswith("  compile=")]
    assert max(map(len, long)) <= 100
    rare = {setting.name for setting in recipe_settings(recipe.Config())} & RARE
    shown = {line.split("=")[0].strip() for line in short if line.startswith("  ")}
    assert rare - shown


def test_rare_settings_exist():
    names = {setting.name for recipe in RECIPES for setting in recipe_settings(recipe.Config())}
    assert names >= RARE


@pytest.mark.parametrize(
    ("hint", "kind"),
    [
        (PositiveInt, "int > 0"), (PositiveFloat | None, "float > 0 or null"),
        (NonNegativeFloat, "float >= 0"),
        (UnitInterval, "float in [0, 1]"), (PositiveFraction, "float in (0, 1]"), (bool, "bool"),
        (Literal["l2", "l1"] | None, "l2 | l1 | null"), (list[PositiveInt], "list of int > 0"),
        (tuple[int, float], "(int, float)"), (dict[str, Any], "dict"), (Any, ""),
        (ScheduleName, "schedule"), (FiniteFloat, "float"), (NumFrames, "int in [1, 1000]"),
    ],
)  # fmt: skip
def test_kind_of_names_type_and_limits(hint, kind):
    assert kind_of(hint) == kind


def test_help_of_dialect_shows_its_settings():
    text = help_text(recipes.ppo.Config, "sb3")
    assert "steps.n_steps=" in text
    assert "steps.update_epochs" not in text


def test_env_config_defaults_match_make_env():
    import inspect

    from kit.envs import make_env

    arguments = inspect.signature(make_env).parameters
    config = EnvConfig()
    for name in ("vectorization", "action_repeat", "max_episode_steps"):
        assert arguments[name].default == getattr(config, name)


def test_build_does_not_follow_huge_plan():
    """Where a rule counts in floats, asking for a far iteration follows all those before it."""
    steps = {"dialect": "dreamer", "train_ratio": 20.0, "envs": 10, "max_episode_steps": 3}
    config = from_plain(recipes.sac.Config, {"steps": steps, "log_dir": None, "progress": False})
    trainer = recipes.sac.build(config)
    assert trainer.plan.total_policy_steps >= 10**8
    assert len(getattr(trainer.plan, "_followed", (0, []))[1]) < 1_000
