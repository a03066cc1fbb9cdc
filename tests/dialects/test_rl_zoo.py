"""RL Zoo's configurations set the recipe settings that they describe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.dialects import SB3, map_fields
from kit.dialects.rl_zoo import parse_kwargs, recipe_wrappers, split_wrappers
from recipes import a2c, ddpg, dqn, dqn_pixels, ppo, ppo_pixels, sac, td3
from tests.errors import raises_setting

ATARI = "stable_baselines3.common.atari_wrappers.AtariWrapper"


def values_of(recipe, **settings):
    algo = recipe.__name__.rpartition(".")[2].removesuffix("_pixels")
    return map_fields(SB3.from_settings(settings), recipe.Config(), algo)[0]


# ---------------------------------------------------------------------- keyword arguments
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("dict(net_arch=[400, 300])", {"net_arch": [400, 300]}),
        ("dict( log_std_init=-2.5, full_std=True, )", {"log_std_init": -2.5, "full_std": True}),
        ("dict(net_arch=dict(pi=[8], vf=(4,)))", {"net_arch": {"pi": [8], "vf": [4]}}),
        ("{'norm_obs': True}", {"norm_obs": True}),
        ("dict(activation_fn=nn.ReLU, a=th.optim.Adam)", {"activation_fn": "ReLU", "a": "Adam"}),
    ],
)  # fmt: skip
def test_parse_kwargs_reads_literals_and_class_names(text, value):
    assert parse_kwargs("policy_kwargs", text) == value
    assert parse_kwargs("policy_kwargs", value) == value


@pytest.mark.parametrize(
    "text",
    ["", "dict(", "[1]", "3", "dict(a=open('x'))", "dict(**b)", "dict([('a', 1)])", "{1: 2}",
     "__import__('os').getcwd()", "dict(a=[b for b in c])", "{**a}", "(" * 10_000],
)  # fmt: skip
def test_parse_kwargs_rejects_other_code(text):
    with raises_setting("policy_kwargs"):
        parse_kwargs("policy_kwargs", text)


# ---------------------------------------------------------------------- networks
def test_policy_kwargs_map_to_ppo_network_settings():
    text = (
        "dict(log_std_init=-2, ortho_init=False, activation_fn=nn.ReLU, "
        "net_arch=dict(pi=[256, 64], vf=[256]))"
    )
    assert values_of(ppo, policy_kwargs=text) == {
        "hidden_sizes": [256, 64], "critic_hidden_sizes": [256], "activation": "relu",
        "initial_log_std": -2, "orthogonal": False,
    }  # fmt: skip


def test_policy_kwargs_optimizer_maps_to_a2c():
    text = "dict(optimizer_class={}, optimizer_kwargs=dict(eps=1e-5))"
    for name, optimizer in ("RMSpropTFLike", "rmsprop_tf"), ("th.optim.Adam", "adam"):
        assert values_of(a2c, policy_kwargs=text.format(name)) == {"optimizer": optimizer}
    assert values_of(ppo, policy_kwargs=text.format("Adam")) == {}
    assert values_of(a2c, use_rms_prop=False) == {"optimizer": "adam"}


@pytest.mark.parametrize(
    "text",
    [
        "dict(optimizer_class=SGD)",
        "dict(optimizer_kwargs=dict(eps=1))",
        "dict(activation_fn=nn.Mish)",
        "dict(features_extractor_class=Mine)",
        "dict(n_critics=5)",
        "dict(net_arc=[8])",
    ],
)
def test_policy_kwargs_reject_entries_without_recipe_setting(text):
    with raises_setting("policy_kwargs"):
        values_of(ppo, policy_kwargs=text)


def test_gsde_settings_map_to_sac():
    given = {"use_sde": True, "sde_sample_freq": 64, "use_sde_at_warmup": True}
    text = "dict(log_std_init=-3.67, net_arch=[64, 64], use_expln=True)"
    assert values_of(sac, **given, policy_kwargs=text) == {
        "gsde": True, "gsde_sample_freq": 64, "gsde_at_warmup": True, "initial_log_std": -3.67,
        "hidden_sizes": [64, 64], "gsde_expln": True,
    }  # fmt: skip
    plan = SB3(algo="sac", **given, learning_starts=500).to_plan()
    assert (plan.random_steps, plan.learning_starts) == (0, 501)


def test_gsde_settings_without_gsde_are_reported():
    given = SB3(algo="sac", sde_sample_freq=4, policy_kwargs={"log_std_init": -2})
    assert map_fields(given, sac.Config(), "sac")[0] == {}
    assert "Without use_sde, sde_sample_freq and log_std_init" in " ".join(given.notes())


@pytest.mark.parametrize("recipe", [td3, ddpg])
def test_ornstein_uhlenbeck_noise_maps_to_noise_type(recipe):
    values = values_of(recipe, noise_type="ornstein-uhlenbeck", noise_std=0.5)
    assert values == {"noise_type": "ou", "exploration_noise": 0.5}


# ---------------------------------------------------------------------- environments
@pytest.mark.parametrize(
    ("normalize", "observation", "reward"),
    [
        (True, True, True),
        (False, False, False),
        ("{'norm_obs': False, 'norm_reward': True}", False, True),
        ({"norm_obs": True, "norm_reward": False}, True, False),
        ("dict(norm_reward=False, gamma=0.99)", True, False),
    ],
)
def test_normalize_maps_to_env_settings(normalize, observation, reward):
    values = values_of(sac, normalize=normalize)
    names = ("env.normalize_observation", "env.normalize_reward")
    assert values == dict(zip(names, (observation, reward)))


@pytest.mark.parametrize("value", ["yes", 3, "dict(clip_obs=5)", "dict(norm_obs_keys=['a'])"])
def test_normalize_rejects_other_values(value):
    with raises_setting("normalize"):
        values_of(ppo, normalize=value)


def test_env_wrapper_maps_frame_skip_and_time_limit():
    frames = [
        {"rl_zoo3.wrappers.FrameSkip": {"skip": 2}},
        {"rl_zoo3.wrappers.YAMLCompatResizeObservation": {"shape": [64, 64]}},
        {"gymnasium.wrappers.transform_observation.GrayscaleObservation": {"keep_dim": True}},
    ]
    names = ("ResizeObservation", {"shape": [64, 64]}), ("GrayscaleObservation", {"keep_dim": True})
    wrappers = [{f"gymnasium.wrappers:{name}": kwargs} for name, kwargs in names]
    assert values_of(ppo, env_wrapper=frames) == {"env.wrappers": wrappers}
    assert SB3(algo="ppo", env_wrapper=frames).to_plan().action_repeat == 2
    limit = {"gymnasium.wrappers.time_limit.TimeLimit": {"max_episode_steps": 500}}
    assert SB3(algo="ppo", env_wrapper=limit).to_plan().max_episode_steps == 500
    assert values_of(ppo, env_wrapper=limit) == {}


def test_env_wrapper_keeps_order_of_frame_skip_and_history():
    skip = {"rl_zoo3.wrappers.FrameSkip": {"skip": 2}}
    history = {"rl_zoo3.wrappers.HistoryWrapper": {"horizon": 2}}
    assert recipe_wrappers([skip, history]) == [
        {"rl_zoo3.wrappers:FrameSkip": {"skip": 2}},
        {"rl_zoo3.wrappers:HistoryWrapper": {"horizon": 2}},
    ]
    assert split_wrappers([history, skip]).action_repeat == 2


@pytest.mark.parametrize(
    "value", [3, [["a"]], [{"a.B": 3}], {"rl_zoo3.wrappers.FrameSkip": {"skip": 0}}]
)
def test_env_wrapper_rejects_other_values(value):
    with raises_setting("env_wrapper"):
        values_of(ppo, env_wrapper=value)


@pytest.mark.parametrize(
    ("recipe", "frames"), [(ppo_pixels, "frame_stack"), (dqn_pixels, "stacked_frames")]
)
def test_atari_configuration_maps_to_pixel_recipe(recipe, frames):
    settings = {"policy": "CnnPolicy", "env_wrapper": [ATARI], "frame_stack": 4}
    values = values_of(recipe, **settings)
    assert values == {
        "convolutions": recipe.Config().convolutions,
        "preprocess": "atari",
        frames: 4,
    }
    values = values_of(recipe, policy="CnnPolicy", frame_stack=2)
    assert (values["preprocess"], values[frames]) == ("none", 2)
    algo = "ppo" if recipe is ppo_pixels else "dqn"
    assert SB3(algo=algo, **settings).recipe() == f"{algo}_pixels"
    assert "when a life is lost" in " ".join(SB3(algo=algo, **settings).notes())


@pytest.mark.parametrize("recipe", [a2c, ppo, dqn])
def test_cnn_policy_needs_recipe_with_convolutions(recipe):
    with raises_setting("policy"):
        values_of(recipe, policy="CnnPolicy", env_wrapper=[ATARI])
    with raises_setting("env_wrapper"):
        values_of(recipe, policy="MlpPolicy", env_wrapper=[ATARI])


# ---------------------------------------------------------------------- replay
def test_her_replay_buffer_maps_to_hindsight():
    kwargs = "dict( goal_selection_strategy='final', n_sampled_goal=4 )"
    given = {"replay_buffer_class": "HerReplayBuffer", "policy": "MultiInputPolicy"}
    assert values_of(sac, **given) == {"hindsight": "future"}
    assert values_of(sac, **given, replay_buffer_kwargs=kwargs) == {"hindsight": "final"}
    with raises_setting("replay_buffer_kwargs"):
        values_of(sac, **given, replay_buffer_kwargs={"n_sampled_goal": 8})
    with raises_setting("replay_buffer_class"):
        values_of(sac, replay_buffer_class="Mine")


# ---------------------------------------------------------------------- counts
OBSERVED = json.loads((Path(__file__).parents[1] / "data" / "zoo_counts.json").read_text())
"""Counts of 20,000 timesteps of RL Zoo 2.9.2's configurations in Stable-Baselines3 2.9.2."""


@pytest.mark.parametrize("case", OBSERVED, ids=lambda case: f"{case['algorithm']}-{case['env']}")
def test_plan_equals_observed_counts_of_rl_zoo(case):
    plan = SB3.from_settings(case["settings"]).to_plan(case["algorithm"])
    counts = plan.after(plan.iterations)
    assert case["observed"] == {
        "rollouts": counts.iterations,
        "timesteps": counts.policy_steps,
        "random_timesteps": counts.random_policy_steps,
        "gradient_steps": counts.gradient_steps,
        "first_training_timestep": plan.policy_steps_after(plan.first_training_iteration),
    }


def test_episode_rollouts_of_unknown_length_have_inexact_plan():
    given = SB3(algo="td3", train_freq=[1, "episode"], gradient_steps=-1, total_timesteps=500)
    plan = given.to_plan()
    assert not plan.is_exact
    assert (plan.min_episodes, plan.replay_ratio, plan.total_policy_steps) == (1, 1, 500)
    assert (plan.random_steps, plan.learning_starts) == (100, 101)
    assert "Episode lengths are unknown" in " ".join(given.notes())


def test_fields_without_effect_are_listed():
    given = SB3.from_settings({"algo": "ppo", "verbose": 1, "tensorboard_log": "logs", "seed": 3})
    values, lines = map_fields(given, ppo.Config(), "ppo")
    assert values == {"seed": 3}
    assert lines[0] == (
        "accepted without effect: tensorboard_log='logs' (Use logger=tensorboard), verbose=1 "
        "(Use progress)"
    )
