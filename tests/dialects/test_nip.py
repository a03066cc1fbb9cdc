"""nip: batches of frames, minibatches carried from epoch to epoch, and its parameters' manner."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kit.dialects import LrFactors, Nip, RlTrainerParameters
from kit.dialects.carried import map_fields
from recipes import ppo
from tests.errors import raises_setting

RL_TRAINER_PARAMETERS = {
    "frames_per_batch": 1000,
    "rollouts_per_iteration": None,
    "steps_per_env_per_iteration": None,
    "num_iterations": 1000,
    "num_epochs": 4,
    "minibatch_size": 64,
    "lr": 0.003,
    "anneal_lr": False,
    "max_grad_norm": 1.0,
    "loss_critic_type": "smooth_l1",
    "clip_value": False,
    "normalize_observations": True,
    "num_normalization_steps": 1000,
    "gamma": 0.9,
    "lmbda": 0.95,
    "body_lr_factor": None,
    "use_shared_body": True,
    "num_test_iterations": 10,
}


def test_nip_fields_match_rl_trainer_parameters():
    own = {f.name: f.default for f in fields(Nip) if not f.kw_only}
    assert own == RL_TRAINER_PARAMETERS
    assert list(own) == list(RL_TRAINER_PARAMETERS)
    assert RlTrainerParameters is Nip
    assert RlTrainerParameters(40).frames_per_batch == 40


def test_num_envs_is_derived_from_frames_per_batch():
    plan = Nip(frames_per_batch=40, steps_per_env_per_iteration=8, minibatch_size=16).to_plan()
    assert (plan.num_envs, plan.steps_per_env) == (5, 8)
    with raises_setting("frames_per_batch") as error:
        Nip(frames_per_batch=20, max_message_rounds=8, minibatch_size=8).to_plan()
    assert error.value.works == [16, 24]


def test_frames_per_batch_is_derived_from_rollouts_or_dataset():
    settings = {"frames_per_batch": None, "steps_per_env_per_iteration": 8, "minibatch_size": 8}
    assert Nip(rollouts_per_iteration=5, **settings).to_plan().frames_per_batch == 40
    assert Nip(dataset_size=100, **settings).to_plan().frames_per_batch == 800
    assert Nip(frames_per_batch=16, rollouts_per_iteration=9, max_message_rounds=8,
               minibatch_size=8).to_plan().frames_per_batch == 16  # fmt: skip


def test_to_plan_rejects_settings_that_fail_in_nip():
    with raises_setting("minibatch_size"):
        Nip(frames_per_batch=16, max_message_rounds=8).to_plan()
    with raises_setting("algo"):
        Nip(algo="reinforce", frames_per_batch=40, max_message_rounds=8, minibatch_size=8).to_plan()
    with raises_setting("steps_per_env_per_iteration"):
        Nip(frames_per_batch=15, steps_per_env_per_iteration=3, max_message_rounds=8,
            min_message_rounds=8, minibatch_size=5).to_plan()  # fmt: skip


def test_zero_test_iterations_are_planned_with_note():
    given = Nip(num_test_iterations=0, max_message_rounds=8)
    assert given.to_plan().evaluations_after(1000) == 0
    assert "num_test_iterations=0 trains as planned" in " ".join(given.notes())


def test_normalization_frames_cover_minimum_steps_for_each_key():
    settings = Nip(num_normalization_steps=100)
    assert settings.normalization_frames(num_envs=6, episode_length=8) == (48, 288)
    assert Nip(normalize_observations=False).normalization_frames(6, 8) == (0, 0)


def test_learning_rate_anneals_to_one_iteration_share():
    settings = Nip(lr=0.001, anneal_lr=True, num_iterations=5)
    assert [settings.learning_rate(k) for k in (1, 5)] == pytest.approx([0.001, 0.0002])


def test_to_dict_round_trips_through_from_dict():
    parameters = Nip(num_iterations=3, body_lr_factor={"actor": 0.5})
    as_dict = parameters.to_dict()
    assert as_dict["_type"] == "RlTrainerParameters"
    assert as_dict["body_lr_factor"] == {"actor": 0.5, "critic": 1.0, "_type": "LrFactors"}
    assert set(as_dict) == {*RL_TRAINER_PARAMETERS, "_type"}
    assert Nip.from_dict(as_dict) == parameters
    assert as_dict == parameters.to_dict()  # the dictionary was not changed


def test_from_dict_rejects_or_ignores_extra_keys():
    with raises_setting("num_iteration"):
        Nip.from_dict({"num_iteration": 3})
    assert Nip.from_dict({"num_iteration": 3, "lr": 0.1}, ignore_extra_keys=True).lr == 0.1


def test_get_returns_value_at_dotted_address():
    parameters = Nip(body_lr_factor=LrFactors(critic=0.1))
    assert parameters.get("num_epochs") == 4
    assert parameters.get("body_lr_factor.critic") == 0.1
    for address in ("epochs", "body_lr_factor.value", "lr.actor", ""):
        with pytest.raises(KeyError):
            parameters.get(address)


def test_nip_rejects_scalar_body_lr_factor():
    with raises_setting("body_lr_factor"):
        Nip(body_lr_factor=0.5).resolved()


def test_get_param_class_from_dict_returns_named_class():
    for cls in Nip, LrFactors:
        assert cls._get_param_class_from_dict(Nip().to_dict()) is Nip
        assert cls._get_param_class_from_dict({"_type": "LrFactors"}) is LrFactors
        assert cls._get_param_class_from_dict({"lr": 0.1}) is None
        with pytest.raises(ValueError, match="GraphTrainerParameters"):
            cls._get_param_class_from_dict({"_type": "GraphTrainerParameters"})


@pytest.mark.parametrize(
    ("factors", "scales"),
    [
        ({"actor": 0.1, "critic": 0.2}, (0.1, 0.2)),
        ({"actor": 0.1}, (0.1, 1.0)),
        ({"critic": 0.2}, (None, 0.2)),
        ({"actor": 0.1, "critic": 0.1}, (0.1, None)),
    ],
    ids=str,
)
def test_body_lr_factor_sets_scale_of_each_network(factors, scales):
    values, _ = map_fields(Nip(body_lr_factor=factors), ppo.Config())
    names = ("backbone_lr_scale", "critic_backbone_lr_scale")
    assert tuple(values.get(name) for name in names) == scales


def test_construct_test_params_gives_small_plan():
    assert Nip.construct_test_params().to_plan().total_policy_steps == 16


def test_test_run_trains_on_one_minibatch():
    plan = Nip(test_run=True, max_message_rounds=10, num_normalization_steps=5).to_plan()
    assert plan.iterations == 1
    assert plan.gradient_steps_after(1) == 1


def test_clip_value_one_and_zero_map_to_true_and_none():
    for value, expected in (1.0, True), (0.0, None):
        (made,) = map_fields(Nip(clip_value=value), ppo.Config())[0].values()
        assert made is expected
    assert map_fields(Nip(clip_value=0.5), ppo.Config())[0] == {"clip_value": 0.5}
