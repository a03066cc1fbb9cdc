"""sheeprl: policy steps of all processes, a ratio in floats, versions that count otherwise."""

from __future__ import annotations

import pytest

from kit.dialects import Sheeprl
from kit.dialects.carried import map_fields
from kit.dialects.sheeprl.rules import SheeprlRatio, first_due
from recipes import a2c, dreamerv1, dreamerv3, sac
from tests.errors import raises_setting

ALGORITHMS = {a2c: "a2c", sac: "sac", dreamerv1: "dreamer_v1", dreamerv3: "dreamer_v3"}


def gradient_steps(plan, last=None):
    return [plan.gradient_steps(k) for k in range(1, (last or plan.iterations) + 1)]


def test_ratio_without_rounding_loss_is_counted_exactly():
    plan = Sheeprl(algo="sac", num_envs=4, replay_ratio=0.25).to_plan()
    assert plan.counting == "exact"
    assert Sheeprl(algo="sac", num_envs=1, replay_ratio=0.25).to_plan().counting == "sheeprl"


def test_dreamer_waits_for_sequence_or_fails_in_old_version():
    settings = {"algo": "dreamer_v3", "num_envs": 1, "learning_starts": 0, "total_steps": 30}
    settings["per_rank_sequence_length"] = 8
    assert Sheeprl(**settings).to_plan().first_training_iteration == 8
    with raises_setting("learning_starts") as error:
        Sheeprl(**settings, version="0.5.7").to_plan()
    works = {"learning_starts": error.value.works[0]}
    assert Sheeprl(**settings | works, version="0.5.7").to_plan()


def test_version_0_5_0_counts_down_to_training():
    plan = Sheeprl(
        algo="dreamer_v3",
        num_envs=2,
        total_steps=80,
        learning_starts=20,
        train_every=8,
        per_rank_gradient_steps=3,
        per_rank_pretrain_steps=7,
        per_rank_sequence_length=4,
        version="0.5.0",
    ).to_plan()
    assert gradient_steps(plan, 20) == [0] * 9 + [7] + [0, 0, 0, 3] * 2 + [0, 0]


def test_decoupled_sac_has_one_player_and_shared_trainers():
    plan = Sheeprl(
        algo="sac_decoupled", num_envs=4, world_size=3, total_steps=400, version="0.5.7"
    ).to_plan()
    assert plan.policy_steps_per_iteration == 4
    assert plan.gradient_steps(30) == 2
    with raises_setting("algo"):
        Sheeprl(algo="sac_decoupled", world_size=3).to_plan()


def test_ratio_starts_late_when_resumed_before_training():
    settings = {"algo": "sac", "num_envs": 5, "replay_ratio": 0.0625}
    settings["per_rank_pretrain_steps"] = 100
    first = Sheeprl(**settings, learning_starts=66, total_steps=40)
    rest = Sheeprl(**settings, learning_starts=30, total_steps=170).resumed(first)
    assert gradient_steps(rest, 8) == [1, 0, 0, 0, 1, 0, 0, 1]


def test_resume_before_0_8_uses_old_settings():
    settings = {"algo": "sac", "num_envs": 2, "version": "0.5.7"}
    rest = Sheeprl(**settings, total_steps=40).resumed(Sheeprl(**settings, total_steps=20))
    assert rest.iterations == 0


def test_notes_explain_rounding_and_ignored_settings():
    notes = Sheeprl(algo="sac", num_envs=3, total_steps=100, learning_starts=10).notes()
    assert any("1 are not collected" in note for note in notes)
    assert any("rounded down to 9 policy steps" in note for note in notes)
    notes = Sheeprl(algo="a2c", anneal_lr=True).notes()
    assert any("A2C ignores anneal_lr" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        ({"algo": "ppo", "action_repeat": 0}, "action_repeat=0 is treated as 1"),
        ({"algo": "ppo", "per_rank_batch_size": 1000}, "exceeds the batch of 512"),
        ({"algo": "a2c", "version": "0.5.7"}, "In 0.5.7, A2C minibatches count time steps"),
        ({"algo": "sac", "version": "0.5.7"}, "SAC of 0.5.7 subtracts its prefill in iterations"),
        (
            {"algo": "dreamer_v3", "version": "0.5.7", "per_rank_pretrain_steps": 5},
            "per_rank_pretrain_steps=5 replaces the gradient steps of the first training",
        ),
    ],
)
def test_notes_explain_misleading_settings(settings, note):
    assert any(note in text for text in Sheeprl(**settings).notes())
    assert not any(note in text for text in Sheeprl(algo=settings["algo"]).notes())


@pytest.mark.parametrize("version", ["0.8.4", "0.5.7"])
def test_ppo_rejects_buffer_size_other_than_rollout(version):
    settings = {"algo": "ppo", "rollout_steps": 16, "version": version}
    with raises_setting("buffer_size") as error:
        Sheeprl(**settings, buffer_size=100).to_plan()
    assert Sheeprl(**settings, buffer_size=error.value.works[0]).to_plan()


def test_to_plan_rejects_recurrent_ppo():
    with raises_setting("algo"):
        Sheeprl(algo="ppo_recurrent", rollout_steps=512).to_plan()


def test_version_0_5_0_round_trips_countdown_longer_than_prefill():
    settings = {"num_envs": 4, "total_steps": 400, "learning_starts": 8, "train_every": 16}
    settings["per_rank_sequence_length"] = 4
    plan = Sheeprl(algo="dreamer_v3", **settings, version="0.5.0").to_plan()
    assert [plan.gradient_steps(k) for k in (3, 4, 5, 8)] == [0, 1, 0, 1]
    said = Sheeprl.from_plan(plan, version="0.5.0")
    assert (said.train_every, said.per_rank_gradient_steps) == (16, 1)
    assert said.to_plan() == plan


def test_from_plan_infers_algorithm_from_counts():
    settings = {"num_envs": 4, "total_steps": 400, "learning_starts": 256, "version": "0.5.7"}
    for algo in ("sac", "droq", "p2e_dv3_finetuning"):
        plan = Sheeprl(algo=algo, **settings).to_plan()
        assert Sheeprl.from_plan(plan, version="0.5.7").resolved().algo == algo


@pytest.mark.parametrize("ratio", [1 / 49, 1 / 98, 0.1, 0.3, 1 / 161])
@pytest.mark.parametrize("policy_steps", [1, 3, 7])
def test_first_due_matches_float_ratio(ratio, policy_steps):
    asked = SheeprlRatio(ratio, prev=0.0)
    iterations = 1
    while not asked.advance(policy_steps):
        iterations += 1
    expected = 0 if ratio * policy_steps >= 1 else iterations
    assert first_due(ratio, policy_steps) == expected


# ---------------------------------------------------------------------- defaults of each version
@pytest.mark.parametrize(
    ("version", "algo", "defaults"),
    [
        ("0.8.4", "a2c", {"gae_lambda": 0.95, "max_grad_norm": 0.0}),
        ("0.5.7", "a2c", {"gae_lambda": 1.0, "max_grad_norm": 0.5}),
        ("0.5.0", "a2c", {"gae_lambda": 1.0, "max_grad_norm": 0.5}),
        ("0.5.0", "sac", {"per_rank_gradient_steps": 1, "train_every": None}),
        ("0.5.0", "droq", {"per_rank_gradient_steps": 20}),
        ("0.5.7", "droq", {"replay_ratio": 20.0, "per_rank_gradient_steps": None}),
        ("0.5.0", "dreamer_v1", {"train_every": 1000, "per_rank_gradient_steps": 100}),
        ("0.5.0", "dreamer_v2", {"train_every": 5, "per_rank_pretrain_steps": 100}),
        ("0.5.0", "dreamer_v3", {"train_every": 16, "per_rank_pretrain_steps": 1}),
        ("0.5.0", "dreamer_v3", {"learning_starts": 65_536, "per_rank_gradient_steps": 1}),
        ("0.5.7", "dreamer_v3", {"learning_starts": 1_024, "per_rank_pretrain_steps": 0}),
        ("0.5.7", "dreamer_v1", {"per_rank_pretrain_steps": 0, "gamma": 0.99}),
        ("0.8.4", "dreamer_v1", {"per_rank_pretrain_steps": 100}),
        ("0.5.7", "p2e_dv1_finetuning", {"total_steps": 1_000_000, "learning_starts": 5_000}),
        ("0.5.7", "p2e_dv2_finetuning", {"total_steps": 1_000_000, "learning_starts": 10_000}),
        ("0.5.7", "p2e_dv3_finetuning", {"total_steps": 1_000_000, "learning_starts": 16_384}),
        ("0.5.0", "p2e_dv3_finetuning", {"total_steps": 1_000_000, "learning_starts": 65_536}),
        ("0.5.7", "p2e_dv3_exploration", {"total_steps": 5_000_000, "learning_starts": 1_024}),
        ("0.8.4", "sac", {"buffer_size": 1_000_000}),
        ("0.5.7", "p2e_dv2_finetuning", {"buffer_size": 5_000_000}),
        ("0.5.7", "sac_ae", {"tau": 0.01, "hidden_size": 1_024, "alpha": 0.1}),
    ],
)
def test_defaults_depend_on_version_and_algorithm(version, algo, defaults):
    made = Sheeprl(algo=algo, version=version).resolved()
    assert {name: getattr(made, name) for name in defaults} == defaults


@pytest.mark.parametrize("name", ["ent_coef", "vf_coef", "dense_units", "mlp_layers", "anneal_lr"])
def test_a2c_of_0_5_7_rejects_later_settings(name):
    with raises_setting(name):
        Sheeprl(algo="a2c", version="0.5.7", **{name: 1}).to_plan()


@pytest.mark.parametrize("name", ["train_every", "per_rank_pretrain_steps"])
def test_sac_of_0_5_0_rejects_countdown_and_pretraining(name):
    with raises_setting(name):
        Sheeprl(algo="sac", version="0.5.0", **{name: 0}).to_plan()


@pytest.mark.parametrize(
    ("algo", "random_steps", "expected"),
    [
        ("sac", 12, [0, 0, 3 * 2, 2, 2]),  # makes up for the prefill
        ("sac_ae", 8, [0, 3 * 2, 2, 2, 2]),  # one iteration earlier
        ("droq", 0, [0, 0, 0, 2, 2]),  # strictly after learning_starts, and all by its policy
    ],
)
def test_training_start_of_0_5_0_depends_on_algorithm(algo, random_steps, expected):
    settings = {"num_envs": 4, "learning_starts": 12, "total_steps": 20, "version": "0.5.0"}
    plan = Sheeprl(algo=algo, per_rank_gradient_steps=2, **settings).to_plan()
    assert plan.random_steps == random_steps
    assert gradient_steps(plan) == expected
    assert Sheeprl.from_plan(plan, version="0.5.0").resolved().algo == algo


def test_version_0_5_0_rejects_learning_starts_below_sequence():
    settings = {"algo": "dreamer_v3", "version": "0.5.0", "num_envs": 1, "train_every": 4}
    settings |= {"per_rank_sequence_length": 8, "total_steps": 30}
    with raises_setting("learning_starts"):
        Sheeprl(**settings, learning_starts=4).to_plan()
    assert Sheeprl(**settings, learning_starts=8).to_plan().first_training_iteration == 8


@pytest.mark.parametrize(
    ("algo", "note"),
    [
        ("sac", "includes 25 gradient steps for the prefill"),
        ("sac_ae", "begins one iteration before learning_starts"),
        ("droq", "no random actions. Training begins strictly after learning_starts"),
        ("dreamer_v1", "in iteration 1,251, strictly after learning_starts"),
        ("p2e_dv1_finetuning", "The exploration actor acts until the first gradient step"),
    ],
)
def test_notes_explain_training_start_of_0_5_0(algo, note):
    notes = Sheeprl(algo=algo, version="0.5.0").notes()
    assert any(note in told for told in notes)
    first_trains_last_random = any("last iteration with random actions" in told for told in notes)
    assert first_trains_last_random == (algo == "sac")


def test_notes_report_training_delayed_by_train_every():
    settings = {"num_envs": 4, "learning_starts": 8, "train_every": 16, "version": "0.5.0"}
    notes = Sheeprl(algo="dreamer_v3", per_rank_sequence_length=4, **settings).notes()
    assert "Training begins in iteration 4, after train_every policy steps." in notes


# ---------------------------------------------------------------------- mapping to recipes
@pytest.mark.parametrize(
    ("recipe", "settings", "mapped"),
    [
        # SAC updates targets in each iteration divisible by 2 // 1 + 1.
        (sac, {"target_network_frequency": 2, "num_envs": 1}, {"target_update_every": 3}),
        (dreamerv3, {"target_network_update_freq": 2}, {"target_update_every": 2}),
        (dreamerv3, {"dense_units": 640}, {"size": "50m"}),
        (dreamerv3, {"precision": "bf16-mixed"}, {"precision": "bfloat16"}),
        (
            dreamerv1,
            {"expl_amount": 0.5, "expl_decay": 1_000, "expl_min": 0.1},
            {
                "exploration_noise": 0.5,
                "exploration_epsilon": 0.5,
                "exploration_halving": 1_000,
                "exploration_min": 0.1,
            },
        ),
        # A2C sums the gradients of four minibatches.
        (a2c, {"max_grad_norm": 0.5, "loss_reduction": "mean"}, {"max_grad_norm": 0.125}),
    ],
)
def test_settings_map_to_recipe(recipe, settings, mapped):
    given = Sheeprl(algo=ALGORITHMS[recipe], **settings)
    assert map_fields(given, recipe.Config(), given.algo)[0] == mapped


def test_separate_learning_rates_are_rejected():
    given = Sheeprl(algo="sac", actor_lr=1e-4, critic_lr=1e-3)
    with raises_setting("actor_lr"):
        map_fields(given, sac.Config(), "sac")


def test_dreamer_v3_5_waits_for_sequence_with_context():
    settings = {"algo": "dreamer_v3_5", "num_envs": 1, "learning_starts": 4, "total_steps": 30}
    plan = Sheeprl(**settings, per_rank_sequence_length=8).to_plan()
    assert plan.first_training_iteration == 9
    assert plan.random_steps == 0
    with raises_setting("algo"):
        Sheeprl(**settings, version="0.5.7").to_plan()
