"""Every on-policy recipe counts exactly, resumes exactly, and takes the fast path unchanged."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torchrl.objectives import ClipPPOLoss

from kit.advantages import GAE, RewardToGo, VTrace
from kit.collectors import VectorCollector
from kit.envs import make_env
from kit.experiment import EnvConfig, OnPolicySteps
from kit.modules import make_actor
from kit.modules.shared_backbone import SharedBackbone, with_shared_backbone
from kit.trainer import Trainer
from kit.update import Update
from tests.errors import raises_setting
from tests.tiny import Guess, assert_equal, weights

TWO_GUESSES = gym.spaces.Dict(
    {"one": gym.spaces.Discrete(Guess.CHOICES), "other": gym.spaces.Discrete(Guess.CHOICES)}
)
gym.register("TwoGuesses-v0", functools.partial(Guess, action_space=TWO_GUESSES))
SEVERAL_ACTIONS = EnvConfig("TwoGuesses-v0", 4)

TINY = {"hidden_sizes": [8]}
IMAGES = {
    **TINY, "env": EnvConfig("kit.testing.envs:kit/Glimpse-v0", 4), "preprocess": "none",
    "frame_stack": 2, "convolutions": [[4, 3, 2]],
}  # fmt: skip
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", TINY),
    "ppo2": ("ppo", {**TINY, "clip_value": 0.2, "advantage_norm": "running"}),
    "ppo, shared body": ("ppo", {**TINY, "shared_backbone": True, "backbone_lr_scale": 0.5}),
    "ppo, schedules": (
        "ppo",
        {
            **TINY, "lr_schedule": "warmup 0.5 cosine", "clip_schedule": "linear",
            "entropy_coeff": 0.01,
            "entropy_schedule": "piecewise 0.5 0.1", "critic_schedule": "cosine",
        },
    ),
    "a2c": ("a2c", TINY),
    "a2c, n steps": ("a2c", {**TINY, "n_step": 3, "optimizer": "adam"}),
    "reinforce": ("reinforce", TINY),
    "reinforce without baseline": ("reinforce", {**TINY, "baseline": False}),
    "impala": ("impala", {**TINY, "collector": "vector"}),
    "trpo": ("trpo", {**TINY, "critic_epochs": 2}),
    "svpg": ("svpg", {**TINY, "num_particles": 2}),
    "svpg, ppo": (
        "svpg", {**TINY, "num_particles": 2, "loss": "ClipPPOLoss", "shared_backbone": True}
    ),
    "ppo_recurrent": ("ppo_recurrent", {**TINY, "recurrent_size": 8, "recurrent": "gru"}),
    "ppo_pixels": ("ppo_pixels", IMAGES),
}  # fmt: skip
"""Recipe and settings of a small run."""
names = pytest.mark.parametrize("name", list(RECIPES))
EPOCHS = {"a2c": 1, "reinforce": 1, "impala": 1, "svpg": 1, "trpo": 1}


def built(name: str, folder: Path | None = None, **changes: Any) -> Trainer:
    """A run of 8 iterations of 4 x 16 policy steps."""
    recipe, own = RECIPES[name]
    epochs = EPOCHS.get(recipe, 2)
    sequences = 4 if recipe == "ppo_recurrent" else None
    steps = OnPolicySteps(
        total_policy_steps=512, steps_per_env=16, update_epochs=epochs,
        minibatch_size=None if epochs == 1 else 4 if sequences else 16, sequence_length=sequences,
        evaluation_every=None, evaluation_episodes=1,
    )  # fmt: skip
    env = EnvConfig("CartPole-v1", 4, normalize_observation=False, normalize_reward=False)
    settings: dict[str, Any] = {
        "env": env, "steps": steps, "progress": False,
        "log_dir": None if folder is None else str(folder), "checkpoint_every": 64,
    }  # fmt: skip
    module = importlib.import_module(f"recipes.{recipe}")
    return module.build(module.Config(**{**settings, **own, **changes}))


def test_trpo_passes_its_settings_to_the_trust_region():
    given = {"max_kl": 0.3, "damping": 0.7, "conjugate_gradient_steps": 3, "line_search_steps": 4}
    update = built("trpo", **given).update
    assert {name: getattr(update, name) for name in given} == given


@names
def test_traced_run_matches_eager_run_bitwise(name):
    fast = built(name)
    ledger = fast.run()
    epochs = fast.plan.update_epochs
    assert ledger.samples == 512 * epochs
    assert ledger.gradient_steps == 8 * (1 if epochs == 1 else 2 * 4)
    if isinstance(fast.update, Update):  # the line search of a trust region is eager
        assert fast.update.plain_reason == ""
    assert getattr(fast.advantage, "_traced", None) is None or fast.advantage._traced.replays
    random_numbers = torch.get_rng_state()
    eager = built(name, compile=False)
    eager.run()
    assert_equal(weights(fast), weights(eager))
    assert torch.equal(random_numbers, torch.get_rng_state())


@names
def test_interrupted_run_resumes_exactly(name, tmp_path):
    whole = built(name)
    whole.run()
    resumed = interrupted(name, tmp_path)
    assert resumed.ledger.counters() == whole.ledger.counters()
    assert_equal(weights(resumed), weights(whole))


def interrupted(name: str, folder: Path, **changes: Any) -> Trainer:
    """Stop after 256 policy steps and run the rest in another trainer."""
    broken = built(name, folder, **changes)
    broken.register_op(
        "post_steps", lambda: broken.request_stop() if broken.policy_steps == 256 else None
    )
    broken.run()
    resumed = built(name, folder, resume=str(broken.folder), **changes)
    resumed.run()
    return resumed


# ---------------------------------------------------------------------- outputs of policies
def test_a2c_omits_unread_policy_outputs_and_trains_identically(monkeypatch):
    lean = built("a2c")
    assert set(lean.collector.collect().keys()) == {"action", "collector", "next", "observation"}
    lean = built("a2c")
    lean.run()
    monkeypatch.setattr("recipes.a2c.drop_log_prob", lambda actor, _: actor)
    whole = built("a2c")
    whole.run()
    assert_equal(weights(lean), weights(whole))


@pytest.mark.parametrize("loss", ["ClipPPOLoss", "kit.losses:KLPENPPOLoss"])
def test_a2c_collects_all_policy_outputs_for_other_losses(loss):
    batch = built("a2c", loss=loss).collector.collect()
    assert {"action", "action_log_prob", "logits"} <= set(batch.keys())


# ---------------------------------------------------------------------- a penalty on the divergence
def test_kl_penalty_gradient_uses_current_beta():
    """The weight changes in each gradient step: that of a changed one is for the next."""
    trainer = built(
        "ppo", loss="kit.losses:KLPENPPOLoss", learning_rate=0.05, lr_schedule="constant"
    )
    loss, found = trainer.loss_module, []

    def look(minibatch: Any) -> None:
        beta, rows = float(loss.beta), minibatch.clone()
        objective = loss(minibatch.clone())["loss_objective"]
        following = float(loss.beta)
        loss.beta.fill_(beta)
        before = Categorical(logits=rows["logits"])
        with loss.actor_network_params.to_module(loss.actor_network):
            now = loss.actor_network.get_dist(rows)
        advantage = rows["advantage"].squeeze(-1)
        advantage = (advantage - advantage.mean()) / advantage.std()
        ratio = (now.log_prob(rows["action"]) - rows["action_log_prob"]).exp()
        divergence = kl_divergence(before, Categorical(logits=now.logits)).mean()
        expected = beta * divergence - (ratio * advantage).mean()
        parameters = list(loss.actor_network_params.parameters())
        torch.testing.assert_close(objective, expected, rtol=1e-3, atol=1e-4)
        gradients = (torch.autograd.grad(value, parameters) for value in (objective, expected))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
        factor = 2 if divergence > 0.015 else 0.5 if divergence < 0.01 / 1.5 else 1
        found.append((following / beta, factor))

    trainer.register_op("process_optim_batch", look)
    trainer.run()
    assert len(found) == 64
    assert {2, 0.5} <= {factor for _, factor in found}
    assert all(change == factor for change, factor in found)


# ---------------------------------------------------------------------- IMPALA
def test_impala_corrects_staleness_of_async_collector(tmp_path):
    asynchronous = {"collector": "async", "collector_kwargs": {"max_staleness": 2}}
    whole = built("impala", **asynchronous)
    ratios: list[float] = []

    def look(batch: Any) -> None:
        actor = whole.advantage.actor_network
        now = actor.get_dist(batch.clone()).log_prob(batch["action"]).detach()
        ratios.append(float((now - batch["action_log_prob"]).abs().max()))

    whole.register_op("pre_steps_log", look)
    whole.run()
    assert isinstance(whole.advantage, VTrace)
    assert ratios[0] < 1e-6  # the first batch is of the policy that learns
    assert min(ratios[1:]) > 1e-6  # all others are behind
    assert whole.collector.staleness == 2
    assert_equal(weights(interrupted("impala", tmp_path, **asynchronous)), weights(whole))


def test_custom_update_receives_complete_minibatches(monkeypatch):
    class Looking(Update):
        reads_minibatches = True

        def __call__(self, *minibatches):
            rewards = minibatches[0]["next", "reward"]
            return {**super().__call__(*minibatches), "reward": rewards.mean()}

    monkeypatch.setattr("recipes.ppo.Update", Looking)
    trainer = built("ppo")
    trainer.run()
    assert trainer.journal.latest["train/reward"] == 1.0


# ---------------------------------------------------------------------- shared bodies
def test_shared_backbone_gradients_match_torchrl_loss():
    for name in ("ppo, shared body", "ppo_pixels", "ppo_recurrent"):
        trainer = built(name)
        loss = trainer.loss_module
        assert isinstance(loss, SharedBackbone)
        actor, critic = trainer.evaluate.policy, trainer.advantage.value_network
        plain = type(loss.loss)(
            actor, critic, clip_epsilon=float(loss.clip_epsilon),
            entropy_coeff=float(loss.entropy_coeff), critic_coeff=float(loss.critic_coeff),
            loss_critic_type="l2", normalize_advantage=True,
        )  # fmt: skip
        batch = trainer.advantage(trainer.collector.collect().clone())
        found, expected = loss(batch.clone()), plain(batch.clone())
        for key in expected.keys() - {"explained_variance", "ESS"}:  # of each time step alone
            torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)
        parameters = list(actor.parameters())
        losses = [key for key in expected.keys() if key.startswith("loss")]
        totals = [sum(out[key] for key in losses) for out in (found, expected)]
        for one, other in zip(*(torch.autograd.grad(total, parameters) for total in totals)):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("burn_in", [0, 3])
def test_recurrent_loss_metrics_cover_all_sequence_steps(burn_in):
    """Of one sequence alone each time step is a single row, all of whose variance is explained."""
    trainer = built("ppo_recurrent", burn_in=burn_in)
    batch = trainer.advantage(trainer.collector.collect().clone())
    batch["action_log_prob"] -= torch.rand(batch.shape)  # that of a policy further away
    told = trainer.loss_module(batch[:1].clone())
    rows = batch[0, burn_in:]
    error = rows["value_target"] - rows["state_value"]
    explained = 1 - error.var(correction=0) / rows["value_target"].var(correction=0)
    torch.testing.assert_close(told["explained_variance"].mean(), explained)
    now = trainer.evaluate.policy.get_dist(batch[:1].clone()).log_prob(batch[:1]["action"])
    ratio = (now[0, burn_in:] - rows["action_log_prob"]).exp()
    sample_size = ratio.sum() ** 2 / ratio.square().sum()
    torch.testing.assert_close(told["ESS"].mean(), sample_size / len(rows))


class TwoOutputs(nn.Linear):
    def forward(self, observation):
        return super().forward(observation).split([4, 2], -1)


def with_two_outputs(loss):
    """A loss whose actor and critic read one output each of a body, and these networks."""
    env = make_env("CartPole-v1", 2)
    body = TensorDictModule(TwoOutputs(4, 6), ["observation"], ["features", "task"])
    body.out_features = 4
    value = TensorDictModule(nn.Linear(2, 1), ["task"], ["state_value"])
    actor, critic = make_actor(env, body=body), TensorDictSequential(body, value)
    return with_shared_backbone(loss, (actor, critic)), env, actor, critic


def test_shared_backbone_trains_every_output():
    loss, env, actor, critic = with_two_outputs(ClipPPOLoss)
    assert isinstance(loss, SharedBackbone)
    batch = VectorCollector(env, actor, steps_per_env=8).collect()
    batch = GAE(gamma=0.9, value_network=critic)(batch)
    assert "task" in batch.keys()  # of the policy that acted: no gradient goes through it
    plain, weight = ClipPPOLoss(actor, critic), loss.body.module.weight
    found, expected = (
        torch.autograd.grad(one(batch.clone())["loss_critic"], weight)[0] for one in (loss, plain)
    )
    torch.testing.assert_close(found, expected)
    assert expected.abs().sum() > 0


def test_shared_backbone_forwards_settings_to_loss():
    class Scaled(ClipPPOLoss):
        scale = 1.0

    loss, *_ = with_two_outputs(Scaled)
    loss.scale = 3.0
    assert (loss.scale, loss.loss.scale) == (3.0, 3.0)
    assert not loss.eval().training


@pytest.mark.parametrize("shared", [True, False])
def test_backbone_lr_scale_sets_learning_rate_of_hidden_layers(shared):
    trainer = built("ppo", shared_backbone=shared, backbone_lr_scale=0.25, lr_schedule="constant")
    trainer.run()
    heads, body = trainer.optimizer.param_groups
    assert float(body["lr"]) == pytest.approx(0.25 * float(heads["lr"]))
    everything = {id(p) for p in trainer.loss_module.parameters()}
    assert {id(p) for group in (heads, body) for p in group["params"]} == everything
    assert {tuple(p.shape) for p in body["params"]} == {(8,), (8, 4)}
    assert len(body["params"]) == (2 if shared else 4)


def test_build_rejects_backbone_lr_scale_without_hidden_layers():
    with raises_setting("backbone_lr_scale"):
        built("ppo", hidden_sizes=[], backbone_lr_scale=0.25)
    built("ppo", hidden_sizes=[], critic_hidden_sizes=[8], backbone_lr_scale=0.25)


# ---------------------------------------------------------------------- schedules
def test_coefficients_follow_their_schedules():
    trainer = built("ppo, schedules")
    seen: dict[str, list[float]] = {"clip_epsilon": [], "entropy_coeff": [], "critic_coeff": []}

    def look() -> None:
        for name, values in seen.items():
            values.append(float(getattr(trainer.loss_module, name)))

    trainer.register_op("pre_optim_steps", look)
    trainer.run()
    assert seen["clip_epsilon"] == pytest.approx([0.2 * (1 - n / 8) for n in range(8)])
    assert seen["entropy_coeff"] == pytest.approx([0.01] * 4 + [0.001] * 4)
    assert seen["critic_coeff"][0] == 0.5
    assert float(trainer.loss_module.clip_epsilon) == 0.0
    assert trainer.update.plain_reason == ""


@pytest.mark.parametrize(
    ("clip_value", "last"), [(True, 0.2 / 8), (0.5, 0.5)], ids=["as clip_epsilon", "its own"]
)
def test_clip_value_follows_clip_schedule_unless_set(clip_value, last):
    trainer = built("ppo", clip_value=clip_value, clip_schedule="linear")
    seen: list[float] = []
    trainer.register_op(
        "pre_optim_steps", lambda: seen.append(float(trainer.loss_module.clip_value))
    )
    trainer.run()
    assert len(seen) == 8
    assert seen[-1] == pytest.approx(last)


@pytest.mark.parametrize("loss", ["A2CLoss", "PPOLoss"])
@pytest.mark.parametrize(
    ("recipe", "settings"), [("a2c", {"critic_epochs": 1}), ("reinforce", {"baseline": False})]
)
def test_named_loss_omits_separately_fitted_or_absent_critic(recipe, settings, loss):
    trainer = built(recipe, loss=loss, **settings)
    trainer.run()
    assert "train/loss_objective" in trainer.journal.latest
    assert "train/loss_critic" not in trainer.journal.latest


@pytest.mark.parametrize(
    ("recipe", "settings"), [("ppo", {"critic_epochs": 1}), ("reinforce", {"baseline": False})]
)
def test_build_rejects_loss_that_cannot_omit_critic(recipe, settings):
    with raises_setting("critic_coeff"):
        built(recipe, loss="ReinforceLoss", **settings)
    built(recipe, loss="ReinforceLoss")


@pytest.mark.parametrize("shared_backbone", [False, True])
def test_build_preserves_initial_beta_of_named_loss(shared_backbone):
    loss = built("ppo", loss="kit.losses:KLPENPPOLoss", shared_backbone=shared_backbone).loss_module
    assert float(loss.beta) == 1.0, "not the next one of the batch on which it was tried"


@pytest.mark.parametrize("loss", ["PPOLoss", "kit.losses:KLPENPPOLoss"])
def test_named_loss_trains_on_sequences_with_burn_in(loss):
    env = EnvConfig("Pendulum-v1", 4)
    ledger = built("ppo_recurrent", env=env, loss=loss, burn_in=3).run()
    assert ledger.gradient_steps == 8 * 2 * 4


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("a2c", {"n_step": 5, "gae_lambda": 0.9}, "n_step"),
        ("a2c", {"advantage_norm": "minibatch"}, "advantage_norm"),
        ("ppo", {"loss": "KLPENPPOLoss"}, "loss"),
        ("ppo", {"clip_epsilon": 1.5}, "clip_epsilon"),
        ("ppo_recurrent", {"clip_epsilon": 2.0}, "clip_epsilon"),
        ("ppo", {"clip_epsilon": 0.0}, "clip_epsilon"),
        ("ppo", {"lr_schedule": "lineal"}, "lr_schedule"),
        ("ppo", {"lr_schedule": "lr_schedule"}, "lr_schedule"),
        ("ppo_pixels", {"env": EnvConfig("CartPole-v1"), "frame_stack": 1}, "env.id"),
        ("ppo_pixels", {"convolutions": [[8, 9, 9], [8, 3, 1]]}, "convolutions"),
        ("a2c", {"env": SEVERAL_ACTIONS}, "loss"),
        ("reinforce", {"env": SEVERAL_ACTIONS}, "loss"),
        ("ppo", {"normalize_advantage": False, "advantage_norm": "batch"}, "advantage_norm"),
        ("ppo", {"initial_log_std": -1.0}, "initial_log_std"),
        ("reinforce", {"baseline": False, "gae_lambda": 0.9}, "gae_lambda"),
        ("reinforce", {"baseline": False, "critic_coeff": 0.1}, "critic_coeff"),
        ("reinforce", {"baseline": False, "critic_loss": "l1"}, "critic_loss"),
        ("reinforce", {"baseline": False, "critic_schedule": "linear"}, "critic_schedule"),
        ("reinforce", {"baseline": False, "shared_backbone": True}, "shared_backbone"),
        ("reinforce", {"baseline": False, "critic_hidden_sizes": [8]}, "critic_hidden_sizes"),
        ("trpo", {"learning_rate": 0.1}, "learning_rate"),
    ],
)
def test_build_rejects_settings_unsupported_by_algorithm(name, settings, message):
    with raises_setting(message):
        built(name, **settings)


@pytest.mark.parametrize("more", [{"update_epochs": 2}, {"minibatch_size": 32}])
def test_build_warns_of_several_trust_region_steps(more):
    steps = OnPolicySteps(512, steps_per_env=16, **{"update_epochs": 1, **more})
    with pytest.warns(UserWarning, match="several trust region steps per batch"):
        built("trpo", steps=steps)


# ---------------------------------------------------------------------- as they learn
def test_ppo_pixels_learns_tiny_image_task():
    steps = OnPolicySteps(
        total_policy_steps=4_096, steps_per_env=32, update_epochs=4, minibatch_size=64,
        evaluation_every=None,
    )  # fmt: skip
    env = EnvConfig("kit.testing.envs:kit/Glimpse-v0", 8)
    settings = {"steps": steps, "env": env, "convolutions": [[8, 3, 2]], "frame_stack": 1}
    trainer = built("ppo_pixels", hidden_sizes=[32], learning_rate=5e-3, **settings)
    kinds = set()
    trainer.register_op("pre_steps_log", lambda batch: kinds.add(batch["observation"].dtype) or {})
    trainer.run()
    assert trainer.journal.latest["evaluation/return"] > 7.0
    assert kinds == {torch.uint8}  # until the network


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("impala", {}),
        ("a2c", {"n_step": 5}),
        ("ppo", {"clip_value": True, "learning_rate": 1e-3}),  # clipped values follow slowly
        ("ppo", {"shared_backbone": True}),
        ("trpo", {}),
    ],
)
def test_recipes_solve_cartpole_within_100_000_policy_steps(name, settings):
    module = importlib.import_module(f"recipes.{name}")
    config = module.Config(log_dir=None, progress=False, **settings)
    config.steps.evaluation_every, config.steps.evaluation_episodes = None, 100
    trainer = module.build(config)
    ledger = trainer.run()
    assert ledger.compare(trainer.plan) == []
    assert ledger.policy_steps <= 100_000
    assert trainer.journal.latest["evaluation/return"] >= 475.0


def test_reinforce_without_baseline_uses_reward_to_go():
    advantage = built("reinforce without baseline").advantage
    assert isinstance(advantage, RewardToGo)
    assert isinstance(built("reinforce").advantage, GAE)
