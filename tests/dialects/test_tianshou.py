"""tianshou: epochs of whole collections, ratios rounded half to even, tests after each epoch."""

from __future__ import annotations

import os
from dataclasses import fields

import pytest

from kit.dialects import Tianshou, Tianshou2
from kit.dialects.carried import map_fields
from recipes.ppo import Config
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
    _, lines = map_fields(settings, Config(), "ppo")
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
