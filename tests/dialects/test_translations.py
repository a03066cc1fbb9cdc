"""What a translation prints is accepted by the other library and means what it says."""

from __future__ import annotations

import random
import typing

import pytest

import kit.dialects
from kit.cli.steps import main
from kit.dialects import (
    GAE,
    SB3,
    CleanRL,
    Dreamer,
    Nip,
    Pyrado,
    Sheeprl,
    Tianshou,
    Tianshou2,
    as_plan,
    dialect,
)
from kit.dialects.carried import _meanings, _meant, _uses_for, carry_over, flat
from kit.dialects.explain import explain, shown
from kit.dialects.files import make, settings_of
from kit.dialects.translate import translate
from kit.steps import SettingError
from kit.steps.same_run import differing_settings
from kit.steps.values import same_value
from tests.dialects.random_settings import EVERY_DIALECT, random_settings, sensible

every_dialect = pytest.mark.parametrize("name", EVERY_DIALECT)

RUNS = {
    "sheeprl": {"total_steps": 2048},
    "tianshou": {"num_epochs": 2, "num_train_envs": 2},
    "tianshou2": {"max_epochs": 2, "num_training_envs": 2},
    "pyrado": {"max_iter": 3, "min_steps": 64, "env_max_steps": 8},
    "nip": {"num_iterations": 3, "steps_per_env_per_iteration": 100},
    "dreamer": {"steps": 20_000, "batch_size": 2, "batch_length": 4, "envs": 2},
    "dreamer-paper": {"steps": 20_000},
    "sb3": {"total_timesteps": 4096},
    "torchrl": {"total_frames": 4000, "optim_steps_per_batch": 4},
    "cleanrl": {"total_timesteps": 4096},
}
"""Settings of a short run of each library, on- or off-policy."""
EPISODES = {"train_freq": (1, "episode"), "episode_length": 10}
VALUE_BASED = {"pyrado": {"memory_size": 500, "num_updates_per_step": 2}}


def typed(translation):
    """The target's settings, read from what is printed."""
    words = [f"{name}={shown(value)}" for name, value in translation.settings().items()]
    return make(type(translation.target), settings_of(words))


def check(translation):
    """Assert that what is printed is accepted, is the same run, and means the same."""
    again, target = typed(translation), translation.target
    assert explain(again).text()
    assert differing_settings(target.to_plan(), again.to_plan()) == []
    assert again.resolved().algo == target.resolved().algo
    assert _meanings(again) == _meanings(target)
    check_carried(translation)
    assert translation.text()
    assert translation.to_dict()


def check_carried(translation):
    """Assert that each changed setting has its meaning in the target, or is said to be left out."""
    source, theirs = translation.source, _meanings(translation.target)
    said, default, changed = source.resolved(), flat(type(source)()), flat(source)
    for name, use in _uses_for(said).items():
        if not same_value(changed[name], default[name]) and name not in translation.left_out:
            meant = _meant(use, flat(said)[name], said) or {}
            assert all(same_value(theirs.get(n), wanted) for n, wanted in meant.items())


def sources(name, count):
    """Random settings of a library that make a run of not too many iterations."""
    draw, made = random.Random(name), []
    while len(made) < count:
        given = random_settings(name, draw, nasty=0)
        try:
            source = dialect(name).from_settings(given)
            if source.to_plan().iterations <= 10**5:
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
def test_random_settings_are_translated_to_settings_that_the_other_library_accepts(name):
    others, made = [other for other in EVERY_DIALECT if other != name], 0
    for source in sources(name, 25):
        for translation in translations(source, others):
            check(translation)
            made += 1
    assert made > 25


def settings_of_a_field(name, algo):
    """A short run of an algorithm with one field changed that does not count, for each of these."""
    cls = dialect(name)
    family = cls.ALGORITHMS[algo]
    run = RUNS[name] | (VALUE_BASED.get(name, {}) if family == "off_policy" else {})
    said = cls(algo=algo, **run).resolved()
    hints = typing.get_type_hints(cls) | {
        f"{group}.{field}": hint
        for group, inner in cls.GROUPS.items()
        for field, hint in typing.get_type_hints(inner).items()
    }
    draw = random.Random(name + algo)
    for field in _uses_for(said):
        for _ in range(2):
            value = sensible(field, hints[field], draw)
            if value is not None:
                yield {"algo": algo, **run, field: value}


@every_dialect
def test_each_field_that_does_not_count_is_translated_with_its_meaning_or_left_out(name):
    others, made = [other for other in EVERY_DIALECT if other != name], 0
    for algo in dialect(name).ALGORITHMS:
        if dialect(name).ALGORITHMS[algo] == "offline":
            continue
        for given in settings_of_a_field(name, algo):
            try:
                source = make(dialect(name), given)
                source.to_plan()
            except SettingError:
                continue
            for translation in translations(source, others):
                check(translation)
                made += 1
    assert made


# ---------------------------------------------------------------------- the same library
@every_dialect
def test_a_translation_to_the_same_library_gives_back_what_was_given(name):
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
        (Pyrado(algo="ppo", min_steps=8, critic=GAE(gamma=0.5)), {"critic.gamma": 0.5}),
        (SB3(algo="ppo", use_sde=True, policy="CnnPolicy"), {"use_sde": True}),
        (Sheeprl(version="0.5.0", share_data=True, rollout_steps=8), {"version": "0.5.0"}),
    ],
)
def test_the_same_library_keeps_buffers_groups_and_what_recipes_refuse(source, settings):
    translation = translate(source, type(source))
    assert vars(translation.target) == vars(source)
    assert translation.settings().items() >= settings.items()


def test_another_version_of_the_same_library_keeps_what_does_not_count():
    given = Sheeprl(algo="sac", gamma=0.5, share_data=True, buffer_checkpoint=False, num_envs=2)
    translation = translate(given, Sheeprl, {"version": "0.5.0"})
    made = translation.target
    assert (made.version, made.gamma, made.buffer_checkpoint) == ("0.5.0", 0.5, False)
    pyrado = Pyrado(algo="ppo", min_steps=8, num_workers=3, critic=GAE(gamma=0.5, lr_scheduler="x"))
    made = translate(pyrado, Pyrado, {"batch_size": 7}).target
    assert (made.batch_size, made.num_workers) == (7, 3)
    assert made.critic == pyrado.critic


# ---------------------------------------------------------------------- values that it would refuse
@pytest.mark.parametrize(
    ("source", "target", "left_out"),
    [
        (SB3(algo="ppo", clip_range_vf=0.3), CleanRL, {"clip_range_vf": 0.3}),  # another loss
        (CleanRL(algo="ppo", clip_vloss=True), SB3, {"clip_vloss": True}),  # another loss
        (Sheeprl(algo="ppo", max_grad_norm=0.0), SB3, {"max_grad_norm": 0.0}),  # None: its default
        (SB3(algo="sac", buffer_size=100), Dreamer, {"buffer_size": 100}),  # not one batch
    ],
)
def test_a_value_that_the_other_library_would_not_take_is_left_out(source, target, left_out):
    assert translate(source, target).left_out == left_out


@pytest.mark.parametrize(
    ("source", "target", "settings"),
    [
        (SB3(algo="ppo", vf_coef=1.0), CleanRL, {"vf_coef": 2.0}),  # of half a mean of squares
        (SB3(algo="ppo", target_kl=0.02), CleanRL, {"target_kl": 0.03}),
        (SB3(algo="sac", tau=0.25, **EPISODES), Pyrado, {"tau": 0.75}),  # the share that is kept
        (Tianshou(algo="ppo", num_train_envs=2, num_test_envs=3), Tianshou2, {"num_test_envs": 3}),
    ],
)
def test_a_value_is_converted_where_the_other_library_defines_it_otherwise(
    source, target, settings
):
    translation = translate(source, target)
    assert translation.settings().items() >= settings.items()
    assert translation.left_out == {}


def test_settings_of_a_group_are_translated_too():
    source = Nip(steps_per_env_per_iteration=10, frames_per_batch=10, gamma=0.5, lmbda=0.75)
    target = Pyrado(algo="ppo", min_steps=10, env_max_steps=10)
    assert carry_over(source, target, ()) == {}
    assert (target.critic.gamma, target.critic.lamda) == (0.5, 0.75)


# ---------------------------------------------------------------------- what is printed
def test_the_algorithm_is_printed_where_the_settings_do_not_imply_it(capsys):
    assert main(["translate", "sb3", "algo=sac", "n_envs=2", "--to", "tianshou"]) == 0
    assert "tianshou 1.1.0 (sac)\n  algo=sac\n" in capsys.readouterr().out
    assert main(["translate", "sb3", "n_envs=2", "--to", "sheeprl"]) == 0
    assert "algo=" not in capsys.readouterr().out


def test_an_unknown_setting_of_the_target_is_refused(capsys):
    assert main(["translate", "sb3", "--to", "sheeprl", "gama=0.9"]) == 2
    why = "is no setting of sheeprl that is known here; what works: gamma"
    assert f"gama=0.9 {why}" in capsys.readouterr().err


def test_a_setting_of_a_library_that_is_not_known_here_is_not_called_none_of_it(capsys):
    assert main(["explain", "sb3", "device=cpu"]) == 2
    error = (
        "device='cpu' is no setting of Stable-Baselines3 that is known here; see `kit steps words"
    )
    assert error in capsys.readouterr().err


def test_a_setting_of_the_target_may_be_fixed_by_its_dotted_name(capsys):
    words = ["translate", "sb3", "algo=ppo", "gamma=0.5", "--to", "sheeprl", "algo.gamma=0.75"]
    assert main(words) == 0
    assert "  gamma=0.75\n" in capsys.readouterr().out


def test_what_is_no_plan_and_no_dialect_is_refused():
    with pytest.raises(SettingError, match=r"^steps=3 is neither a plan nor a dialect; what works"):
        as_plan(3)
    with pytest.raises(SettingError, match=r"^plan=3 is not a StepPlan; give a StepPlan\.$"):
        SB3.from_plan(3)
    with pytest.raises(AttributeError, match=r"module 'kit\.dialects' has no attribute 'SB4'"):
        kit.dialects.SB4  # noqa: B018


def test_settings_with_the_name_of_their_dialect_are_a_plan():
    settings = {"n_envs": 4, "total_timesteps": 8192}
    assert as_plan({"dialect": "sb3", **settings}) == SB3(**settings).to_plan()
    with pytest.raises(SettingError, match=r"^dialect=None is not known; what works: "):
        as_plan(settings)
