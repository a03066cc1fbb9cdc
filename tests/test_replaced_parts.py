"""Networks and optimizers that the caller of a recipe's build replaces, and one discount."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, RMSprop
from torchrl.objectives import ClipPPOLoss, SACLoss
from torchrl.trainers import DefaultOptimizationStepper

import recipes.a2c
import recipes.dqn
import recipes.dreamerv3
import recipes.ppo
import recipes.sac
import recipes.td3
import recipes.trpo
from kit.advantages import GAE
from kit.buffers import make_replay_buffer
from kit.envs import make_env
from kit.experiment import EnvConfig, OffPolicySteps, OnPolicySteps
from kit.modules import make_action_value, make_actor, make_q_network, make_value
from kit.steps import SettingError
from kit.trainer import Trainer
from tests.errors import raises_setting
from tests.tiny import off_policy_plan, on_policy_plan, ppo_parts, sac_parts

ON: dict[str, Any] = {
    "total_policy_steps": 16, "steps_per_env": 8, "update_epochs": 1, "minibatch_size": 8,
    "evaluation_every": None, "evaluation_episodes": 1,
}  # fmt: skip
OFF: dict[str, Any] = {
    "total_policy_steps": 20, "learning_starts": 10, "minibatch_size": 4,
    "evaluation_every": None, "evaluation_episodes": 1,
}  # fmt: skip
QUIET: dict[str, Any] = {"hidden_sizes": [8], "log_dir": None, "progress": False}


def ppo(**changes: Any) -> recipes.ppo.Config:
    settings = {"env": EnvConfig(num_envs=2), "steps": OnPolicySteps(**ON), **QUIET}
    return recipes.ppo.Config(**{**settings, **changes})


def off(recipe: Any, **changes: Any) -> Any:
    return recipe.Config(**{"steps": OffPolicySteps(**OFF), **QUIET, **changes})


def optimizers_of(trainer: Trainer) -> list[type]:
    return [type(one) for one in trainer.update.optimizers.values()]


def weights(trainer: Trainer) -> list[torch.Tensor]:
    trainer.run()
    return [one.detach().clone() for one in trainer.loss_module.parameters()]


# ---------------------------------------------------------------------- optimizers
@pytest.mark.parametrize("optimizer", [SGD, "SGD", lambda weights: SGD(weights, lr=5e-4)])
def test_build_uses_passed_optimizer(optimizer):
    trainer = recipes.ppo.build(ppo(), optimizer=optimizer)
    assert optimizers_of(trainer) == [SGD]
    assert trainer.optimizer.param_groups[0]["lr"] == 5e-4  # the recipe's, or the function's
    trainer.shutdown()


def test_optimizer_name_matches_recipe_default_bitwise():
    named = weights(recipes.sac.build(off(recipes.sac), optimizer="Adam"))
    assert all(map(torch.equal, named, weights(recipes.sac.build(off(recipes.sac)))))


def test_optimizer_class_replaces_every_optimizer():
    trainer = recipes.td3.build(off(recipes.td3), optimizer=RMSprop)
    assert optimizers_of(trainer) == [RMSprop, RMSprop]
    trainer.shutdown()


def test_optimizer_instance_must_hold_all_parameters():
    env = make_env("CartPole-v1", 2)
    actor, critic = make_actor(env, (8,)), make_value(env, (8,))
    networks = {"make_actor": lambda env: actor, "make_critic": lambda env: critic}
    cfg = ppo(hidden_sizes=[64, 64])
    whole = SGD([*actor.parameters(), *critic.parameters()], lr=0.1)
    trainer = recipes.ppo.build(cfg, **networks, optimizer=whole)
    assert trainer.optimizer is whole
    trainer.shutdown()
    with raises_setting("optimizer"):
        recipes.ppo.build(cfg, **networks, optimizer=SGD(actor.parameters(), lr=0.1))


def test_build_rejects_an_optimizer_of_other_parameters():
    with pytest.raises(SettingError, match="lacks 8 of the 8"):
        recipes.ppo.build(ppo(), optimizer=lambda weights: Adam([nn.Parameter(torch.zeros(1))]))


def test_build_rejects_settings_ignored_by_passed_optimizer():
    with raises_setting("learning_rate"):
        recipes.ppo.build(ppo(learning_rate=0.1), optimizer=lambda weights: SGD(weights))
    recipes.ppo.build(ppo(learning_rate=0.1), optimizer=SGD).shutdown()
    cfg = recipes.a2c.Config(optimizer="adam", log_dir=None, progress=False)
    with raises_setting("optimizer"):
        recipes.a2c.build(cfg, optimizer=SGD)


# ---------------------------------------------------------------------- networks
def test_build_trains_and_acts_with_passed_networks():
    made: dict[str, nn.Module] = {}

    def factory(name: str, make: Any) -> Any:
        def create(env: Any) -> nn.Module:
            made[name] = make(env, (4,))
            return made[name]

        return create

    trainer = recipes.ppo.build(
        ppo(hidden_sizes=[64, 64]),
        make_actor=factory("actor", make_actor),
        make_critic=factory("critic", make_value),
    )
    assert trainer.collector.policy is made["actor"]
    before = [one.detach().clone() for one in made["critic"].parameters()]
    trainer.run()
    assert not all(map(torch.equal, before, made["critic"].parameters()))


def test_build_replaces_critic_and_rejects_its_settings():
    trainer = recipes.ppo.build(ppo(), make_critic=lambda env: make_value(env, (4,)))
    shapes = {tuple(one.shape) for one in trainer.loss_module.parameters()}
    assert {(8, 4), (4, 4)} <= shapes  # of the recipe's actor and of the caller's critic
    trainer.shutdown()
    cfg = ppo(critic_hidden_sizes=[3])
    with raises_setting("critic_hidden_sizes"):
        recipes.ppo.build(cfg, make_critic=lambda env: make_value(env, (4,)))
    with raises_setting("shared_backbone"):
        recipes.ppo.build(ppo(shared_backbone=True), make_critic=make_value)


@pytest.mark.parametrize(
    ("name", "network", "make"),
    [
        ("dqn", "make_critic", make_q_network),
        ("sac", "make_critic", make_action_value),
        ("sac", "make_actor", lambda env: make_actor(env, continuous="tanh_normal")),
        ("td3", "make_actor", lambda env: make_actor(env, continuous="deterministic")),
        ("droq", "make_critic", make_action_value),
        ("crossq", "make_actor", lambda env: make_actor(env, continuous="tanh_normal")),
        ("sac_discrete", "make_actor", make_actor),
        ("svpg", "make_actor", make_actor),
    ],
)
def test_recipes_use_passed_network(name, network, make):
    recipe, calls = importlib.import_module(f"recipes.{name}"), []

    def counted(env: Any) -> Any:
        calls.append(env)
        return make(env)

    trainer = recipe.build(recipe.Config(log_dir=None, progress=False), **{network: counted})
    assert len(calls) == (4 if name == "svpg" else 1)
    trainer.shutdown()


@pytest.mark.parametrize(
    ("recipe", "part", "value"),
    [
        ("ppo", "loss_module", nn.Linear(1, 1)),
        ("trpo", "optimizer", SGD),
        ("dqn", "make_actor", make_actor),
        ("dreamerv3", "make_actor", make_actor),
    ],
)
def test_build_rejects_parts_that_the_recipe_does_not_use(recipe, part, value):
    module = importlib.import_module(f"recipes.{recipe}")
    with raises_setting(part):
        module.build(module.Config(log_dir=None, progress=False), **{part: value})


def test_build_rejects_an_optimizer_next_to_an_update():
    update = ppo_parts(on_policy_plan())["update"]
    with raises_setting("optimizer"):
        recipes.ppo.build(ppo(), update=update, optimizer=SGD)


def test_build_passes_loss_and_optimizer_to_torchrl_stepper():
    env = make_env("CartPole-v1", 2)
    actor, critic = make_actor(env), make_value(env)
    loss = ClipPPOLoss(actor, critic)
    optimizer = SGD(loss.parameters(), lr=0.1)
    trainer = recipes.ppo.build(
        ppo(),
        update=DefaultOptimizationStepper(),
        loss_module=loss,
        optimizer=optimizer,
    )
    assert (trainer.loss_module, trainer.optimizer) == (loss, optimizer)
    trainer.shutdown()


# ---------------------------------------------------------------------- one discount
def test_build_rejects_a_loss_with_another_discount():
    class Farsighted(SACLoss):
        def __init__(self, *networks: Any, **settings: Any) -> None:
            super().__init__(*networks, **settings)
            self.make_value_estimator(gamma=0.999)

    cfg = off(recipes.sac, env=EnvConfig("Pendulum-v1", num_envs=1, normalize_reward=True))
    with raises_setting("gamma"):
        recipes.sac.build(cfg, make_loss=Farsighted)


def test_trainer_rejects_different_discounts():
    parts = ppo_parts(on_policy_plan())
    critic = parts["advantage"].value_network
    parts["update"].loss_module.make_value_estimator(gamma=0.9, lmbda=0.95)
    with raises_setting("gamma"):
        Trainer(on_policy_plan(), **parts)
    Trainer(on_policy_plan(), **parts | {"advantage": GAE(gamma=0.9, value_network=critic)})


@pytest.mark.parametrize("set_by", ["estimator", "TorchRL's default"])
def test_trainer_rejects_a_replay_buffer_with_another_discount(set_by):
    plan = off_policy_plan()
    parts = sac_parts(plan)
    if set_by != "estimator":
        parts["update"].loss_module._value_estimator = None
    parts["buffer"] = make_replay_buffer(100, 4, n_step=3, gamma=0.9)
    with raises_setting("gamma"):
        Trainer(plan, **parts)


def test_loss_loads_state_without_value_estimator():
    trainer = recipes.ppo.build(ppo(gamma=0.9))
    state = trainer.loss_module.state_dict()
    old = {name: one for name, one in state.items() if "_value_estimator" not in name}
    assert len(old) < len(state)
    trainer.loss_module.load_state_dict(old)
    assert float(trainer.loss_module.value_estimator.gamma) == pytest.approx(0.9)
    trainer.shutdown()
