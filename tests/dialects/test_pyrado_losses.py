"""Losses of recipes with pyrado's settings, compared with pyrado's formulas."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss, smooth_l1_loss

from kit import EnvConfig
from kit.dialects import Pyrado
from recipes import a2c, dqn, ppo, sac

pytestmark = pytest.mark.slow

ROLLOUTS = {"max_iter": 1, "min_steps": 8, "env_max_steps": 4, "library_defaults": True}
MEMORY = ROLLOUTS | {"memory_size": 100, "num_init_memory_steps": 8, "batch_size": 4}


def build(recipe, env, **settings):
    """Build a trainer with pyrado's settings, collect a batch and change the weights a little."""
    steps = Pyrado(**settings)
    config = recipe.Config(
        env=EnvConfig(id=env, num_envs=1), steps=steps, log_dir=None, progress=False
    )
    trainer = recipe.build(config)
    with torch.no_grad():
        batch = trainer.collect()
        batch = batch if trainer.advantage is None else trainer.advantage(batch)
        for weight in trainer.loss_module.parameters():
            weight += 0.1 * torch.randn_like(weight)
    batch = batch[batch["collector", "mask"]]
    trainer.shutdown()
    return trainer.loss_module, batch


def total(losses):
    return sum(value for name, value in losses.items() if name.startswith("loss_"))


def policy(loss, batch):
    """Return log-probabilities and the entropy of the present policy."""
    with loss.actor_network_params.to_module(loss.actor_network):
        distribution = loss.actor_network.get_dist(batch)
    return distribution.log_prob(batch["action"]), distribution.entropy().mean()


def value(loss, batch):
    with loss.critic_network_params.to_module(loss.critic_network):
        return loss.critic_network(batch.select("observation"))["state_value"].squeeze(-1)


def test_a2c_loss_is_that_of_pyrado():
    loss, batch = build(a2c, "Pendulum-v1", algo="a2c", vfcn_coeff=0.7, **ROLLOUTS)
    logp, entropy = policy(loss, batch)
    error = batch["value_target"].squeeze(-1) - value(loss, batch)
    expected = -(batch["advantage"].squeeze(-1) * logp).mean() + 0.7 * 0.5 * error.pow(2).mean()
    torch.testing.assert_close(total(loss(batch)), expected - 1e-3 * entropy)


@pytest.mark.parametrize("algo", ["ppo", "ppo2"])
def test_ppo_losses_are_those_of_pyrado(algo):
    loss, batch = build(ppo, "Pendulum-v1", algo=algo, eps_clip=0.1, **ROLLOUTS)
    logp, entropy = policy(loss, batch)
    advantage = batch["advantage"].squeeze(-1)
    ratio = (logp - batch["action_log_prob"]).exp()
    clipped = ratio.clamp(0.9, 1.1)
    expected = -torch.min(ratio * advantage, clipped * advantage).mean()
    assert (ratio != clipped).any()
    if algo == "ppo2":
        old, target = batch["state_value"].squeeze(-1), batch["value_target"].squeeze(-1)
        present = value(loss, batch)
        bounded = old + (present - old).clamp(-0.1, 0.1)
        errors = torch.max((target - present).pow(2), (target - bounded).pow(2))
        expected = expected + 0.5 * 0.5 * errors.mean() - 1e-3 * entropy
    torch.testing.assert_close(total(loss(batch)), expected)


def test_dql_loss_is_that_of_pyrado():
    loss, batch = build(dqn, "CartPole-v1", algo="dql", gamma=0.9, num_updates_per_step=1, **MEMORY)
    with loss.value_network_params.to_module(loss.value_network):
        chosen = loss.value_network(batch.select("observation"))["action_value"]
    with loss.target_value_network_params.to_module(loss.value_network):
        later = loss.value_network(batch["next"].select("observation"))["action_value"].amax(-1)
    going = 1.0 - batch["next", "terminated"].squeeze(-1).float()
    expected = batch["next", "reward"].squeeze(-1) + going * 0.9 * later
    chosen = chosen.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(loss(batch)["loss"], smooth_l1_loss(chosen, expected.detach()))


def test_sac_losses_are_those_of_pyrado():
    loss, batch = build(sac, "Pendulum-v1", algo="sac", gamma=0.9, num_updates_per_step=1, **MEMORY)

    def sampled(observations, seed):
        torch.manual_seed(seed)
        with loss.actor_network_params.to_module(loss.actor_network):
            distribution = loss.actor_network.get_dist(observations.select("observation"))
        action = distribution.rsample()
        return action, distribution.log_prob(action)

    def q(parameters, observations, action):
        both = observations.select("observation").set("action", action)
        return loss._vmap_qnetworkN0(both, parameters)["state_action_value"].squeeze(-1)

    alpha = loss.log_alpha.exp().detach()
    action, logp = sampled(batch["next"], 1)
    later = q(loss.target_qvalue_network_params, batch["next"], action).amin(0) - alpha * logp
    going = 1.0 - batch["next", "terminated"].squeeze(-1).float()
    target = (batch["next", "reward"].squeeze(-1) + going * 0.9 * later).detach()
    present = q(loss.qvalue_network_params, batch, batch["action"])
    expected = sum(mse_loss(one, target) for one in present)  # pyrado: half of it
    torch.manual_seed(1)
    torch.testing.assert_close(loss.qvalue_v2_loss(batch)[0], expected)
    action, logp = sampled(batch, 2)
    expected = (alpha * logp - q(loss.qvalue_network_params, batch, action).amin(0)).mean()
    torch.manual_seed(2)
    torch.testing.assert_close(loss.actor_loss(batch)[0], expected)
