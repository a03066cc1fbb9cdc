"""What is given acts, and what is not given has the recipe's default: in Python and as typed."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
import re
import typing
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest

import recipes
from kit.cli import launch
from kit.cli.overrides import chosen_settings
from kit.config import GivenFields, OnPolicyConfig
from kit.config.plain import check, differences, from_plain, to_plain
from kit.config.plan import make_plan
from kit.dialects import SB3, Nip
from kit.dialects.carried import apply_to_config, map_fields
from kit.experiment import EnvConfig, OffPolicySteps, OnPolicySteps
from kit.runs.recipe import Recipe
from kit.steps import SettingError, StepPlan
from kit.steps.given import given_fields
from kit.steps.schema import type_hints
from recipes import a2c, dqn, ppo, ppo_pixels, ppo_recurrent, reinforce, sac, svpg
from tests.errors import raises_setting

RECIPES = [module.name for module in pkgutil.iter_modules(recipes.__path__)]

CANDIDATES = [
    3, 4, 0.3, "changed", False, True, [3], [[4, 3, 2]], {"a": 3}, "cosine", 0.7, 0.9995,
    ["changed"], [0.5, 3.0],
]  # fmt: skip
"""Values of which the first that a setting takes is another than its default."""


def choices(hint: Any) -> list[Any]:
    """The choices of a type, ``Literal`` in unions included."""
    if typing.get_origin(hint) is typing.Literal:
        return [*typing.get_args(hint)]
    return [choice for inner in typing.get_args(hint) for choice in choices(inner)]


def changed_values(config: Any) -> dict[str, Any]:
    """Another value of every setting, by dotted name."""
    found = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            found |= {f"{f.name}.{name}": other for name, other in changed_values(value).items()}
        elif f.name != "resume":  # which needs a run
            candidates = [*choices(type_hints(type(config))[f.name]), *CANDIDATES]
            taken = (other for other in candidates if is_taken(type(config), f.name, other))
            found[f.name] = next(other for other in taken if other != value)
    return found


def is_taken(group: type, name: str, value: Any) -> bool:
    """Whether a setting takes a value as it is."""
    try:
        return bool(getattr(from_plain(group, {name: value}), name) == value)
    except SettingError:
        return False


def written(value: Any) -> str:
    """A value as it is typed."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{written(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def as_typed(config_class: type, *arguments: str) -> Any:
    """The configuration of a command line."""
    before = chosen_settings(config_class, Recipe.of(config_class), arguments)
    plain = [one for one in arguments if not one.startswith(("steps=", "preset="))]
    before.check(plain, False)
    return from_plain(config_class, before.overridden(plain))


def in_python(config_class: type, name: str, value: Any) -> Any:
    """The configuration with one setting given."""
    group, _, last = name.rpartition(".")
    if not group:
        return config_class(**{last: value})
    kind = type(getattr(config_class(), group))
    return config_class(**{group: kind(**{last: value})})


# ---------------------------------------------------------------------- every recipe
@pytest.mark.parametrize("name", RECIPES)
def test_config_from_command_line_equals_config_from_python(name: str) -> None:
    config_class = importlib.import_module(f"recipes.{name}").Config
    default = to_plain(config_class())
    for setting, value in changed_values(config_class()).items():
        typed = as_typed(config_class, f"{setting}={written(value)}")
        made = in_python(config_class, setting, value)
        check(typed), check(made)
        assert typed == made, setting
        assert given_fields(typed) == given_fields(made)
        assert given_fields(typed.steps) == given_fields(made.steps)
        expected = copy.deepcopy(default)
        group, _, last = setting.rpartition(".")
        (expected[group] if group else expected)[last] = value
        assert to_plain(made) == expected, setting
        assert from_plain(config_class, to_plain(made)) == made
        assert replace(made) == made == copy.deepcopy(made)


def test_config_passes_through_hydra_unchanged() -> None:
    made: list[Any] = []

    def build(cfg: Any) -> Any:
        made.append(cfg)
        raise SettingError("seed", 0, "ends this test")

    arguments = ["env.id=Pendulum-v1", "steps.total_policy_steps=640", "gamma=0.98"]
    with pytest.raises(SystemExit):
        launch.main(a2c.Config, build, arguments)
    steps = OnPolicySteps(total_policy_steps=640)
    assert made == [a2c.Config(env=EnvConfig(id="Pendulum-v1"), steps=steps, gamma=0.98)]
    assert given_fields(made[0]) == {"env", "steps", "gamma"}


# ---------------------------------------------------------------------- replace, assign, copy
A2C_STEPS = {"steps_per_env": 5, "update_epochs": 1, "minibatch_size": None}


def has_a2cs(steps: Any, **changes: Any) -> bool:
    return {name: getattr(steps, name) for name in A2C_STEPS} == {**A2C_STEPS, **changes}


def test_group_keeps_recipe_defaults_after_replace() -> None:
    config = replace(a2c.Config(), steps=OnPolicySteps(total_policy_steps=10_240))
    assert has_a2cs(config.steps)
    assert config.steps.total_policy_steps == 10_240
    assert replace(config, seed=1).steps == config.steps
    inner = replace(config, steps=replace(config.steps, update_epochs=10))
    assert has_a2cs(inner.steps, update_epochs=10)
    assert inner.steps.total_policy_steps == 10_240


def test_replace_of_group_marks_only_its_changes_as_explicit() -> None:
    steps = replace(OnPolicySteps(total_policy_steps=10_240), update_epochs=10)  # its own default
    assert given_fields(steps) == {"total_policy_steps", "update_epochs"}
    assert has_a2cs(a2c.Config(steps=steps).steps, update_epochs=10)


def test_group_keeps_recipe_defaults_after_assignment() -> None:
    config = a2c.Config()
    config.steps = OnPolicySteps(total_policy_steps=10_240)
    assert has_a2cs(config.steps)
    steps = OnPolicySteps()
    steps.update_epochs = 10
    assert has_a2cs(a2c.Config(steps=steps).steps, update_epochs=10)
    config.steps.update_epochs = 3
    assert replace(config, seed=1).steps.update_epochs == 3


def test_config_copies_group() -> None:
    steps = OnPolicySteps(total_policy_steps=640)
    assert has_a2cs(a2c.Config(steps=steps).steps)
    assert ppo.Config(steps=steps).steps == steps == OnPolicySteps(total_policy_steps=640)


def test_group_of_another_recipe_keeps_its_values() -> None:
    assert has_a2cs(ppo.Config(steps=a2c.Config().steps).steps)


def test_group_of_positional_arguments_keeps_recipe_defaults() -> None:
    env = svpg.Config(env=EnvConfig("Pendulum-v1")).env
    assert (env.id, env.num_envs, env.normalize_observation) == ("Pendulum-v1", 32, True)


def test_explicit_fields_survive_copies_and_keep_equality() -> None:
    config = a2c.Config(steps=OnPolicySteps(total_policy_steps=640))
    for made in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert made == config
        assert repr(made) == repr(config)
        assert given_fields(made) == {"steps"}
        assert given_fields(made.steps) == {"total_policy_steps"}
    assert vars(OnPolicySteps(total_policy_steps=65_536)) == vars(OnPolicySteps())


# ---------------------------------------------------------------------- recipes of others
@dataclass
class Network(GivenFields):
    depth: int = 2
    width: int = 64


@dataclass
class MySteps(OnPolicySteps):
    update_epochs: int = 7
    bonus: int = 0

    def __post_init__(self) -> None:
        assert self.update_epochs


@dataclass
class Config(OnPolicyConfig):
    """Settings of a recipe of one's own."""

    steps: OnPolicySteps = field(default_factory=lambda: OnPolicySteps(steps_per_env=16))
    network: Network = field(default_factory=lambda: Network(width=256))

    def __post_init__(self) -> None:
        self.seen = self.network.width


def test_custom_recipe_keeps_its_group_defaults() -> None:
    config = Config(network=Network(depth=3), steps=OnPolicySteps(total_policy_steps=640))
    assert (config.network, config.steps.steps_per_env) == (Network(3, 256), 16)
    assert config.seen == 256
    assert replace(config, network=Network(depth=4)).network == Network(4, 256)
    assert as_typed(Config, "network.depth=3").network == Network(3, 256)


def test_group_subclass_keeps_its_declared_defaults() -> None:
    steps = replace(MySteps(total_policy_steps=640), bonus=1)
    assert given_fields(steps) == {"total_policy_steps", "bonus"}
    made = Config(steps=steps).steps
    assert (made.steps_per_env, made.update_epochs, made.bonus) == (16, 7, 1)


@dataclass
class Forgetful:
    depth: int = 2
    width: int = 64


@dataclass
class ForgetfulConfig(OnPolicyConfig):
    network: Forgetful = field(default_factory=lambda: Forgetful(width=256))


def test_check_rejects_group_that_loses_defaults() -> None:
    with raises_setting("network"):
        check(ForgetfulConfig())


# ---------------------------------------------------------------------- other libraries
NIP = {"num_iterations": 2, "frames_per_batch": 128, "steps_per_env_per_iteration": 16}


def test_explicit_dialect_default_takes_effect() -> None:
    same = {"use_shared_body": True, "anneal_lr": False}
    assert map_fields(Nip(**NIP), ppo.Config(), "ppo")[0] == {}
    values = {"shared_backbone": True, "lr_schedule": "constant"}
    assert map_fields(Nip(**NIP, **same), ppo.Config(), "ppo")[0] == values
    assert map_fields(replace(Nip(**NIP), **same), ppo.Config(), "ppo")[0] == values
    assigned = Nip(**NIP)
    assigned.anneal_lr = False
    assert map_fields(assigned, ppo.Config(), "ppo")[0] == {"lr_schedule": "constant"}
    as_file = from_plain(ppo.Config, {"steps": {"dialect": "nip", **NIP, **same}})
    assert map_fields(as_file.steps, as_file, "ppo")[0] == values
    words = [f"steps.{n}={written(v)}" for n, v in {**NIP, **same}.items()]
    typed = as_typed(ppo.Config, "steps=nip", *words)
    assert map_fields(typed.steps, typed, "ppo")[0] == values
    assert typed == ppo.Config(steps=Nip(**NIP, **same))


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"max_grad_norm": 1.0}, {"max_grad_norm": 1.0}),
        ({"loss_critic_type": "smooth_l1"}, {"critic_loss": "smooth_l1"}),
        ({"gamma": 0.9}, {"gamma": 0.9}),
        ({"normalize_observations": True}, {"env.normalize_observation": True}),
    ],
    ids=str,
)
def test_explicit_nip_default_takes_effect(given: Any, values: Any) -> None:
    assert map_fields(Nip(**NIP, **given), ppo_pixels.Config(), "ppo")[0] == values


def test_explicit_default_in_dialect_group_takes_effect() -> None:
    config = ppo.Config(backbone_lr_scale=0.5)
    with raises_setting("body_lr_factor.actor"):
        map_fields(Nip(**NIP, body_lr_factor={"actor": 1.0}), config, "ppo")


def test_dialect_rejects_contradicting_recipe_setting() -> None:
    for steps, rate in (Nip(**NIP, lr=0.5), 5e-4), (Nip(**NIP, lr=0.003), 0.1):
        with raises_setting("lr"):
            map_fields(steps, ppo.Config(steps=steps, learning_rate=rate), "ppo")
    assert ppo.Config().learning_rate == 5e-4
    config = ppo.Config(steps=Nip(**{**NIP, "frames_per_batch": 64}), env=EnvConfig(num_envs=8))
    with raises_setting("env.num_envs"):
        make_plan(config, "ppo")


def test_dialect_rejects_explicit_default_without_recipe_setting() -> None:
    map_fields(Nip(**NIP, clip_value=False), a2c.Config(), "on_policy")  # off, as in the recipe
    with raises_setting("exploration_fraction"):
        map_fields(SB3(algo="dqn", exploration_fraction=0.1), sac.Config(), "dqn")


def test_reloaded_dialect_settings_apply_no_defaults() -> None:
    config = ppo.Config(steps=Nip(**NIP, lr=0.5), seed=3)
    apply_to_config(config.steps, config, "ppo")
    saved = to_plain(config)
    again = from_plain(ppo.Config, saved)
    apply_to_config(again.steps, again, "ppo")
    assert to_plain(again) == saved


def test_library_defaults_keep_explicit_setting() -> None:
    steps = SB3(algo="dqn", library_defaults=True)
    assert map_fields(steps, dqn.Config(), "dqn")[0]["tau"] == 1.0
    assert "tau" not in map_fields(steps, dqn.Config(tau=dqn.Config().tau), "dqn")[0]


# ---------------------------------------------------------------------- the list of a run
def test_differences_lists_non_default_settings() -> None:
    assert differences(ppo.Config()) == []
    config = ppo.Config(env=EnvConfig(id="Pendulum-v1"), learning_rate=0.001, seed=1)
    assert differences(config, exclude={"seed"}) == [
        "settings: env.id=Pendulum-v1 (default: CartPole-v1), learning_rate=0.001 (default: 0.0005)"
    ]
    config = ppo.Config(steps=Nip(lr=0.5), env=EnvConfig(kwargs={"a": 1}))
    assert differences(config) == ["settings: steps=nip, env.kwargs.a=1, steps.lr=0.5"]
    assert differences(ppo.Config(steps=StepPlan(iterations=1))) == ["settings: steps=plan"]


def test_plan_table_lists_changed_settings() -> None:
    steps = OnPolicySteps(total_policy_steps=5_120, evaluation_episodes=1)
    trainer = ppo.build(ppo.Config(steps=steps, gamma=0.9, log_dir=None, progress=False))
    (line,) = [one for one in trainer.plan.remarks if one.startswith("settings: ")]
    assert line == (
        "settings: steps.total_policy_steps=5120 (default: 65536), "
        "steps.evaluation_episodes=1 (default: 10), gamma=0.9 (default: 0.99)"
    )
    assert "settings: steps.total_policy_steps=5120" in trainer.plan.table()


# ---------------------------------------------------------------------- frames_per_batch
@pytest.mark.parametrize(
    ("config_class", "kind"), [(ppo.Config, OnPolicySteps), (sac.Config, OffPolicySteps)]
)
def test_frames_per_batch_replaces_steps_per_env(config_class: Any, kind: Any) -> None:
    config = config_class(env=EnvConfig(num_envs=4), steps=kind(frames_per_batch=160))
    typed = as_typed(config_class, "env.num_envs=4", "steps.frames_per_batch=160")
    assert typed == config
    again = from_plain(config_class, to_plain(config))
    for made in (config, typed, again, replace(config, seed=1)):
        made.steps.total_policy_steps = 8_000
        plan = make_plan(made, "")
        assert (plan.steps_per_env, plan.frames_per_batch) == (40, 160)
        assert re.search("batch .* 160  4 envs x 40 steps", plan.table())


@pytest.mark.parametrize(
    "settings",
    [
        {"frames_per_batch": 100},
        {"frames_per_batch": 4},
        {"frames_per_batch": 256, "steps_per_env": 64},
        {"frames_per_batch": 256, "min_episodes": 1},
        {"frames_per_batch": 0},
    ],
)
def test_make_plan_rejects_invalid_frames_per_batch(settings: dict) -> None:
    with raises_setting("steps.frames_per_batch"):
        make_plan(ppo.Config(steps=OnPolicySteps(**settings)), "ppo")


def test_plan_takes_frames_per_batch() -> None:
    plan = StepPlan(total_policy_steps=1_024, num_envs=4, frames_per_batch=64)
    assert plan == StepPlan(total_policy_steps=1_024, num_envs=4, steps_per_env=16)
    assert (plan.steps_per_env, plan.frames_per_batch) == (16, 64)
    assert StepPlan.from_dict(plan.to_dict()) == plan == pickle.loads(pickle.dumps(plan))
    values = {"total_policy_steps": 1_024, "num_envs": 4, "frames_per_batch": 64}
    assert StepPlan.from_dict(values) == plan
    assert from_plain(ppo.Config, {"steps": {"dialect": "plan", **values}}).steps == plan
    assert plan.replace(num_envs=8).frames_per_batch == 128
    assert plan.replace(frames_per_batch=32).steps_per_env == 8
    with raises_setting("frames_per_batch"):
        StepPlan(iterations=1, num_envs=4, steps_per_env=1, frames_per_batch=64)
    assert re.search("batch .* 64  4 envs x 16 steps", plan.table())


def test_explicit_steps_replace_default_min_steps() -> None:
    for name in ("steps_per_env", "frames_per_batch"):
        config = reinforce.Config(steps=OnPolicySteps(**{name: 16}, total_policy_steps=1_280))
        assert config.steps.min_steps == 1_000
        assert make_plan(config, "").min_steps is None
    both = OnPolicySteps(steps_per_env=16, min_steps=1_000)
    with raises_setting("steps.steps_per_env"):
        make_plan(reinforce.Config(steps=both), "")


def test_minibatches_conflict_only_with_explicit_minibatch_size() -> None:
    config = ppo_recurrent.Config(steps=OnPolicySteps(minibatches=2))
    size = config.steps.minibatch_size
    assert make_plan(config, "").minibatches_in_epoch(make_plan(config, "").rows(1)) == 2
    assert from_plain(ppo_recurrent.Config, to_plain(config)) == config
    make_plan(from_plain(ppo_recurrent.Config, to_plain(config)), "")
    config = ppo_recurrent.Config(steps=OnPolicySteps(minibatches=2, minibatch_size=size))
    with raises_setting("steps.minibatches"):
        make_plan(config, "")
