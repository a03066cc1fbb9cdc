"""What a translation prints is accepted by the other library and means what it says."""

from __future__ import annotations

import random

import pytest

from kit.cli.steps import main
from kit.dialects import (
    SB3,
    Dreamer,
    Nip,
    Pyrado,
    PyradoGAE,
    Sheeprl,
    Tianshou,
    as_plan,
    dialect,
)
from kit.dialects.explain import explain, shown
from kit.dialects.fields import flat
from kit.dialects.files import make, settings_of
from kit.dialects.translation import translate
from kit.steps import SettingError
from kit.steps.same_run import differing_settings
from tests.dialects.random_settings import EVERY_DIALECT, random_settings
from tests.errors import raises_setting

every_dialect = pytest.mark.parametrize("name", EVERY_DIALECT)


def typed(translation):
    """The target's settings, read from what is printed."""
    words = [f"{name}={shown(value)}" for name, value in translation.settings().items()]
    return make(type(translation.target), settings_of(words))


def check(translation):
    """Assert that what is printed is accepted and is the same run."""
    again, target = typed(translation), translation.target
    assert explain(again).text()
    assert differing_settings(target.to_plan(), again.to_plan()) == []
    assert again.resolved().algo == target.resolved().algo
    assert translation.text()
    assert translation.to_dict()


def sources(name, count):
    """Random settings of a library that make a run of not too many iterations."""
    draw, made = random.Random(name), []
    while len(made) < count:
        given = random_settings(name, draw, nasty=0)
        try:
            source = dialect(name).from_settings(given)
            plan = source.to_plan()
            if plan.is_exact and plan.iterations <= 10**5:
                made.append(source)
        except SettingError:
            continue
    return made


def translations(source, names):
    """The translations of settings that are not refused."""
    for name in names:
        try:
            yield translate(source, dialect(name))
        except SettingError:
            continue


@every_dialect
def test_translated_random_settings_are_valid_in_target(name):
    others, made = [other for other in EVERY_DIALECT if other != name], 0
    for source in sources(name, 25):
        for translation in translations(source, others):
            check(translation)
            made += 1
    assert made > 25


# ---------------------------------------------------------------------- the same library
@every_dialect
def test_translation_to_same_library_is_identity(name):
    for source in sources(name, 60):
        translation = translate(source, dialect(name))
        assert translation.target == source
        assert (translation.differences, translation.left_out) == ([], {})
        assert typed(translation).resolved() == source.resolved()
        default = flat(type(source)())
        changed = {n for n, value in flat(source).items() if value != default.get(n)}
        assert translation.settings().keys() <= changed | {"version"}


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        (Dreamer(steps=1000, batch_size=4, batch_length=8), {}),  # nearest() has another buffer
        (Dreamer(steps=1000, replay_size=1_000_000), {"replay_size": 1_000_000}),
        (Tianshou(algo="sac", num_train_envs=3, num_test_envs=4), {"num_test_envs": 4}),
        (Nip(steps_per_env_per_iteration=100, num_normalization_steps=5), {}),
        (Pyrado(algo="ppo", min_steps=8, critic=PyradoGAE(gamma=0.5)), {"critic.gamma": 0.5}),
        (SB3(algo="ppo", use_sde=True, policy="CnnPolicy"), {"use_sde": True}),
        (Sheeprl(version="0.5.0", share_data=True, rollout_steps=8), {"version": "0.5.0"}),
    ],
)
def test_translation_to_same_library_keeps_unsupported_settings(source, settings):
    translation = translate(source, type(source))
    assert vars(translation.target) == vars(source)
    assert translation.settings().items() >= settings.items()


def test_translation_to_other_version_keeps_other_settings():
    given = Sheeprl(algo="sac", gamma=0.5, share_data=True, buffer_checkpoint=False, num_envs=2)
    translation = translate(given, Sheeprl, {"version": "0.5.0"})
    made = translation.target
    assert (made.version, made.gamma, made.buffer_checkpoint) == ("0.5.0", 0.5, False)
    pyrado = Pyrado(
        algo="ppo", min_steps=8, num_workers=3, critic=PyradoGAE(gamma=0.5, lr_scheduler="x")
    )
    made = translate(pyrado, Pyrado, {"batch_size": 7}).target
    assert (made.batch_size, made.num_workers) == (7, 3)
    assert made.critic == pyrado.critic


# ---------------------------------------------------------------------- what is printed
def test_translate_prints_algorithm_when_not_implied(capsys):
    assert main(["translate", "sb3", "algo=sac", "n_envs=2", "--to", "tianshou"]) == 0
    assert "tianshou 1.1.0 (sac)\n  algo=sac\n" in capsys.readouterr().out
    assert main(["translate", "sb3", "n_envs=2", "--to", "sheeprl"]) == 0
    assert "algo=" not in capsys.readouterr().out


def test_explain_error_attributes_unknown_setting_to_dialect(capsys):
    assert main(["explain", "sb3", "gravity=1"]) == 2
    error = capsys.readouterr().err
    assert "The sb3 dialect has no such setting" in error
    assert "ee `kit steps words sb3`" in error


def test_translate_accepts_dotted_target_setting(capsys):
    words = ["translate", "sb3", "algo=ppo", "gamma=0.5", "--to", "sheeprl", "algo.gamma=0.75"]
    assert main(words) == 0
    assert "  gamma=0.75\n" in capsys.readouterr().out


def test_as_plan_accepts_settings_with_dialect_name():
    settings = {"n_envs": 4, "total_timesteps": 8192}
    assert as_plan({"dialect": "sb3", **settings}) == SB3(**settings).to_plan()
    with raises_setting("dialect"):
        as_plan(settings)
