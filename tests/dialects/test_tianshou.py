"""tianshou: epochs of whole collections, ratios rounded half to even, tests after each epoch."""

from __future__ import annotations

import os
from dataclasses import fields

import pytest

from kit.dialects import Tianshou, Tianshou2
from kit.dialects.carried import map_fields
from recipes import dqn, ppo
from tests.errors import raises_setting

SAMPLING_CONFIG = {
    "num_epochs": 100,
    "step_per_epoch": 30000,
    "batch_size": 64,
    "num_train_envs": -1,
    "train_seed": 42,
    "num_test_envs": 1,
    "num_test_episodes": 1,
    "buffer_size": 4096,
    "step_per_collect": 2048,
    "repeat_per_collect": 1,
    "update_per_step": 1.0,
    "start_timesteps": 0,
    "start_timesteps_random": False,
    "replay_buffer_ignore_obs_next": False,
    "replay_buffer_save_only_last_obs": False,
    "replay_buffer_stack_num": 1,
}


def test_tianshou_fields_match_sampling_config():
    own = {f.name: f.default for f in fields(Tianshou) if not f.kw_only}
    assert own == SAMPLING_CONFIG


def test_num_train_envs_defaults_to_cpu_count():
    assert Tianshou().num_train_envs == os.cpu_count()
    assert Tianshou(num_train_envs=8).test_seed == 42 + 8


def test_to_plan_rejects_update_per_step_rounding_to_zero():
    with raises_setting("update_per_step") as error:
        Tianshou(algo="dqn", num_train_envs=8, step_per_collect=8, update_per_step=0.0625).to_plan()
    (works,) = error.value.works
    plan = Tianshou(algo="dqn", num_train_envs=8, step_per_collect=8, update_per_step=works)
    assert plan.to_plan().gradient_steps(1) == 1


def test_zero_epochs_run_one_epoch_only_in_version_1():
    assert Tianshou(algo="sac", num_epochs=0, num_train_envs=1).to_plan().iterations == 15
    assert Tianshou2(algo="sac", max_epochs=0, num_training_envs=1).to_plan().iterations == 0


def test_version_2_rejects_collection_step_num_episodes():
    with raises_setting("collection_step_num_episodes"):
        Tianshou2(algo="dqn", collection_step_num_episodes=3).to_plan()


def test_version_2_rejects_zero_test_episodes():
    with raises_setting("test_step_num_episodes"):
        Tianshou2(algo="sac", test_step_num_episodes=0).to_plan()


def test_version_2_null_batch_size_uses_complete_buffer():
    assert Tianshou2(algo="dqn", batch_size=None).to_plan().minibatch_size is None


@pytest.mark.parametrize(
    ("spelled", "family"),
    [
        ("DiscreteSAC", "off_policy"),
        ("PG", "on_policy"),
        ("TRPO", "on_policy"),
        ("TD3BC", "offline"),
    ],
)
def test_family_is_inferred_from_class_name(spelled, family):
    assert Tianshou(algo=spelled).family == family


def test_default_test_episodes_equal_num_test_envs():
    plan = Tianshou2(algo="sac", num_test_envs=5, num_training_envs=1).to_plan()
    assert plan.evaluation_episodes == 5


def test_offline_epoch_counts_gradient_steps():
    plan = Tianshou(algo="offline", num_epochs=3, step_per_epoch=10, batch_size=8).to_plan()
    assert plan.gradient_steps_after(plan.iterations) == 30
    assert plan.total_policy_steps == 0


def test_stop_rew_must_be_number():
    with raises_setting("stop_rew"):
        Tianshou(stop_rew="many").to_plan()
    told = " ".join(Tianshou(stop_rew=3.0).notes())
    assert "stop_rew=3 ends the run" in told
    assert "An initial test that reaches stop_rew ends" in told


def test_run_lists_field_unused_by_algorithm():
    settings = Tianshou(update_per_step=0.5, num_train_envs=1)
    _, lines = map_fields(settings, ppo.Config(), "ppo")
    assert lines[0] == "accepted without effect: update_per_step=0.5 (ppo does not use it)"
    assert settings.to_plan("sac").gradient_steps(1) == 1024
    assert "update_per_step" not in Tianshou.counting_fields("ppo")
    assert "repeat_per_collect" not in Tianshou.counting_fields("off_policy")


SCHEDULED = {"num_epochs": 1, "step_per_epoch": 48, "step_per_collect": 10}


@pytest.mark.parametrize(
    ("given", "note"),
    [
        (  # step_per_collect is planned with, but 12 steps are collected
            Tianshou(algo="ppo", **SCHEDULED, num_train_envs=4),
            "planned for 5 training steps, but 4 are made. It ends at 0.2 of",
        ),
        (
            Tianshou2(
                algo="sac", epoch_num_steps=48, max_epochs=1, collection_step_num_env_steps=10,
                num_training_envs=5,
            ),
            "planned for 5 gradient steps, but 50 are made. It becomes negative after 5",
        ),
        (
            Tianshou(algo="sac", **SCHEDULED, num_train_envs=5, update_per_step=0.1),
            None,  # one gradient step each training step
        ),
        (Tianshou(algo="ppo", **SCHEDULED, num_train_envs=5), None),
    ],
)  # fmt: skip
def test_notes_report_linear_learning_rate_not_ending_at_zero(given, note):
    told = [text for text in given.notes() if "linear learning rate" in text]
    assert len(told) == (note is not None)
    assert not told or note in told[0]


@pytest.mark.parametrize("algo", ["dqn", "sac"])
def test_dqn_notes_mention_squared_loss(algo):
    told = "mean of squared errors" in " ".join(Tianshou(algo=algo).notes())
    assert told == (algo == "dqn")


def test_version_2_round_trips_zero_update_repetitions():
    plan = Tianshou2(algo="ppo", num_training_envs=2, update_step_num_repetitions=0).to_plan()
    assert Tianshou2.from_plan(plan).update_step_num_repetitions == 0
    assert Tianshou2.from_plan(plan).to_plan() == plan


# ---------------------------------------------------------------------- recipes
@pytest.mark.parametrize(
    ("name", "algo"),
    [
        ("mujoco_sac", "sac"),
        ("mujoco_reinforce", "reinforce"),
        ("atari_iqn", "iqn"),
        ("atari_sac", "discrete_sac"),
        ("discrete_dqn", "dqn"),
    ],
)
def test_names_of_example_scripts_select_algorithm(name, algo):
    assert Tianshou(algo=name).resolved().algo == algo


def test_algorithm_without_recipe_runs_with_recipe_of_its_family():
    settings = Tianshou(algo="iqn", num_train_envs=1)
    assert settings.algorithm_for("dqn", "off_policy") == "iqn"
    assert "There is no recipe for iqn" in " ".join(settings.notes())
    with raises_setting("algo"):
        settings.algorithm_for("ppo", "on_policy")


def test_test_seed_sets_evaluation_seed():
    settings = Tianshou(algo="dqn", train_seed=7, num_train_envs=3)
    assert map_fields(settings, dqn.Config(), "dqn")[0] == {"seed": 7, "evaluation_seed": 10}
    with_defaults = Tianshou(algo="dqn", num_train_envs=3, library_defaults=True)
    assert map_fields(with_defaults, dqn.Config(), "dqn")[0]["evaluation_seed"] == 45


EXAMPLE = {"num_epochs": 1, "step_per_epoch": 40, "step_per_collect": 20, "num_train_envs": 2}


def test_on_policy_run_lists_settings_without_effect():
    stored = {"replay_buffer_stack_num": 4, "replay_buffer_save_only_last_obs": True}
    settings = Tianshou(algo="ppo", **EXAMPLE, num_test_envs=5, **stored)
    values, lines = map_fields(settings, ppo.Config(), "ppo")
    assert values == {}
    for name in ("num_test_envs", *stored):
        assert f"{name}=" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize(("n_step", "frames"), [(1, 4), (3, 1)])
def test_stack_num_stacks_observations_of_environment(n_step, frames):
    settings = Tianshou(
        algo="dqn", **EXAMPLE, batch_size=4, train_seed=7, replay_buffer_stack_num=4
    )
    config = dqn.Config(steps=settings, n_step=n_step, log_dir=None, progress=False)
    trainer = dqn.build(config)
    for env in (trainer.collector.env, trainer.evaluate.env):
        assert [leaf.shape for leaf in env.observation_leaves] == [(4, 4)]
    assert trainer.evaluate.seed == 9
    ledger = trainer.run()
    assert (ledger.policy_steps, ledger.gradient_steps) == (40, 40)
    assert getattr(trainer.buffer.buffer.storage, "frames", 1) == frames


def test_pprints_returns_one_line_per_setting():
    text = Tianshou(num_train_envs=8).pprints()
    assert text.startswith("Tianshou[\n    ")
    assert "    num_train_envs=8, \n" in text
    assert text.count("\n") == len(SAMPLING_CONFIG)
