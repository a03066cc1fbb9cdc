"""Every setting of SAC and PPO changes the run that it is a setting of."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

import recipes.ppo
import recipes.sac
from kit.experiment import EnvConfig, OffPolicySteps, OnPolicySteps
from tests.tiny import weights

AROUND = {
    "env", "steps", "collector", "collector_kwargs", "device", "threads", "compile", "logger",
    "runs", "resume", "log_every", "checkpoint_every", "time_limit", "stop_at_return", "progress",
    "loss",
}  # fmt: skip
"""settings that say where and how a run is made; other files test them"""

CHANGED: dict[str, dict[str, Any]] = {
    "sac": {
        "seed": 1, "gamma": 0.5, "buffer_size": 12, "n_step": 2, "hidden_sizes": [5],
        "activation": "tanh", "num_critics": 3, "tau": 0.5, "initial_alpha": 0.1,
        "target_entropy": -3.0, "learning_rate": 1e-2, "max_grad_norm": 0.01,
    },
    "ppo": {
        "seed": 1, "gamma": 0.5, "hidden_sizes": [5], "activation": "relu", "shared_body": True,
        "initial_log_std": -1.0, "entropy_coeff": 0.1, "critic_coeff": 0.1, "critic_loss": "l1",
        "gae_lambda": 0.5, "normalize_advantage": False, "normalize_over": "batch",
        "learning_rate": 1e-2, "body_lr_factor": 0.5, "anneal": "constant", "max_grad_norm": 0.01,
        "clip_epsilon": 1e-3, "anneal_clip": "linear", "clip_value": 1e-3, "target_kl": 1e-9,
        "anneal_entropy": "linear", "anneal_critic": "linear",
    },
}  # fmt: skip
NEEDS: dict[str, dict[str, Any]] = {
    "anneal_entropy": {"entropy_coeff": 0.1},
    "anneal_clip": {"clip_epsilon": 1e-3},
    "body_lr_factor": {"shared_body": True},
}
"""what has to be set for a setting to mean something"""
RECIPES = {"sac": recipes.sac, "ppo": recipes.ppo}
SETTINGS = [(name, setting) for name, changes in CHANGED.items() for setting in changes]


def learnt(name: str, **changes: Any) -> list[torch.Tensor]:
    """The weights after a short run with the given settings."""
    common = {"hidden_sizes": [4], "runs": None, "logger": "none", "progress": False, **changes}
    if name == "sac":
        steps: Any = OffPolicySteps(
            total_policy_steps=40, learning_starts=10, minibatch_size=4, evaluation_every=None
        )
    else:
        steps = OnPolicySteps(
            total_policy_steps=128, steps_per_env=16, minibatch_size=16, evaluation_every=None
        )
        common["env"] = EnvConfig(id="Pendulum-v1", num_envs=2)
    recipe = RECIPES[name]
    trainer = recipe.build(recipe.Config(steps=steps, **common))
    trainer.run()
    return list(weights(trainer).values())


@cache
def base(name: str, setting: str) -> list[torch.Tensor]:
    """The weights with defaults, but for what the setting needs."""
    return learnt(name, **NEEDS.get(setting, {}))


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    pairs = list(zip(one, other))
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in pairs
    )


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_a_setting_changes_what_is_learnt(name, setting):
    before = base(name, setting if setting in NEEDS else "")
    changes = {**NEEDS.get(setting, {}), setting: CHANGED[name][setting]}
    assert not same(learnt(name, **changes), before)


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_same_settings_learn_the_same(name):
    assert same(learnt(name), base(name, ""))


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_setting_is_tried(name):
    fields = {field.name for field in dataclasses.fields(RECIPES[name].Config)}
    assert fields - AROUND == set(CHANGED[name])


def test_the_polyak_coefficient_is_that_of_the_settings():
    config = recipes.sac.Config(tau=0.25, runs=None, logger="none", progress=False)
    trainer = recipes.sac.build(config)
    assert trainer.update.target_updater.eps == 0.75
    trainer.shutdown()


def test_the_weight_of_the_entropy_bonus_is_that_of_the_settings():
    config = recipes.ppo.Config(entropy_coeff=0.25, runs=None, logger="none", progress=False)
    trainer = recipes.ppo.build(config)
    assert float(trainer.loss_module.entropy_coeff) == 0.25
    trainer.shutdown()
