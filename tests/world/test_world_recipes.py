"""Recipes of world models: counts, both rhythms, resuming, exploration, refusals."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch
from torchrl.objectives import SoftUpdate

import recipes.dreamerv1
import recipes.dreamerv3
import recipes.plan2explore
from kit.dialects.sheeprl import Sheeprl
from kit.evaluate import SavedRun
from kit.experiment import EnvConfig, main
from kit.hooks import StopWhen
from kit.logging import read_rows
from kit.losses import DreamerV1Loss, DreamerV3Loss, Plan2ExploreLoss
from kit.losses.imagination import imagine
from kit.modules.world import RSSM
from tests.envs.odd_envs import Masked
from tests.errors import raises_setting
from tests.world.runs import assert_equal, build, weights
from tests.world.test_dreamerv3 import sequences

gym.register("kit/Masked-v0", Masked)
RECIPES = [recipes.dreamerv3, recipes.dreamerv1, recipes.plan2explore]
PENDULUM = EnvConfig(id="Pendulum-v1", num_envs=1)


def named(recipe):
    return recipe.__name__.rpartition(".")[2]


# ---------------------------------------------------------------------- counting
CHANGES = [
    {"replay_ratio": "3/8"}, {"replay_ratio": 2, "total_policy_steps": 72}, {"pretrain_steps": 5},
    {"random_steps": 32}, {"env": EnvConfig(id="Pendulum-v1", num_envs=2), "steps_per_env": 2},
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: "-".join(changes))
def test_run_matches_plan(recipe, changes):
    trainer = build(recipe, **changes)
    ledger = trainer.run()
    assert ledger.compare(trainer.plan) == []
    assert ledger.samples == ledger.gradient_steps * 2 * 6
    assert ledger.gradient_steps > 0


def test_training_per_episode_matches_equal_replay_ratio():
    """Where all episodes are equally long, both rhythms are one run, bit for bit."""
    common = {"env": PENDULUM, "total_policy_steps": 600, "learning_starts": 400, "random_steps": 0}
    episodes = {"steps_per_env": None, "min_episodes": 1}
    by_episode = build(recipes.dreamerv1, **common, **episodes, replay_ratio="1/50")
    counted = by_episode.run()
    by_ratio = build(recipes.dreamerv1, **common, steps_per_env=200, replay_ratio="1/50")
    assert by_ratio.run().counters() == counted.counters()
    assert counted.gradient_steps == 8, "four after each of two episodes"
    assert_equal(by_episode, by_ratio)


class OwnV3(DreamerV3Loss):
    """A loss of the user's."""


class OwnV1(DreamerV1Loss):
    """A loss of the user's."""


class OwnExplorer(Plan2ExploreLoss):
    """A loss of the user's."""


@pytest.mark.parametrize(
    ("recipe", "own"), zip(RECIPES, [OwnV3, OwnV1, OwnExplorer]), ids=[*map(named, RECIPES)]
)
def test_custom_loss_replaces_recipe_loss(recipe, own):
    trainer = build(recipe, loss=f"{__name__}:{own.__name__}", total_policy_steps=72)
    assert type(trainer.update.loss_module) is own
    usual = build(recipe, total_policy_steps=72)
    assert trainer.run().gradient_steps == usual.run().gradient_steps == 3
    assert_equal(trainer, usual)


# ---------------------------------------------------------------------- exactness
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_traced_run_matches_eager_run_bitwise(recipe, precision):
    short = {"total_policy_steps": 72, "sequence_length": 3, "precision": precision}
    one = build(recipe, compile="auto", **short)
    one.run()
    other = build(recipe, **short)
    assert other.run().gradient_steps == 3
    assert one.update.plain_reason == ""
    assert_equal(one, other)


@pytest.mark.parametrize("env", [PENDULUM, EnvConfig(id="CartPole-v1", num_envs=1)])
@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_bfloat16_rounds_only_matrix_products(recipe, env):
    """A discount of 0.999 would be 1, and no return between 256 and 512 odd."""
    loss = build(recipe, env=env, precision="bfloat16").update.loss_module
    head = loss.world_model.continuation_head[-1]
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.constant_(head.bias, torch.logit(torch.tensor(0.999)).item())
    with torch.autocast("cpu", torch.bfloat16):
        start = loss.world_model.rssm.initial(5)
        imagined = imagine(loss.world_model, loss.actor, start, 3)
    torch.testing.assert_close(imagined.continuation, torch.full((4, 5), 0.999), atol=1e-4, rtol=0)
    assert {part.dtype for part in imagined[1:]} == {torch.float32}
    loss.stored_latents = False
    metrics = loss(sequences(env.id))
    assert {value.dtype for value in metrics.values()} == {torch.float32}


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_stopped_run_resumes_bitwise(recipe, tmp_path):
    settings = {"evaluation_every": 96, "env": EnvConfig(id="CartPole-v1", num_envs=2)}
    if recipe is recipes.plan2explore:
        settings["exploration_steps"] = 104
    whole = build(recipe, **settings)
    whole.run()
    stopped = build(recipe, tmp_path, hooks=[StopWhen("evaluation/return", reached=0)], **settings)
    assert stopped.run().policy_steps == 96
    resumed = build(recipe, tmp_path, resume="latest", **settings)
    assert resumed.ledger.policy_steps == 96
    assert resumed.run().counters() == whole.ledger.counters()
    assert_equal(whole, resumed)
    rows = [one.buffer.state_dict()["rows"] for one in (whole, resumed)]
    assert rows[0]["keys"] == rows[1]["keys"]
    assert all(map(torch.equal, rows[0]["values"], rows[1]["values"])), "stored latents included"


@pytest.mark.parametrize("recipe", RECIPES[::2], ids=named)
def test_buffer_stores_latents_of_every_gradient_step(recipe):
    trainer = build(recipe, total_policy_steps=72, minibatch_size=30)
    trainer.run()
    played = build(recipe, total_policy_steps=72, replay_ratio=0)
    played.run()
    now, before = (one.buffer.state_dict()["rows"] for one in (trainer, played))
    deter, known = (now["keys"].index(["latent", name]) for name in ("deter", "known"))
    assert now["values"][known][0, :-8].all()
    assert not torch.equal(now["values"][deter], before["values"][deter]), "not the player's alone"


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_evaluator_uses_fast_policy_of_collector(recipe):
    trainer = build(recipe, collector_kwargs={"fast_policy": "module"})
    assert trainer.evaluate.fast_policy == "module"


# ---------------------------------------------------------------------- exploration
def test_explorer_and_ensemble_stop_training_after_exploration():
    explored = build(recipes.plan2explore, exploration_steps=128)
    explored.run()
    assert explored.update.loss_module.exploring
    trainer = build(recipes.plan2explore, exploration_steps=96)
    before: dict[str, list] = {}

    def remember(trainer=trainer):
        if trainer.policy_steps == 96:
            before["weights"] = weights(trainer)

    trainer.register_op("post_steps", remember)
    trainer.run()
    assert not trainer.update.loss_module.exploring
    names = list(trainer.update.loss_module.state_dict())
    moved = {
        name.split(".")[0]
        for name, one, other in zip(names, before["weights"], weights(trainer))
        if not one.equal(other)
    }
    assert {"world_model", "actor", "critic_network_params"} <= moved
    assert not {"explorer", "ensemble", "explorer_critic_network_params"} & moved


def test_sheeprl_finetuning_continues_exploration_with_buffer(tmp_path):
    """The explorer plays until the first training; then the task actor plays and learns alone."""
    explored = build(recipes.plan2explore, tmp_path, total_policy_steps=72, exploration_steps=72)
    explored.run()
    words = {
        "algo": "p2e_dv3_finetuning", "total_steps": 28, "num_envs": 1, "learning_starts": 24,
        "replay_ratio": 0.25, "per_rank_batch_size": 2, "per_rank_sequence_length": 6,
    }  # fmt: skip
    config = recipes.plan2explore.Config(
        env=EnvConfig(id="CartPole-v1", num_envs=1), steps=Sheeprl(**words), log_dir=str(tmp_path),
        imagination_horizon=3, imagination_starts=2, progress=False, compile=False,
        init_from=str(explored.folder),
    )  # fmt: skip
    trainer = recipes.plan2explore.build(config)
    assert_equal(trainer, explored)
    stored = explored.buffer.state_dict()
    rows = [one.buffer.state_dict()["rows"]["values"] for one in (trainer, explored)]
    assert all(map(torch.equal, *rows))
    assert trainer.plan == Sheeprl(**words).to_plan()
    assert (trainer.plan.exploration_steps, trainer.plan.random_steps) == (24, 0)
    ledger = trainer.run()
    assert ledger.policy_steps == 28
    assert ledger.gradient_steps == trainer.plan.gradient_steps_after(28) > 0
    assert trainer.buffer.state_dict()["written"][0] > stored["written"][0] + 27
    moved = {
        name.split(".")[0]
        for name, one in trainer.loss_module.state_dict().items()
        if not one.equal(explored.loss_module.state_dict()[name])
    }
    assert {"world_model", "actor", "critic_network_params"} <= moved
    assert not any(name.startswith(("explorer", "ensemble")) for name in moved)
    assert SavedRun(trainer.folder).policy() is not None, "it is played without the exploration"


def test_sheeprl_exploration_lasts_complete_run():
    words = {"total_steps": 64, "num_envs": 1, "learning_starts": 24}
    plan = Sheeprl(algo="p2e_dv3_exploration", **words).to_plan()
    assert (plan.exploration_steps, plan.random_steps) == (64, 24)


def test_finetuning_rejects_exploration_without_buffer(tmp_path):
    steps = {"total_policy_steps": 68, "exploration_steps": 68}
    explored = build(recipes.plan2explore, tmp_path, save_policy=True, **steps)
    explored.run()
    policy = str(explored.folder / "policy")
    with raises_setting("init_from"):
        build(recipes.plan2explore, tmp_path, exploration_steps=0, init_from=policy)


@pytest.mark.nightly
def test_plan2explore_reaches_goal_missed_by_random_actions(tmp_path):
    """Random actions find it in one of 4,100 episodes; a run has at most 120."""
    maze = ["preset=maze", "env.kwargs.rooms=2", "env.kwargs.steps=50", "progress=false"]
    for seed in (1, 2, 0):  # rounding, and therefore the processor, decides which seeds fail
        runs = [f"seed={seed}", f"log_dir={tmp_path / str(seed)}"]
        main(recipes.plan2explore.Config, recipes.plan2explore.build, [*maze, *runs])
        (metrics,) = (tmp_path / str(seed)).rglob("metrics.csv")
        rows = read_rows(metrics.parent)
        if max(row.get("evaluation/return", 0.0) for row in rows) >= 0.5:
            return
    pytest.fail("no seed of three reached the goal in 50 of 100 evaluation episodes")


# ---------------------------------------------------------------------- memory
GO_NO_GO = EnvConfig(id="kit.testing.envs:kit/GoNoGo-v0", num_envs=1)


def forget(monkeypatch):
    """Let the recurrence begin anew at each time step."""
    recur = RSSM.recur
    anew = lambda self, latent, action: recur(self, self.initial(len(action)), action)  # noqa: E731
    monkeypatch.setattr(RSSM, "recur", anew)


@pytest.mark.parametrize("remembers", [True, False])
def test_latents_retain_cue_only_with_recurrence(monkeypatch, remembers):
    """So no policy of such latents earns more than the half that one without memory does."""
    model = build(recipes.dreamerv3, env=GO_NO_GO).update.loss_module.world_model
    if not remembers:
        forget(monkeypatch)

    def asked(cue: int) -> torch.Tensor:
        """Features when the answer is due, after the same actions and random numbers."""
        observation = torch.zeros(9, 1, 3)
        observation[0, 0, cue] = observation[-1, 0, 2] = 1.0
        first = torch.arange(9).unsqueeze(1) == 0
        torch.manual_seed(0)
        latents, _ = model.rssm.observe(
            model.rssm.initial(1), torch.ones(9, 1, 4), model.encode([observation]), first
        )
        return latents.features[-1]

    assert torch.equal(asked(0), asked(1)) == (not remembers)


# ---------------------------------------------------------------------- learning
@pytest.mark.nightly
def test_dreamerv3_learns_cartpole():
    config = recipes.dreamerv3.Config(log_dir=None, progress=False)
    config.steps.evaluation_every = None
    trainer = recipes.dreamerv3.build(config)
    trainer.run()
    assert trainer.journal.latest["evaluation/return"] >= 400


@pytest.mark.nightly
@pytest.mark.parametrize("remembers", [True, False])
def test_dreamerv3_recalls_cue_only_with_recurrence(monkeypatch, remembers):
    if not remembers:
        forget(monkeypatch)
    steps = recipes.dreamerv3.SequenceSteps(
        total_policy_steps=4_000, sequence_length=20, minibatch_size=48, replay_ratio="1/2",
        evaluation_every=None, evaluation_episodes=100,
    )  # fmt: skip
    config = recipes.dreamerv3.Config(
        env=GO_NO_GO, steps=steps, size="tiny", latents=2, learning_rate=1e-3, entropy_coeff=0.03,
        imagination_starts=4, log_dir=None, progress=False, seed=1,
    )  # fmt: skip
    trainer = recipes.dreamerv3.build(config)
    trainer.run()
    found = trainer.journal.latest["evaluation/return"]
    assert found >= 0.9 if remembers else found <= 0.65, "0.5 is chance"


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_world_model_takes_only_allowed_actions(recipe):
    """The environment raises an error for each forbidden action."""
    env = EnvConfig(id="kit/Masked-v0", num_envs=2)
    explores = {"exploration_epsilon": 0.5} if recipe is recipes.dreamerv1 else {}
    ledger = build(recipe, env=env, total_policy_steps=96, random_steps=32, **explores).run()
    assert ledger.gradient_steps > 0
    assert ledger.environment_errors == 0


# ---------------------------------------------------------------------- refusals
def test_recipes_reject_invalid_settings():
    with raises_setting("learning_starts"):
        build(recipes.dreamerv3, learning_starts=4).run()
    with raises_setting("sequence_length"):
        build(recipes.dreamerv3, sequence_length=1)
    with raises_setting("size"):
        build(recipes.dreamerv3, size="huge")
    with raises_setting("latents"):
        build(recipes.dreamerv3, latents=0)
    with raises_setting("size"):
        build(recipes.dreamerv1, size="12m")


# ---------------------------------------------------------------------- exploration and targets
@pytest.mark.parametrize(
    ("env", "setting", "name"),
    [
        (PENDULUM, "exploration_noise", "exploration_noise"),
        (EnvConfig(id="CartPole-v1", num_envs=1), "exploration_epsilon", "epsilon"),
    ],
)
def test_dreamerv1_exploration_halves_down_to_minimum(env, setting, name):
    values = {"exploration_halving": 16, "exploration_min": 0.1, setting: 0.8}
    trainer = build(recipes.dreamerv1, env=env, total_policy_steps=72, **values)
    schedule = trainer.registered_modules[f"anneal_{name}"].schedule
    assert [schedule(steps) for steps in (0, 16, 32, 64)] == [0.8, 0.4, 0.2, 0.1]
    trainer.run()
    assert trainer.journal.latest[f"schedule/{name}"] == pytest.approx(0.1)


@pytest.mark.parametrize(("every", "updates"), [(1, 3), (2, 1), (4, 0)])
def test_dreamerv3_updates_target_critic_periodically(monkeypatch, every, updates):
    made = []
    monkeypatch.setattr(SoftUpdate, "step", lambda updater: made.append(updater))
    trainer = build(recipes.dreamerv3, total_policy_steps=72, target_update_every=every)
    loss = trainer.update.loss_module
    online, target = (
        getattr(loss, f"{name}critic_network_params").flatten_keys() for name in ("", "target_")
    )
    assert (online == target).all()  # sheeprl's first update copies the weights
    assert trainer.run().gradient_steps == 3
    assert len(made) == updates


# ---------------------------------------------------------------------- refusals
def test_build_rejects_unused_exploration_settings():
    with raises_setting("exploration_noise"):
        build(recipes.dreamerv1, exploration_noise=0.9)
    with raises_setting("exploration_min"):
        build(recipes.dreamerv1, env=PENDULUM, exploration_min=0.1)
    assert build(recipes.dreamerv1, exploration_noise=0.9, env=PENDULUM).plan


@pytest.mark.parametrize("steps", [0, 41, 64])
def test_error_names_invalid_exploration_steps(steps):
    two = EnvConfig(id="CartPole-v1", num_envs=2)
    with raises_setting("steps.exploration_steps"):
        build(recipes.plan2explore, env=two, exploration_steps=steps)
    assert build(recipes.plan2explore, env=two, exploration_steps=66).plan.exploration_steps == 66


def test_build_rejects_exploration_ending_before_training():
    """The explorer would never be trained: at the first gradient step it has ended."""
    with raises_setting("steps.exploration_steps"):
        build(recipes.plan2explore, steps_per_env=128, exploration_steps=100)
    late = {"replay_ratio": "1/64", "learning_starts": 8, "exploration_steps": 64}
    with raises_setting("steps.exploration_steps"):
        build(recipes.plan2explore, **late)


def test_build_rejects_exploration_of_only_random_steps():
    with raises_setting("steps.exploration_steps"):
        build(recipes.plan2explore, exploration_steps=80, random_steps=80)


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_run_rejects_flat_layout_for_sequences(recipe):
    config = {"steps_per_env": None, "min_episodes": 1, "collector_kwargs": {"layout": "flat"}}
    trainer = build(recipe, **config)
    with raises_setting("layout"):
        trainer.run()


def test_build_rejects_ensemble_too_large_to_allocate():
    with raises_setting("ensemble"):
        build(recipes.plan2explore, ensemble=10**12)
