"""A critic that is fitted on its own, before the advantages that it estimates."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch.optim import Adam

import recipes.a2c
import recipes.ppo
from kit.advantages import GAE
from kit.collectors import VectorCollector
from kit.envs import make_env
from kit.experiment import EnvConfig
from kit.hooks import FitCritic, StopWhen
from kit.modules import make_actor_critic
from kit.steps import StepPlan
from kit.steps.settings import OnPolicySteps
from tests.errors import raises_setting

HORIZON = {"gamma": 0.99, "lmbda": 0.9}


def collected(num_envs=3, steps=7):
    env = make_env("CartPole-v1", num_envs)
    actor, critic = make_actor_critic(env, hidden_sizes=[8])
    settings = {"frames_per_batch": num_envs * steps, "total_frames": -1}
    return next(iter(VectorCollector(env, actor, **settings))), critic


def build(recipe, log_dir=None, hooks=(), num_normalization_steps=0, **settings):
    steps = OnPolicySteps(
        total_policy_steps=240, steps_per_env=10, update_epochs=1, minibatch_size=None,
        evaluation_every=None if num_normalization_steps else 120, evaluation_episodes=1,
        num_normalization_steps=num_normalization_steps,
    )  # fmt: skip
    settings = {"critic_epochs": 3, "critic_minibatch_size": 8, **settings}
    where = None if log_dir is None else str(log_dir)
    normalize = num_normalization_steps > 0
    env = EnvConfig(num_envs=2, normalize_observation=normalize, normalize_reward=False)
    config = recipe.Config(env=env, steps=steps, log_dir=where, progress=False, **settings)
    return recipe.build(config, hooks=list(hooks))


def weights(trainer):
    return [value.clone() for value in trainer.loss_module.state_dict().values()]


# ---------------------------------------------------------------------- what it does
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("compile", ["auto", False])
def test_fit_critic_matches_hand_written_loop(compile, precision):
    batch, critic = collected()
    by_hand = copy.deepcopy(critic)
    hook = FitCritic(critic, epochs=4, minibatch_size=8, learning_rate=0.01, compile=compile,
                     precision=precision, **HORIZON)  # fmt: skip
    optimizer = Adam(by_hand.parameters(), lr=0.01, fused=True)
    for seed in range(3):
        torch.manual_seed(seed)
        hook.take(batch)
        hook.fit()
        rows = GAE(value_network=by_hand, **HORIZON)(batch.copy()).reshape(-1)
        torch.manual_seed(seed)
        for _ in range(4):
            for index in torch.randperm(21).split(8):
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                    value = by_hand(rows[index].select("observation"))["state_value"]
                optimizer.zero_grad()
                (value - rows[index]["value_target"]).square().mean().backward()
                optimizer.step()
    assert hook.gradient_steps == 3 * 4 * 3
    for own, other in zip(critic.parameters(), by_hand.parameters()):
        assert torch.equal(own, other)


def test_fit_critic_leaves_batch_unchanged():
    batch, critic = collected()
    before = batch.clone()
    hook = FitCritic(critic, epochs=1, **HORIZON)
    hook.take(batch)
    hook.fit()
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert (batch == before).all()


def test_fit_critic_ignores_padded_steps():
    batch, critic = collected()
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 3:] = False
    batch["collector", "mask"] = mask
    hook = FitCritic(critic, epochs=1, minibatch_size=1, **HORIZON)
    hook.take(batch)
    hook.fit()
    assert hook.gradient_steps == 17


def test_logged_loss_is_mean_over_minibatches():
    batch, critic = collected()
    hook = FitCritic(critic, epochs=2, minibatch_size=7, learning_rate=1e-12, **HORIZON)
    hook.take(batch)
    hook.fit()
    targets = hook.targets(batch.copy())
    expected = (targets["state_value"] - targets["value_target"]).square().mean()
    torch.testing.assert_close(hook.log(batch)["critic/loss"], expected)


# ---------------------------------------------------------------------- in recipes
@pytest.mark.parametrize("recipe", [recipes.ppo, recipes.a2c])
def test_policy_loss_excludes_critic(recipe):
    trainer = build(recipe)
    ledger = trainer.run()
    assert ledger.compare(trainer.plan) == []
    assert ledger.gradient_steps == 12, "those of the policy"
    assert trainer.journal.latest["critic/gradient_steps"] == 12 * 3 * 3
    assert "loss_critic" not in trainer.last_metrics
    assert "critic/loss" in trainer.journal.latest


def test_fit_critic_skips_initial_random_steps():
    trainer = build(recipes.ppo, num_normalization_steps=40)
    trainer.run()
    assert trainer.ledger.random_policy_steps == 40
    assert trainer.journal.latest["critic/gradient_steps"] == 10 * 3 * 3


def test_fit_critic_uses_rewards_changed_by_other_hook():
    def scaled(batch):
        batch["next", "reward"] = 100.0 * batch["next", "reward"]
        return batch

    trainer = build(recipes.ppo)
    trainer.register_op("batch_process", scaled)
    targets = []
    hook = trainer.registered_modules["fit_critic"]
    hook.targets.register_forward_hook(lambda *_: targets.append(_[2]["next", "reward"].max()))
    trainer.run()
    assert min(targets) == 100.0


def test_advantages_use_fitted_critic():
    seen = []

    class Look(StopWhen):
        operations: ClassVar = {"pre_epoch_log": "look"}

        def look(self, batch):
            again = GAE(value_network=trainer.advantage.value_network, gamma=0.99, lmbda=0.95)
            seen.append(torch.equal(batch["advantage"], again(batch.clone())["advantage"]))

    trainer = build(recipes.ppo, hooks=[Look("evaluation/return", reached=1e9)])
    trainer.run()
    assert seen == [True] * 12


@pytest.mark.parametrize("recipe", [recipes.ppo, recipes.a2c])
def test_resumed_run_continues_bitwise(recipe, tmp_path):
    whole = build(recipe)
    whole.run()
    stopped = build(recipe, tmp_path, hooks=[StopWhen("evaluation/return", reached=0)])
    assert stopped.run().policy_steps == 120
    resumed = build(recipe, tmp_path, resume="latest")
    resumed.run()
    assert all(map(torch.equal, weights(resumed), weights(whole)))


def test_fit_critic_uses_prefill_in_first_batch():
    plan = StepPlan(
        total_policy_steps=72, num_envs=2, steps_per_env=8, update_epochs=1, minibatch_size=8,
        prefill_steps=24, prefill_random=False, prefill_in_first_batch=True, final_evaluation=False,
    )  # fmt: skip
    settings = {"critic_epochs": 1, "critic_minibatch_size": 8, "log_dir": None, "progress": False}
    trainer = recipes.ppo.build(recipes.ppo.Config(EnvConfig(num_envs=2), steps=plan, **settings))
    fitted = trainer.registered_modules["fit_critic"]
    counts = []
    trainer.register_op(
        "post_steps", lambda: counts.append((fitted.gradient_steps, trainer.ledger.gradient_steps))
    )
    trainer.run()
    assert counts == [(5, 5), (7, 7), (9, 9)]


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("critic_coeff", 0.7),
        ("critic_schedule", "linear"),
        ("shared_backbone", True),
        ("clip_value", 0.2),
    ],
)
def test_build_rejects_settings_incompatible_with_fit_critic(setting, value):
    with raises_setting(setting):
        build(recipes.ppo, **{setting: value})


@pytest.mark.parametrize(
    ("setting", "value"), [("critic_minibatch_size", 8), ("critic_learning_rate", 0.1)]
)
def test_build_rejects_critic_settings_without_critic_epochs(setting, value):
    with raises_setting(setting):
        recipes.ppo.build(recipes.ppo.Config(log_dir=None, progress=False, **{setting: value}))


def test_fit_critic_rejects_invalid_settings():
    _, critic = collected()
    with raises_setting("critic_epochs"):
        FitCritic(critic, epochs=0, **HORIZON)
    with raises_setting("critic_minibatch_size"):
        FitCritic(critic, epochs=1, minibatch_size=0, **HORIZON)
    with raises_setting("precision"):
        FitCritic(critic, epochs=1, precision="float16", **HORIZON)


def test_fit_critic_rejects_recurrent_critic():
    _, critic = collected()
    critic.in_keys = [*critic.in_keys, "is_init"]
    with raises_setting("critic"):
        FitCritic(critic, epochs=1, **HORIZON)


def test_fit_critic_with_lambda_one_uses_empirical_returns():
    batch, critic = collected()
    batch["next", "terminated"][:, -1] = batch["next", "done"][:, -1] = True
    targets = FitCritic(critic, epochs=1, gamma=0.5, lmbda=1.0).targets(batch.copy())
    expected = torch.zeros(len(batch))
    for step in reversed(range(batch.shape[1])):
        going = ~batch["next", "done"][:, step, 0]
        expected = batch["next", "reward"][:, step, 0] + 0.5 * expected * going
        torch.testing.assert_close(targets["value_target"][:, step, 0], expected)
