"""Squashed actions on policy: log-probabilities of the value before the tanh, on every path."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import kl_divergence
from torchrl.collectors import Collector
from torchrl.modules import TanhNormal as TorchRLs
from torchrl.objectives import ClipPPOLoss, KLPENPPOLoss

import recipes.ppo
from kit.advantages import VTrace
from kit.collectors import VectorCollector
from kit.envs import make_env
from kit.experiment import EnvConfig, OnPolicySteps
from kit.modules import make_actor, make_actor_critic, make_value
from kit.modules.distributions import TanhNormal
from tests.errors import raises_setting
from tests.tiny import Scripted, Uneven

SATURATED = 10.0


def saturate(actor):
    """Move the means to where the tanh of float32 is 1."""
    last = [module for module in actor.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        last.bias[: last.out_features // 2] = SATURATED
    return actor


def squashed(env, saturated=True):
    torch.manual_seed(1)
    actor = make_actor(env, (8,), continuous="tanh_normal")
    return saturate(actor) if saturated else actor


def by_loops(batch, space):
    """Log-probabilities ``[num_envs, steps]``, number by number in float64."""
    result = torch.zeros(batch.shape, dtype=torch.float64)
    for env in range(batch.shape[0]):
        for step in range(batch.shape[1]):
            row = batch[env, step]
            for n, (low, high) in enumerate(zip(space.low, space.high)):
                loc, scale = row["loc"][n].item(), row["scale"][n].item()
                u = row["action_pre_tanh"][n].item()
                normal = -0.5 * ((u - loc) / scale) ** 2 - math.log(scale * math.sqrt(2 * math.pi))
                # log(1 - tanh(u)^2), in which nothing cancels
                slope = 2 * (math.log(2) - u - math.log1p(math.exp(-2 * u)))
                result[env, step] += normal - slope - math.log((float(high) - float(low)) / 2)
                action = (high + low) / 2 + (high - low) / 2 * math.tanh(u)
                assert row["action"][n].item() == pytest.approx(action, abs=4e-6)
    return result


PATHS = {
    "auto": lambda env, actor: VectorCollector(env, actor, steps_per_env=6, seed=3),
    "exact": lambda env, actor: VectorCollector(
        env, actor, steps_per_env=6, seed=3, fast_policy="exact"
    ),
    "module": lambda env, actor: VectorCollector(
        env, actor, steps_per_env=6, seed=3, fast_policy="module"
    ),
    "torchrl": lambda env, actor: Collector(
        env, actor, frames_per_batch=6 * env.num_envs, total_frames=-1
    ),
}


@pytest.mark.parametrize("saturated", [False, True])
@pytest.mark.parametrize(("id", "num_envs"), [("Pendulum-v1", 1), (Uneven, 3)])
@pytest.mark.parametrize("path", PATHS)
def test_log_prob_of_squashed_actions_matches_plain_loops(path, id, num_envs, saturated):
    env = make_env(id, num_envs, seed=0)
    actor = squashed(env, saturated)
    collector = PATHS[path](env, actor)
    for _ in range(3):  # called, recorded, replayed
        batch = next(iter(collector))
        wanted = by_loops(batch, env.action_leaves[0].space)
        with torch.no_grad():
            again = actor.get_dist(batch.clone()).log_prob(batch["action"])
        assert again.shape == batch["action_log_prob"].shape == (num_envs, 6)
        for found in (batch["action_log_prob"], again):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=3e-5)
    collector.shutdown()


@pytest.mark.parametrize("path", ["auto", "exact"])
def test_log_prob_of_deterministic_squashed_action_matches_mean(path):
    env = make_env("Pendulum-v1", 2, seed=0)
    collector = VectorCollector(
        env, squashed(env), steps_per_env=4, exploration_type="deterministic", fast_policy=path
    )
    batch = collector.collect()
    assert torch.equal(batch["action_pre_tanh"], batch["loc"])
    wanted = by_loops(batch, env.action_leaves[0].space)
    torch.testing.assert_close(batch["action_log_prob"].double(), wanted, rtol=1e-5, atol=3e-5)


def test_log_prob_of_random_actions_ignores_pre_tanh_entry():
    env = make_env("Pendulum-v1", 2, seed=0)
    actor = squashed(env, saturated=False)
    batch = VectorCollector(env, actor, steps_per_env=4, init_random_frames=4).collect()
    with torch.no_grad():
        dist = actor.get_dist(batch.clone())
        wanted = TorchRLs(dist.loc, dist.scale, low=-2.0, high=2.0)
        found = dist.log_prob(batch["action"])
    assert (batch["action_pre_tanh"][:, :2] == 0).all()
    torch.testing.assert_close(found, wanted.log_prob(batch["action"]), rtol=1e-4, atol=1e-4)


def test_log_prob_without_pre_tanh_entry_equals_torchrl_bitwise():
    loc, scale = torch.randn(50, 3), torch.rand(50, 3) + 0.1
    bounds = {"low": -torch.ones(3), "high": torch.tensor([1.0, 2.0, 3.0])}
    one, other = TanhNormal(loc, scale, **bounds), TorchRLs(loc, scale, **bounds)
    torch.manual_seed(0)
    drawn = one.rsample()
    torch.manual_seed(0)
    assert torch.equal(drawn, other.rsample())
    assert torch.equal(one.deterministic_sample, other.deterministic_sample)
    one.pre_tanh = None
    assert torch.equal(one.log_prob(drawn), other.log_prob(drawn))


def test_kl_of_squashed_actions_equals_kl_before_tanh():
    loc, scale = torch.randn(2, 5, 3), torch.rand(2, 5, 3) + 0.1
    one, other = (TanhNormal(*each, low=-2.0, high=3.0) for each in zip(loc, scale))
    wanted = kl_divergence(one.base_dist, other.base_dist)
    assert torch.equal(kl_divergence(one, other), wanted)
    assert (wanted > 0).all()


@pytest.mark.parametrize("make", [ClipPPOLoss, KLPENPPOLoss])
def test_first_ratio_of_ppo_is_1_for_saturated_actions(make):
    env = make_env("Pendulum-v1", 2, seed=0)
    actor, critic = make_actor_critic(env, (8,), continuous="tanh_normal")
    batch = VectorCollector(env, saturate(actor), steps_per_env=32, seed=3).collect()
    batch["advantage"] = torch.randn(2, 32, 1)
    batch["value_target"] = torch.zeros(2, 32, 1)
    losses = make(actor, critic)(batch.reshape(-1))
    assert abs(losses["kl_approx"].item()) < 1e-5
    assert losses["loss_objective"].item() == pytest.approx(
        -batch["advantage"].mean().item(), abs=1e-5
    )
    entropy = losses["entropy"].item()
    assert entropy == pytest.approx(-batch["action_log_prob"].mean().item(), abs=0.5)


def test_vtrace_weights_are_1_for_saturated_actions():
    env = make_env("Pendulum-v1", 2, seed=0)
    actor, critic = squashed(env), make_value(env, (8,))
    batch = VectorCollector(env, actor, steps_per_env=8, seed=3).collect()
    plain = batch.clone()
    settings = {"gamma": 0.9, "value_network": critic, "actor_network": actor}
    VTrace(**settings)(batch)
    plain["action_log_prob"] = plain["action_log_prob"] - 1  # ratios of e, which are cut to 1
    VTrace(**settings)(plain)
    torch.testing.assert_close(batch["advantage"], plain["advantage"], rtol=1e-4, atol=1e-4)


class Limbs(Scripted):
    """Two continuous actions and a choice."""

    action_space = gym.spaces.Dict(
        arm=gym.spaces.Box(-1, 2, (2,), np.float32),
        hand=gym.spaces.Dict(grip=gym.spaces.Box(0, 1, (1,), np.float32)),
        gear=gym.spaces.Discrete(3),
    )


def test_composite_log_prob_uses_each_action_before_tanh():
    env = make_env(Limbs, 2, seed=0)
    torch.manual_seed(0)
    actor = make_actor(env, (8,), continuous="tanh_normal")
    last = [module for module in actor.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        last.bias += SATURATED  # of means, and deviations of e^2
    batch = VectorCollector(env, actor, steps_per_env=16).collect()
    with torch.no_grad():
        parts = actor.get_dist(batch.clone()).dists
    for key in (("arm",), ("hand", "grip"), ("gear",)):
        *group, name = ("action", *key)
        stored = batch[*group, f"{name}_log_prob"]
        assert torch.isfinite(stored).all()
        found = parts["action", *key].log_prob(batch["action", *key])
        torch.testing.assert_close(found, stored, rtol=1e-5, atol=3e-5)
    assert batch["action", "hand", "grip_pre_tanh"].max() > SATURATED


def config(**changes):
    steps = OnPolicySteps(
        total_policy_steps=32, steps_per_env=8, minibatch_size=16, update_epochs=1,
        evaluation_every=None, evaluation_episodes=1,
    )  # fmt: skip
    return recipes.ppo.Config(
        **{"env": EnvConfig(id="Pendulum-v1", num_envs=2, max_episode_steps=10), "steps": steps,
           "hidden_sizes": [8], "log_dir": None, "progress": False, "squash_actions": True,
           "log_every": 16, **changes}
    )  # fmt: skip


def test_ppo_squashes_actions_and_its_first_ratio_is_1():
    trainer = recipes.ppo.build(config(learning_rate=1e-9))
    saturate(trainer.collector.policy)
    rows = []
    trainer.register_op("log_row", lambda row: rows.append(dict(row)))
    trainer.run()
    assert all(abs(row["train/kl_approx"]) < 1e-4 for row in rows)
    assert rows[-1]["evaluation/length"] == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial_log_std": -1.0}, "initial_log_std"),
        ({"env": EnvConfig(num_envs=2)}, "squash_actions"),
    ],
)
def test_ppo_rejects_settings_incompatible_with_squashing(changes, message):
    with raises_setting(message):
        recipes.ppo.build(config(**changes))
