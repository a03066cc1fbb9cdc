"""What users of other libraries type is understood, or answered with what to type instead."""

from __future__ import annotations

import pytest

from kit.dialects import SB3, CleanRL, Sheeprl, Tianshou, Tianshou2, TorchRL
from kit.dialects.files import make, settings_of
from tests.errors import raises_setting


@pytest.mark.parametrize("spelt", ["1,episode", "(1, 'episode')", [1, "episode"], (1, "episode")])
def test_sb3_train_freq_accepts_all_pair_spellings(spelt):
    plan = SB3(algo="sac", train_freq=spelt, episode_length=10, total_timesteps=100).to_plan()
    assert plan.min_episodes == 1
    assert SB3(algo="sac", train_freq="4,step").to_plan().steps_per_env == 4


@pytest.mark.parametrize("spelt", ["1,day", "many", "x,step", ""])
def test_sb3_rejects_invalid_train_freq(spelt):
    with raises_setting("train_freq"):
        SB3(algo="sac", train_freq=spelt).to_plan()


def test_sb3_accepts_policy_name():
    made = make(SB3, settings_of(["policy=MlpPolicy", "n_envs=4"]))
    assert (made.policy, made.n_envs) == ("MlpPolicy", 4)


def test_cleanrl_accepts_hyphenated_names():
    assert make(CleanRL, settings_of(["num-envs=4", "--num-steps=16"])).num_steps == 16
    assert CleanRL.from_settings({"num-envs": 4}).num_envs == 4
    with raises_setting("num_evns"):
        CleanRL.from_settings({"num-evns": 4})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("num_epochs", "max_epochs"),
        ("step_per_epoch", "epoch_num_steps"),
        ("num_train_envs", "num_training_envs"),
        ("num_test_episodes", "test_step_num_episodes"),
        ("step_per_collect", "collection_step_num_env_steps"),
        ("repeat_per_collect", "update_step_num_repetitions"),
        ("update_per_step", "update_step_num_gradient_steps_per_sample"),
    ],
)
def test_tianshou_rejects_names_of_other_version(old, new):
    with raises_setting(old):
        Tianshou2.from_settings({old: 3})
    with raises_setting(new):
        make(Tianshou, {new: 3})


def test_torchrl_ppo_defaults_to_epochs_over_batch():
    settings = {"frames_per_batch": 12, "total_frames": 24, "batch_size": 4, "num_epochs": 2}
    plan = TorchRL(algo="ppo", **settings).to_plan()
    assert plan.minibatch_sizes(1) == [4] * 6
    named = TorchRL(algo="ppo", **settings, sampler="without_replacement", iterate=True)
    assert plan == named.to_plan()


def test_torchrl_named_sampler_requires_optim_steps_per_batch():
    with raises_setting("optim_steps_per_batch"):
        TorchRL(algo="ppo", sampler="without_replacement").to_plan()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"train_every": 5},
            "train_every",
        ),
        ({"per_rank_gradient_steps": 2}, "per_rank_gradient_steps"),
        ({"replay_ratio": 1.0, "version": "0.5.0"}, "replay_ratio"),
    ],
)
def test_sheeprl_rejects_settings_of_other_version(settings, message):
    with raises_setting(message):
        Sheeprl(algo="dreamer_v3", **settings).to_plan()


@pytest.mark.parametrize(("algo", "trains"), [("dreamer_v2", 1), ("dreamer_v3", 0)])
def test_sheeprl_0_5_0_dry_run_trains_dreamer_v2_but_not_v3(algo, trains):
    dry = {"version": "0.5.0", "train_every": 100, "dry_run": True, "per_rank_sequence_length": 1}
    plan = Sheeprl(algo=algo, **dry).to_plan()
    assert (plan.iterations, plan.gradient_steps(1)) == (1, trains)


def test_sheeprl_0_5_0_dreamer_v1_trains_without_pretraining():
    settings = {"version": "0.5.0", "num_envs": 1, "learning_starts": 10, "train_every": 10}
    settings |= {"per_rank_gradient_steps": 2, "total_steps": 31, "per_rank_sequence_length": 4}
    first = Sheeprl(algo="dreamer_v1", **settings).to_plan()
    third = Sheeprl(algo="dreamer_v3", **settings, per_rank_pretrain_steps=7).to_plan()
    assert first.random_steps == third.random_steps == 10
    assert [first.gradient_steps(k) for k in (10, 11, 21, 31)] == [0, 2, 2, 2]
    assert [third.gradient_steps(k) for k in (10, 11, 20, 30)] == [7, 0, 2, 2]
    with raises_setting("per_rank_pretrain_steps"):
        Sheeprl(algo="dreamer_v1", **settings, per_rank_pretrain_steps=7).to_plan()
