"""Each field of a vocabulary counts, acts as a setting of the recipe, or is refused by name."""

from __future__ import annotations

import dataclasses
import random
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kit.cli import steps as command
from kit.dialects import (
    DIALECTS,
    SB3,
    CleanRL,
    Dreamer,
    Nip,
    Pyrado,
    PyradoGAE,
    Sheeprl,
    Tianshou,
    dialect,
)
from kit.dialects.carried import apply_to_config, caveats, map_fields, use_of
from kit.dialects.fields import flat, uses
from kit.dialects.translation import translate
from kit.steps import SettingError
from recipes import a2c, crossq, ddpg, dqn, dqn_pixels, ppo, ppo_pixels, rainbow, sac, td3
from tests.dialects.random_settings import EVERY_DIALECT, random_settings
from tests.errors import raises_setting


@dataclass
class Env:
    normalize_observation: bool = True


@dataclass
class Recipe:
    """Settings of an on-policy recipe."""

    env: Env = field(default_factory=Env)
    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    critic_hidden_sizes: list[int] | None = None
    learning_rate: float = 1e-3
    lr_schedule: str = "linear"
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_epsilon: float = 0.2
    critic_coeff: float = 0.5
    initial_log_std: float = 0.0
    max_grad_norm: float | None = 0.5
    target_kl: float | None = None


@dataclass
class OffPolicyRecipe:
    """Settings of an off-policy recipe."""

    buffer_size: int = 1000
    n_step: int = 1
    store_next_observation: bool = True
    stacked_frames: int = 1
    tau: float = 0.005
    initial_alpha: float = 1.0
    gamma: float = 0.99


every_dialect = pytest.mark.parametrize("name", EVERY_DIALECT)


# ---------------------------------------------------------------------- the three uses
@every_dialect
def test_every_field_has_exactly_one_use(name):
    cls = dialect(name)
    rows = list(use_of(cls))
    assert [field for field, _, _ in rows] == list(flat(cls()))
    assert {use for _, use, _ in rows} <= {"counts", "acts", "ignored", "refused"}
    assert {field for field, use, _ in rows if use != "counts"} == set(uses(cls))
    assert all(text for _, use, text in rows if use != "counts")


@every_dialect
def test_non_counting_fields_do_not_change_plan(name):
    """But for a buffer too small for what is collected, and a run that ends at a known return."""
    cls, draw, changes = dialect(name), random.Random(name), 0
    carried = {n for n, use in uses(cls).items() if getattr(use, "family", None) is None}
    carried -= {"memory_size", "num_particles", "replay_size", "num_test_envs", "stop_rew"}
    carried -= {"use_sde", "use_sde_at_warmup", "replay_context"}
    for _ in range(400):
        settings = random_settings(name, draw, nasty=0)
        counted = {n: v for n, v in settings.items() if n not in carried}
        try:
            algo = cls(**settings).resolved().algo
            plans = cls(**settings).to_plan(algo), cls(**counted).to_plan(algo)
        except SettingError:
            continue
        assert plans[0] == plans[1]
        changes += settings != counted
    assert changes or not carried


# ---------------------------------------------------------------------- what acts
@pytest.mark.parametrize(
    ("given", "values"),
    [
        (Nip(lr=0.5, gamma=0.5), {"learning_rate": 0.5, "gamma": 0.5}),
        (Nip(lmbda=0.5, anneal_lr=True), {"gae_lambda": 0.5, "lr_schedule": "linear"}),
        (Nip(normalize_observations=False), {"env.normalize_observation": False}),
        (CleanRL(anneal_lr=False), {"lr_schedule": "constant"}),
        (CleanRL(clip_coef=0.3, vf_coef=1.0), {"clip_epsilon": 0.3, "critic_coeff": 0.5}),
        (CleanRL(target_kl=0.03), {"target_kl": 0.02}),
        (Sheeprl(algo="ppo", max_grad_norm=0.0), {"max_grad_norm": None}),
        (Sheeprl(algo="ppo", dense_units=32), {"hidden_sizes": [32, 32]}),
        (Sheeprl(algo="ppo", dense_units=8, mlp_layers=3), {"hidden_sizes": [8, 8, 8]}),
        (SB3(policy_kwargs={"net_arch": [32]}), {"hidden_sizes": [32]}),
        (SB3(policy_kwargs={"net_arch": {"pi": [8], "vf": [8]}}), {"hidden_sizes": [8]}),
        (
            SB3(policy_kwargs={"net_arch": {"pi": [8], "vf": [4]}}),
            {"hidden_sizes": [8], "critic_hidden_sizes": [4]},
        ),
        (SB3(policy="MlpPolicy", target_kl=0.1), {"target_kl": 0.1}),
        (Pyrado(algo="ppo", critic=PyradoGAE(lamda=0.5)), {"gae_lambda": 0.5}),
        (Pyrado(algo="a2c", vfcn_coeff=0.8), {"critic_coeff": 0.4}),
        (Pyrado(algo="ppo", std_init=1.0, eps_clip=0.4), {"clip_epsilon": 0.4}),
    ],
    ids=str,
)
def test_map_fields_sets_equivalent_recipe_settings(given, values):
    carried, _ = map_fields(given, Recipe())
    assert carried == pytest.approx(values) if "target_kl" in values else carried == values


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (SB3(algo="sac", n_steps=3, tau=0.1), {"n_step": 3, "tau": 0.1}),
        (Pyrado(algo="sac", tau=0.9, memory_size=50), {"tau": 0.1, "buffer_size": 50}),
        (Tianshou(algo="sac", buffer_size=50, num_train_envs=2), {"buffer_size": 50}),
        (
            Tianshou(algo="dqn", replay_buffer_ignore_obs_next=True),
            {"store_next_observation": False},
        ),
        (
            Tianshou(algo="dqn", replay_buffer_save_only_last_obs=True, replay_buffer_stack_num=4),
            {"stacked_frames": 4},
        ),
        (Tianshou(algo="dqn", replay_buffer_stack_num=4), {"stacked_frames": 4}),
        (Tianshou(algo="dqn", replay_buffer_stack_num=1), {}),
        (CleanRL(algo="sac", gamma=0.5), {"gamma": 0.5}),
    ],
    ids=str,
)
def test_map_fields_sets_replay_and_target_settings(given, values):
    assert map_fields(given, OffPolicyRecipe())[0] == values


def test_tianshou_rejects_last_observation_without_stack():
    with raises_setting("replay_buffer_save_only_last_obs"):
        map_fields(Tianshou(algo="dqn", replay_buffer_save_only_last_obs=True), OffPolicyRecipe())


@pytest.mark.parametrize("deviation", [0.0, -1.0])
def test_map_fields_rejects_non_positive_std_init(deviation):
    with raises_setting("std_init"):
        map_fields(Pyrado(algo="ppo", std_init=deviation), ppo.Config(), "ppo")


PPO_CRITIC = {"critic_epochs": 10, "critic_max_grad_norm": None}
"""Recipe settings that define pyrado's PPO, whose critic has an optimiser of its own."""


def test_pyrado_standardizer_maps_to_running_advantage_norm():
    critic = {"standardizer": "RunningStandardizer"}
    given = Pyrado(algo="ppo", critic=critic, min_steps=9, env_max_steps=9)
    assert map_fields(given, ppo.Config(), "ppo")[0] == PPO_CRITIC | {"advantage_norm": "running"}
    assert "mean and variance of the means of batches" in " ".join(given.notes())
    with raises_setting("critic.standardizer"):
        map_fields(Pyrado(algo="ppo", critic=PyradoGAE(standardizer="Mine")), ppo.Config(), "ppo")


def test_pyrado_sac_has_separate_default_learning_rate():
    assert (Pyrado(algo="sac").resolved().lr, Pyrado(algo="ppo").resolved().lr) == (3e-4, 5e-4)
    assert map_fields(Pyrado(algo="sac", lr=5e-4), sac.Config())[0] == {"learning_rate": 5e-4}
    assert (
        "lr=0.0003 (here learning_rate=0.001)" in map_fields(Pyrado(algo="sac"), sac.Config())[1][0]
    )


def test_pyrado_reward_and_temperature_settings_map_to_sac():
    given = Pyrado(algo="sac", standardize_rew=False, rew_scale=0.1, learn_ent_coeff=False)
    expected = {"standardize_reward": False, "reward_scale": 0.1, "fixed_alpha": True}
    assert map_fields(given, sac.Config())[0] == expected
    assert "standardize_rew=True" in " ".join(map_fields(Pyrado(algo="sac"), sac.Config())[1])


@pytest.mark.parametrize(
    ("given", "whose"),
    [
        (Pyrado(algo="sac", min_rollouts=1, env_max_steps=9, memory_size=500), "the policy"),
        (Pyrado(algo="a2c", max_grad_norm=5.0, min_steps=9, env_max_steps=9), "the policy"),
        (Pyrado(algo="ppo2", max_grad_norm=5.0, min_steps=9, env_max_steps=9), "each network"),
    ],
    ids=["sac", "a2c", "ppo2"],
)
def test_pyrado_notes_name_networks_with_clipped_gradients(given, whose):
    assert f"max_grad_norm=5 clips the gradients of {whose} alone" in " ".join(given.notes())


def test_pyrado_ppo_clips_policy_and_critic_separately():
    both = Pyrado(algo="ppo", max_grad_norm=1.0, critic=PyradoGAE(max_grad_norm=6.0))
    norms = {"max_grad_norm": 1.0, "critic_max_grad_norm": 6.0}
    assert map_fields(both, ppo.Config(), "ppo")[0] == PPO_CRITIC | norms
    assert map_fields(Pyrado(algo="dql", max_grad_norm=1.0), dqn.Config())[0] == {
        "max_grad_norm": 1.0
    }
    alone = map_fields(Pyrado(algo="ppo", max_grad_norm=1.0), ppo.Config(), "ppo")[0]
    assert alone == PPO_CRITIC | {"max_grad_norm": 1.0}
    unused = Pyrado(algo="a2c", critic=PyradoGAE(max_grad_norm=1.0))
    values, (line, *_) = map_fields(unused, a2c.Config(), "a2c")
    assert values == {}
    assert line == "accepted without effect: critic.max_grad_norm=1.0 (a2c does not use it)"


def test_sheeprl_a2c_max_grad_norm_is_divided_by_batch_size():
    given = Sheeprl(algo="a2c", max_grad_norm=4.0, num_envs=2, rollout_steps=5)
    assert map_fields(given, a2c.Config(), "a2c")[0]["max_grad_norm"] == 0.4
    assert map_fields(Sheeprl(algo="ppo", max_grad_norm=4.0), ppo.Config(), "ppo")[0] == {
        "max_grad_norm": 4.0
    }


def test_sb3_ppo_rejects_clip_range_vf():
    with raises_setting("clip_range_vf"):
        map_fields(SB3(algo="ppo", clip_range_vf=0.3), ppo.Config(), "ppo")


@pytest.mark.parametrize("version", ["0.5.7", "0.5.0"])
def test_map_fields_rejects_clip_vloss_of_old_sheeprl(version):
    with raises_setting("clip_vloss"):
        map_fields(Sheeprl(algo="ppo", clip_vloss=True, version=version), ppo.Config(), "ppo")
    given = Sheeprl(algo="ppo", clip_vloss=True)
    assert map_fields(given, ppo.Config(), "ppo")[0] == {"clip_value": True}


def test_pyrado_epsilon_maps_to_dqn():
    given = Pyrado(algo="dql", eps_init=0.5, eps_schedule_gamma=0.99)
    falls = {"epsilon_start": 0.5, "epsilon_decay": 0.99, "epsilon_end": 0.05}
    assert map_fields(given, dqn.Config())[0] == falls
    assert given.algorithm_for("dqn", "off_policy") == "dql"
    constant = Pyrado(algo="dql", eps_schedule_gamma=1.0)
    assert map_fields(constant, dqn.Config())[0] == {"epsilon_decay": 1.0, "epsilon_end": 1.0}


def test_pyrado_epsilon_schedule_matches_library():
    """Values of ``EpsGreedyExplStrat`` as its sampler saw them: the first iteration is random."""
    given = Pyrado(algo="dql", eps_schedule_gamma=0.5, memory_size=40, num_init_memory_steps=20,
                   num_updates_per_step=1, batch_size=8, min_rollouts=1, max_iter=6,
                   env_max_steps=20, eval_intvl=100)  # fmt: skip
    trainer = dqn.build(dqn.Config(steps=given, log_dir=None, progress=False))
    (hook,) = [h for n, h in trainer.registered_modules.items() if n == "anneal_exploration"]
    seen = [value.schedule(count) for value in hook.values for count in range(1, 6)]
    assert seen == pytest.approx([1.0, 0.525, 0.2875, 0.16875, 0.109375])


def test_sb3_and_cleanrl_noise_maps_without_rescaling():
    given = SB3(algo="td3", target_policy_noise=0.3, noise_type="normal", noise_std=0.25)
    assert map_fields(given, td3.Config(), "td3")[0] == {
        "policy_noise": 0.3,
        "noise_type": "normal",
        "exploration_noise": 0.25,
    }
    given = CleanRL(algo="td3", policy_noise=0.3, exploration_noise=0.25, noise_clip=0.4)
    values = {"policy_noise": 0.3, "exploration_noise": 0.25, "noise_clip": 0.4}
    assert map_fields(given, td3.Config(), "td3")[0] == values
    assert map_fields(CleanRL(algo="ddpg", exploration_noise=0.25), ddpg.Config(), "ddpg")[0] == {
        "exploration_noise": 0.25
    }
    given = SB3(algo="td3", noise_type="ornstein-uhlenbeck")
    assert map_fields(given, td3.Config(), "td3")[0] == {"noise_type": "ou"}


def test_epsilon_and_target_interval_map_to_dqn_gradient_steps():
    given = SB3(exploration_fraction=0.5, exploration_final_eps=0.1, target_update_interval=1000)
    values = map_fields(given, dqn.Config(), "dqn")[0]
    assert values == {"exploration_share": 0.5, "epsilon_end": 0.1, "target_update_every": 250}
    values = map_fields(CleanRL(target_network_frequency=200), dqn.Config(), "dqn")[0]
    assert values == {"target_update_every": 20}
    rounded = SB3(algo="dqn", target_update_interval=10)  # 2.5 gradient steps
    assert map_fields(rounded, dqn.Config(), "dqn")[0] == {"target_update_every": 2}
    assert "update the targets after every 2" in " ".join(rounded.notes())


@pytest.mark.parametrize(
    ("given", "every"),
    [
        ({"train_freq": 4, "gradient_steps": -1}, 400),
        ({"train_freq": 4, "gradient_steps": 0}, 400),  # it never trains
        ({"train_freq": (1, "episode"), "gradient_steps": -1}, 400),
        ({"train_freq": (1, "episode"), "gradient_steps": 50}, 100),
        ({"train_freq": (2, "episode"), "gradient_steps": 50}, 50),
        ({"train_freq": 1, "n_envs": 3, "gradient_steps": 3}, 399),  # 133 vector steps
    ],
)
def test_sb3_dqn_target_interval_maps_to_gradient_steps(given, every):
    given = SB3(algo="dqn", episode_length=200, target_update_interval=400, **given)
    assert map_fields(given, dqn.Config(), "dqn")[0] == {"target_update_every": every}


def test_target_updates_between_trainings_are_merged():
    steps = {"train_freq": (1, "episode"), "episode_length": 200, "gradient_steps": 50}
    for interval, given, every in (1, steps, 50), (199, steps, 50), (2, {"gradient_steps": 4}, 4):
        given = SB3(algo="dqn", target_update_interval=interval, **given)
        assert map_fields(given, dqn.Config(), "dqn")[0] == {"target_update_every": every}
    soft = SB3(algo="dqn", target_update_interval=1, gradient_steps=4, tau=0.5)
    assert map_fields(soft, dqn.Config(), "dqn")[0] == {"target_update_every": 1, "tau": 0.5}
    assert "come before all gradient steps of the rollout" in " ".join(soft.notes())


@pytest.mark.parametrize(
    ("steps", "interval", "every"), [(4, 2, 2), (4, 9, 4), (-1, 5, 5), (-1, 12, 10)]
)
def test_sb3_sac_target_interval_restarts_each_rollout(steps, interval, every):
    given = SB3(algo="sac", train_freq=10, gradient_steps=steps, target_update_interval=interval)
    assert map_fields(given, dqn.Config(), "sac")[0] == {"target_update_every": every}
    assert "restarts in each call to train()" in " ".join(given.notes())


def test_sb3_sac_rejects_target_interval_not_dividing_rollout():
    given = SB3(algo="sac", train_freq=10, gradient_steps=-1, target_update_interval=4)
    with raises_setting("target_update_interval"):
        map_fields(given, dqn.Config(), "sac")


@pytest.mark.parametrize(("steps", "interval"), [(1, 2), (7, 1)])
def test_sb3_sac_needs_no_setting_for_one_update_per_step(steps, interval):
    given = SB3(algo="sac", gradient_steps=steps, target_update_interval=interval)
    assert map_fields(given, sac.Config(), "sac")[0] == {}


def test_sb3_target_interval_requires_episode_length():
    episodes = {"train_freq": (1, "episode"), "target_update_interval": 400}
    given = SB3(algo="dqn", **episodes, gradient_steps=-1)
    assert map_fields(given, dqn.Config(), "dqn")[0] == {"target_update_every": 400}
    given = SB3(algo="dqn", **episodes, gradient_steps=9)
    with raises_setting("episode_length"):
        map_fields(given, dqn.Config(), "dqn")


def test_map_fields_omits_fields_that_count_in_ppo():
    assert map_fields(Tianshou(algo="ppo", buffer_size=50), Recipe())[0] == {}
    assert map_fields(SB3(algo="ppo", n_steps=3), Recipe())[0] == {}


def test_apply_to_config_sets_and_reports_settings():
    recipe = Recipe()
    lines = apply_to_config(Nip(lr=0.5, normalize_observations=False), recipe, "ppo", "on_policy")
    assert (recipe.learning_rate, recipe.env.normalize_observation) == (0.5, False)
    assert lines[0] == "set from nip: learning_rate=0.5, env.normalize_observation=False"
    assert apply_to_config(Nip(lr=0.5, normalize_observations=False), recipe, "ppo")[0] == lines[0]


def test_apply_to_config_reports_algorithm_used_for_counts():
    told = "sb3 does not have this algorithm, so counts follow its sac"
    assert apply_to_config(SB3(), crossq.Config(), "crossq", "off_policy")[0] == told
    for steps, config in (SB3(), sac.Config()), (Dreamer(), crossq.Config()):
        lines = apply_to_config(
            steps, config, "sac" if steps.NAME == "sb3" else "crossq", "off_policy"
        )
        assert not any("does not have this algorithm" in line for line in lines)


def test_apply_to_config_reports_unapplied_library_defaults():
    line, implicit, hint = apply_to_config(Nip(), Recipe(), "ppo")
    assert implicit == "fixed in nip, but different here: critic_coeff=1.0 (here 0.5)"
    assert hint == "(steps.library_defaults=true applies these values of nip)"
    assert line.startswith(
        "defaults of nip that were not applied: lr=0.003 (here learning_rate=0.001)"
    )
    assert "gamma=0.9 (here gamma=0.99)" in line
    assert "lmbda" not in line  # the same in both
    assert Recipe().critic_coeff == 0.5
    line, *_ = apply_to_config(CleanRL(), Recipe(), "ppo")
    assert "vf_coef=0.5 (equals critic_coeff=0.25, here 0.5)" in line


def test_native_settings_produce_no_report():
    assert apply_to_config({"total_policy_steps": 10}, Recipe(), "ppo") == []
    assert caveats({"total_policy_steps": 10}, "ppo") == []


def test_caveats_return_notes_of_settings():
    (note,) = caveats(SB3(n_steps=128, total_timesteps=2_048), "ppo", "on_policy")
    assert note == "sb3: n_steps=128 is per environment: a rollout has 128 timesteps."


def test_many_caveats_are_summarized_by_command(capsys):
    (line,) = caveats(Nip(steps_per_env_per_iteration=100, lr=0.5), "ppo", "on_policy")
    count, words = re.fullmatch(
        r"\((\d+) caveats of these settings: kit steps (.*)\)", line
    ).groups()
    assert command.main(shlex.split(words)) == 0
    shown = capsys.readouterr().out
    assert "steps_per_env_per_iteration=100 lr=0.5" in shown
    assert shown.partition("Caveats\n")[2].count("\n- ") + 1 == int(count)


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Nip(body_lr_factor={"actor": 0.5}), "body_lr_factor.actor"),
        (Nip(clip_value=0.5), "clip_value"),
        (SB3(policy="CnnPolicy"), "policy"),
        (SB3(policy_kwargs={"net_arch": {"pi": [8]}}), "policy_kwargs"),
        (SB3(algo="ppo", policy_kwargs={"net_arch": {"pi": [8], "qf": [8]}}), "policy_kwargs"),
        (SB3(algo="sac", policy_kwargs={"net_arch": {"pi": [8], "vf": [8]}}), "policy_kwargs"),
        (
            SB3(algo="dqn", policy_kwargs={"net_arch": {"pi": [8], "qf": [8]}}),
            "policy_kwargs",
        ),
        (SB3(policy_kwargs={"net_arch": 8}), "policy_kwargs"),
        (SB3(policy_kwargs={"net_arch": None}), "policy_kwargs"),
        (SB3(use_sde=True, algo="ppo"), "use_sde"),
        (SB3(callback="module.Callback", algo="ppo"), "callback"),
        (Tianshou(stop_rew=3.0), "stop_rew"),
        (
            Pyrado(algo="ppo", critic=PyradoGAE(num_epoch=3)),
            "critic.num_epoch",
        ),
    ],
)
def test_map_fields_rejects_unsupported_fields_by_name(given, message):
    with raises_setting(message):
        map_fields(given, Recipe())


@pytest.mark.parametrize(
    ("given", "fixed"),
    [
        (SB3(algo="sac", ent_coef=0.1), {"fixed_alpha": True}),
        (SB3(algo="sac", ent_coef="auto_0.1"), {}),
        (CleanRL(algo="sac", alpha=0.1, autotune=False), {"fixed_alpha": True}),
        (Pyrado(algo="sac", ent_coeff_init=0.1, learn_ent_coeff=False), {"fixed_alpha": True}),
        (Pyrado(algo="sac", ent_coeff_init=0.1), {}),
    ],
)
def test_entropy_coefficient_is_fixed_or_trained_as_in_library(given, fixed):
    assert map_fields(given, sac.Config())[0] == {"initial_alpha": 0.1, **fixed}


def test_map_fields_rejects_ineffective_entropy_coefficient():
    with raises_setting("alpha"):
        map_fields(CleanRL(algo="sac", alpha=0.1), sac.Config())


def test_pyrado_critic_settings_map_to_ppo():
    given = Pyrado(algo="ppo", critic=PyradoGAE(num_epoch=3, batch_size=32, lr=1e-4))
    expected = {"critic_epochs": 3, "critic_minibatch_size": 32, "critic_learning_rate": 1e-4}
    assert map_fields(given, ppo.Config())[0] == PPO_CRITIC | expected
    assert map_fields(Pyrado(algo="a2c", critic=PyradoGAE(num_epoch=3)), a2c.Config())[0] == {}
    both = Pyrado(algo="ppo2", critic=PyradoGAE(standardize_adv=False))  # which ppo2 sets to true
    values = {"normalize_advantage": True, "clip_value": True}
    assert map_fields(both, ppo.Config())[0] == values


def test_map_fields_rejects_conflicting_recipe_setting():
    with raises_setting("lr"):
        map_fields(Nip(lr=0.5), Recipe(learning_rate=0.1))
    assert map_fields(Nip(lr=0.5), Recipe(learning_rate=0.5))[0] == {"learning_rate": 0.5}


# ---------------------------------------------------------------------- tables against recipes
def test_docs_list_ignored_and_refused_fields():
    page = (Path(__file__).parents[2] / "docs" / "translate.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^### Fields that are .*?\n\|---.*?\n(.*?)\n\n", page, re.M | re.S)
    documented = [
        tuple(cell.strip("|` ") for cell in row.split(" | ")) for row in table.splitlines()
    ]
    uses = [(name, *row) for name in DIALECTS for row in use_of(dialect(name))]
    assert documented == [row for row in uses if row[2] in ("ignored", "refused")]


@pytest.mark.parametrize("recipe", [ppo, sac, dqn], ids=["ppo", "sac", "dqn"])
def test_dialect_defaults_do_not_change_recipe_config(recipe):
    family = recipe.Config.FAMILY
    for name in [n for n in DIALECTS if family in dialect(n).ALGORITHMS.values()]:
        config = recipe.Config()
        apply_to_config(dialect(name)(), config, recipe.__name__.rpartition(".")[2], family)
        fixed = PPO_CRITIC if (name, recipe) == ("pyrado", ppo) else {}
        assert config == dataclasses.replace(recipe.Config(), **fixed)


# ---------------------------------------------------------------------- what has no word there
def lines_of(given, config, algo) -> str:
    return " ".join(map_fields(given, config, algo)[1])


def test_report_lists_differing_settings_without_library_field():
    told = lines_of(CleanRL(algo="dqn"), dqn.Config(), "dqn")
    for name in (
        "n_step=1 (here 3)",
        "max_grad_norm=None (here 10.0)",
        "lr_schedule=constant (here",
    ):
        assert name in told
    told = lines_of(SB3(algo="ppo", learning_rate=1e-3), ppo.Config(), "ppo")
    assert "env.normalize_observation=False (here True)" in told
    assert "lr_schedule=constant (here linear)" in told
    told = lines_of(CleanRL(algo="ppo_continuous_action"), ppo.Config(), "ppo_continuous_action")
    assert "normalize" not in told  # it normalises, too


NOT_NORMALISED = {"env.normalize_observation": False, "env.normalize_reward": False}


@pytest.mark.parametrize(
    ("given", "recipe", "taken"),
    [
        (Nip(), ppo, {"env.normalize_reward": False, "critic_coeff": 1.0, "entropy_coeff": 0.001}),
        (Sheeprl(algo="ppo"), ppo, NOT_NORMALISED),
        (
            Sheeprl(algo="a2c"),
            a2c,
            {"env.normalize_observation": False, "normalize_advantage": False},
        ),
    ],
)
def test_implicit_values_are_reported_and_applied_on_request(given, recipe, taken):
    algo = recipe.__name__.rpartition(".")[2]
    told = lines_of(given, recipe.Config(), algo).partition("but different here: ")[2]
    assert told.count("(here") == len(taken)
    assert all(f"{name}={value} (here" in told for name, value in taken.items())
    given.library_defaults = True
    assert taken.items() <= map_fields(given, recipe.Config(), algo)[0].items()


@pytest.mark.parametrize(
    ("given", "recipe", "told"),
    [
        (Pyrado(algo="ppo"), ppo, {"advantage_norm": "batch", "entropy_coeff": 0.0}),
        (Pyrado(algo="ppo2"), ppo, {"advantage_norm": "batch", "lr_schedule": "constant"}),
        (Pyrado(algo="a2c"), a2c, {"optimizer": "rmsprop", "env.normalize_observation": False}),
        (Pyrado(algo="dql"), dqn, {"double_dqn": False, "tau": 1.0}),
    ],
)
def test_pyrado_implicit_values_are_reported_when_different(given, recipe, told):
    config = recipe.Config()
    if recipe is ppo:
        config.entropy_coeff = 0.5
    if recipe is a2c:
        config.optimizer = "adam"
    lines = lines_of(given, config, given.algo)
    assert all(f"{name}={value} (here" in lines for name, value in told.items())


def test_library_defaults_are_applied_when_requested():
    config = dqn.Config(hidden_sizes=[32])
    values, lines = map_fields(CleanRL(algo="dqn", library_defaults=True), config, "dqn")
    assert values == {
        "n_step": 1, "max_grad_norm": None, "lr_schedule": "constant", "double_dqn": False,
        "learning_rate": 2.5e-4, "tau": 1.0, "buffer_size": 10_000, "target_update_every": 50,
        "epsilon_end": 0.05, "exploration_share": 0.5,
    }  # fmt: skip
    # What was changed stays, and is listed.
    assert any("hidden_sizes=[120, 84] (here [32])" in line for line in lines)
    typed = dqn.Config(double_dqn=True)  # the recipe's default
    assert (
        "double_dqn" not in map_fields(CleanRL(algo="dqn", library_defaults=True), typed, "dqn")[0]
    )


def test_apply_to_config_rejects_defaults_of_missing_algorithm():
    config = rainbow.Config()
    assert (
        len(apply_to_config(SB3(), config, "rainbow", "off_policy")) == 1
    )  # whose counts are taken
    with raises_setting("library_defaults"):
        apply_to_config(SB3(library_defaults=True), config, "rainbow", "off_policy")
    apply_to_config(SB3(algo="dqn", library_defaults=True), config, "rainbow", "off_policy")
    assert config.tau == 1.0


@pytest.mark.parametrize("library", [SB3, CleanRL])
@pytest.mark.parametrize(("algo", "recipe"), [("ppo", ppo_pixels), ("dqn", dqn_pixels)])
def test_pixel_recipes_keep_network_settings(library, algo, recipe):
    told = lines_of(library(algo=algo), recipe.Config(), algo)
    assert "normalize_reward=False" in told or "double_dqn=False" in told
    assert "hidden_sizes" not in told
    assert "activation" not in told
    given = library(algo=algo, library_defaults=True)
    assert not map_fields(given, recipe.Config(), algo)[0].keys() & {"hidden_sizes", "activation"}


def test_tianshou_defaults_do_not_set_stacked_frames():
    given = Tianshou(algo="dqn", library_defaults=True)
    values, lines = map_fields(given, dqn_pixels.Config(), "dqn")
    assert "buffer_size" in values
    assert "stacked_frames" not in values
    assert not any("stacked_frames" in line for line in lines)


@pytest.mark.parametrize("rate", ["lin_1e-3", "lin_0.001"])
def test_zoo_linear_schedules_map_to_recipe(rate):
    given = SB3(algo="ppo", learning_rate=rate, clip_range="lin_0.3")
    assert map_fields(given, ppo.Config(), "ppo")[0] == {
        "learning_rate": 1e-3, "lr_schedule": "linear",
        "clip_epsilon": 0.3, "clip_schedule": "linear",
    }  # fmt: skip
    with raises_setting("learning_rate"):
        map_fields(SB3(algo="ppo", learning_rate="exp_1"), ppo.Config(), "ppo")
    falling = map_fields(SB3(algo="sac", learning_rate="lin_2e-3"), sac.Config(), "sac")[0]
    assert falling == {"learning_rate": 2e-3, "lr_schedule": "linear"}


# ---------------------------------------------------------------------- the algorithm that is named
@pytest.mark.parametrize(
    ("given", "recipe"),
    [
        (SB3(algo="a2c", n_envs=2, total_timesteps=100), ppo),
        (Sheeprl(algo="droq", num_envs=2, total_steps=140), sac),
        (Tianshou(algo="sac"), ppo),
    ],
)
def test_recipe_rejects_algorithm_of_other_recipe(given, recipe):
    with raises_setting("algo"):
        recipe.build(recipe.Config(steps=given, log_dir=None))


def test_recipe_accepts_variant_of_its_algorithm():
    plan = Pyrado(algo="ppo2", min_rollouts=2, max_iter=3).to_plan()
    trainer = ppo.build(
        ppo.Config(steps=Pyrado(algo="ppo2", min_rollouts=2, max_iter=3), log_dir=None)
    )
    assert trainer.plan.minibatch_size == plan.minibatch_size == 32
    config = ppo.Config(steps=Pyrado(algo="ppo2", vfcn_coeff=0.7), log_dir=None, progress=False)
    apply_to_config(config.steps, config, "ppo", "on_policy")
    assert config.critic_coeff == 0.35  # of a mean of squares, not of half of it


# ---------------------------------------------------------------------- fields one by one
def test_sheeprl_a2c_ignores_anneal_lr():
    given = {"algo": "a2c", "anneal_lr": True}
    assert map_fields(Sheeprl(**given), a2c.Config(), "a2c")[0] == {"lr_schedule": "constant"}


@pytest.mark.parametrize(
    ("given", "capacity"),
    [
        (SB3(algo="sac", buffer_size=31, n_envs=4), 28),
        (SB3(algo="sac", buffer_size=3, n_envs=4), 4),
        (CleanRL(algo="td3", buffer_size=31, num_envs=4), 28),
        (Sheeprl(algo="sac", buffer_size=31, num_envs=4), 28),
        (Sheeprl(algo="sac", buffer_size=31, num_envs=2, world_size=3), 10),
    ],
)
def test_buffer_size_is_rounded_down_per_env(given, capacity):
    assert map_fields(given, sac.Config())[0]["buffer_size"] == capacity


def test_tianshou_buffer_size_is_rounded_up_per_env():
    given = Tianshou(algo="sac", num_train_envs=3, buffer_size=10)
    assert map_fields(given, OffPolicyRecipe(), "sac")[0]["buffer_size"] == 12


def test_translation_reports_differing_non_counting_settings():
    made = translate(SB3(algo="ppo", learning_rate=1e-3), CleanRL)
    assert made.differences == []
    assert made.other_settings() == {
        "lr_schedule": ("constant", "linear"), "entropy_coeff": (0.0, 0.01),
        "critic_coeff": (0.5, 0.25), "learning_rate": (1e-3, 2.5e-4),
    }  # fmt: skip
    assert made.left_out == {"learning_rate": 1e-3}
    assert "- lr_schedule: constant / linear" in made.text()
    # At the default of the source, typed or not.
    nip = Nip(gamma=0.9, steps_per_env_per_iteration=100)
    assert translate(nip, CleanRL).other_settings()["gamma"] == (0.9, 0.99)


def test_sheeprl_clip_and_entropy_schedules_map_to_ppo():
    given = Sheeprl(algo="ppo", anneal_clip_coef=True, anneal_ent_coef=True)
    assert map_fields(given, ppo.Config())[0] == {
        "clip_schedule": "linear",
        "entropy_schedule": "linear",
    }
