"""What is translated can be typed: the other library explains it, with the same counts."""

from __future__ import annotations

import random

import pytest

from kit.cli.steps import main
from kit.dialects import GAE, SB3, CleanRL, Nip, Pyrado, Sheeprl, Tianshou, Tianshou2, dialect
from kit.dialects.carried import changed, meanings, use_of
from kit.dialects.explain import explain, shown
from kit.dialects.files import make, settings_of
from kit.dialects.translate import translate
from kit.steps import SettingError
from tests.dialects.random_settings import EVERY_DIALECT, random_settings

every_dialect = pytest.mark.parametrize("name", EVERY_DIALECT)

NEEDED = {
    "torchrl": {"optim_steps_per_batch": 10},
    "nip": {"steps_per_env_per_iteration": 10},
    "pyrado": {"min_steps": 20, "env_max_steps": 10, "memory_size": 1000, "max_iter": 3},
}
"""Settings without which a library makes no plan."""
VALUES = [True, False, 0.3, 2, 64, 20_000, "l1", "RunningStandardizer", "CnnPolicy", "lin_1e-3"]
VALUES += ["auto_0.1", {"net_arch": [32, 32]}]


def typed(cls, values):
    """The settings that ``kit steps`` reads, from what it prints."""
    return make(cls, settings_of(f"{name}={shown(value)}" for name, value in values.items()))


def translated(settings, target):
    """The translation, or nothing where there is no plan, or no such run in the target."""
    try:
        settings.to_plan()
        return translate(settings, dialect(target))
    except SettingError:
        return None


def assert_can_be_typed(made):
    again = typed(type(made.target), made.settings())
    assert again.resolved().algo == made.target.resolved().algo
    assert again.version == made.target.version
    assert again.to_plan() == made.target.to_plan() == explain(again).plan
    assert meanings(again) == meanings(made.target)


def assert_carried(settings, made):
    """What was changed and does not count means the same there, or is listed."""
    theirs = meanings(made.target)
    for field in changed(settings).keys() - made.left_out.keys():
        for setting, value in meanings(settings, [field]).items():
            assert theirs.get(setting) == value, (field, setting)


@every_dialect
def test_a_translation_can_be_typed_and_makes_the_same_plan(name):
    draw, count = random.Random(name), 0
    for target in EVERY_DIALECT:
        for _ in range(30):
            settings = dialect(name).from_settings(random_settings(name, draw, nasty=0))
            made = translated(settings, target)
            if made is not None:
                assert_can_be_typed(made)
                assert_carried(settings, made)
                count += 1
    assert count > 10


def algorithms_of(name):
    """The algorithms of a dialect, one for each set of fields that have an effect."""
    cls = dialect(name)
    return {cls.applicable_fields(algo): algo for algo in cls.ALGORITHMS}.values()


def with_a_field_changed(name):
    """Settings of each algorithm with one field changed that does not count, to several values."""
    cls = dialect(name)
    for algo in algorithms_of(name):
        fields = [field for field, use, _ in use_of(cls) if use != "counts"]
        for field in [field for field in fields if cls.applies(field, algo)]:
            for value in VALUES:
                try:
                    made = make(cls, {**NEEDED.get(name, {}), "algo": algo, field: value})
                    made.to_plan()
                except SettingError:
                    continue
                if field in changed(made):
                    yield made


@every_dialect
def test_each_field_that_does_not_count_is_carried_over_or_listed(name):
    count = 0
    for settings in with_a_field_changed(name):
        for target in EVERY_DIALECT:
            made = translated(settings, target)
            if made is not None:
                assert_can_be_typed(made)
                assert_carried(settings, made)
                count += 1
    assert count > 3


# ---------------------------------------------------------------------- the same library
@every_dialect
def test_a_translation_into_the_same_library_gives_back_what_was_given(name):
    for settings in with_a_field_changed(name):
        made = translate(settings, dialect(name))
        assert made.target == settings
        assert made.target is not settings
        assert (made.differences, made.left_out, made.other_settings()) == ([], {}, {})
        assert made.settings().keys() - {"algo", "version"} <= changed(settings).keys()
        assert changed(typed(dialect(name), made.settings())).items() <= changed(settings).items()


def test_another_version_of_the_same_library_keeps_what_does_not_count():
    critic = GAE(gamma=0.9, max_grad_norm=0.3)
    given = Pyrado(algo="ppo", **NEEDED["pyrado"] | {"memory_size": None}, critic=critic, lr=0.1)
    made = translate(given, Pyrado, {"version": "05cfa26"})
    assert (made.target.version, made.target.lr, made.left_out) == ("05cfa26", 0.1, {})
    assert (made.target.critic.gamma, made.target.critic.max_grad_norm) == (0.9, 0.3)
    assert critic == GAE(gamma=0.9, max_grad_norm=0.3)


def test_a_buffer_at_its_default_stays_at_the_default_of_the_target():
    assert translate(Tianshou2(algo="sac"), Tianshou).target.buffer_size == 4096
    made = translate(SB3(algo="sac", buffer_size=5000), Tianshou)
    assert made.target.buffer_size == 5000
    other = translate(SB3(algo="sac"), Tianshou).other_settings()
    assert other["buffer_size"] == (1_000_000, 4096)


# ---------------------------------------------------------------------- values of the target
@pytest.mark.parametrize(
    ("given", "target", "left_out"),
    [
        (Nip(clip_value=0.3, steps_per_env_per_iteration=10), CleanRL, {"clip_value": 0.3}),
        (SB3(algo="ppo", clip_range_vf=0.2), Sheeprl, {"clip_range_vf": 0.2}),
        (CleanRL(algo="ppo", clip_vloss=True), SB3, {"clip_vloss": True}),
        (Sheeprl(algo="ppo", clip_vloss=True), SB3, {"clip_vloss": True}),
        (SB3(algo="ppo", policy_kwargs={"net_arch": [32, 32]}), Sheeprl, {"policy_kwargs": ...}),
        (SB3(algo="ppo", policy_kwargs={"net_arch": [64, 64]}), CleanRL, {}),  # as it is there
        (SB3(algo="ppo", policy_kwargs={"net_arch": [64, 64]}), Sheeprl, {}),
    ],
)
def test_a_value_that_the_target_would_not_take_is_left_out(given, target, left_out):
    assert translate(given, target).left_out.keys() == left_out.keys()


def test_a_coefficient_that_acts_where_it_is_fixed_goes_over_with_that():
    made = translate(SB3(algo="sac", ent_coef=0.1), CleanRL)
    assert (made.target.alpha, made.target.autotune, made.left_out) == (0.1, False, {})


def test_a_setting_to_fix_is_a_field_of_the_target(capsys):
    assert main(["translate", "sb3", "algo=sac", "--to", "sheeprl", "replay_rato=1"]) == 2
    assert "replay_rato=1 is not a setting of sheeprl; what works: replay_ratio" in (
        capsys.readouterr().err
    )
    assert main(["translate", "sb3", "algo=sac", "--to", "sheeprl", "algo.gamma=0.5"]) == 0
    assert "  gamma=0.5\n" in capsys.readouterr().out
    with pytest.raises(SettingError, match="n_env=2 is not a setting"):
        translate(Sheeprl(algo="sac"), SB3, {"n_env": 2})
