"""Soft actor-critic (Christodoulou 2019). Discrete actions.

Hidden layers, critic loss, learning rate and gradient steps match the dqn recipe. On CartPole, a
lower target entropy lets the cart drift off the track, because the policy stops trying the actions
that would stop the cart.

kit train sac_discrete env.id=LunarLander-v3 steps.total_policy_steps=300_000 seed=1
kit train sac_discrete --help
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Adam
from torchrl.objectives import SoftUpdate

from kit import EnvConfig, Experiment, OffPolicyConfig, OffPolicySteps, Trainer, Update, main
from kit.config import (
    CriticNetworkConfig,
    HiddenSizes,
    NumNetworks,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
)
from kit.hooks import AnnealLearningRate
from kit.modules import action_masks, make_actor, make_q_network


@dataclass
class Config(CriticNetworkConfig, OffPolicyConfig):
    """Settings for SAC for discrete actions."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(num_envs=1))
    steps: OffPolicySteps = field(
        default_factory=lambda: OffPolicySteps(
            total_policy_steps=30_000, steps_per_env=50, replay_ratio="1/2", minibatch_size=128
        )
    )
    hidden_sizes: HiddenSizes = field(default_factory=lambda: [128, 128])
    """Hidden layer sizes for the actor and the critics."""
    loss: str = "kit.losses:DiscreteSACLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    num_critics: NumNetworks = 2
    """Number of Q-networks. Targets use the minimum of their estimates."""
    tau: UnitInterval = 0.005
    """Polyak coefficient: weight of the online networks in each target update (1: full copy)."""
    initial_alpha: PositiveFloat = 1.0
    """Initial entropy temperature. The temperature is learned."""
    target_entropy: UnitInterval = 0.7
    """Target entropy of the policy, as a fraction of the entropy of uniformly random actions."""
    n_step: PositiveInt = 5
    """Number of rewards summed before bootstrapping (n-step returns)."""
    learning_rate: PositiveFloat = 2e-3
    """Initial Adam learning rate for the actor, the critics and the temperature."""
    lr_schedule: Literal["linear", "cosine", "constant"] = "linear"
    """Learning-rate schedule. linear and cosine decay to 0."""
    max_grad_norm: PositiveFloat | None = 10.0
    """Maximum gradient norm. null: no clipping."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="discrete_sac", parts=parts)
    env = experiment.make_env(actions="discrete")
    how: Any = {"orthogonal": False, "return_log_prob": False}
    actor = experiment.make_actor(make_actor, env, cfg.hidden_sizes, cfg.activation, **how)
    masks = action_masks(env, int(env.action_spec.n))
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        experiment.make_critic(make_q_network, env, cfg.critic_sizes, cfg.activation),
        action_space="categorical",
        num_qvalue_nets=cfg.num_critics,
        alpha_init=cfg.initial_alpha,
        target_entropy=cfg.target_entropy * math.log(env.action_spec.n),
        loss_function="smooth_l1",
        **({"action_mask": masks[0]} if masks else {}),
    )
    optimizer = experiment.make_optimizer(Adam, loss.parameters(), lr=cfg.learning_rate, fused=True)
    update = Update(
        loss,
        optimizer,
        max_grad_norm=cfg.max_grad_norm,
        compile=cfg.compile,
        target_updater=SoftUpdate(loss, tau=cfg.tau),
    )
    policy, buffer = actor.select_out_keys("action"), experiment.make_replay_buffer()
    hooks = [AnnealLearningRate(optimizer, cfg.lr_schedule)]
    return experiment.trainer(env, policy, buffer=buffer, update=update, hooks=hooks)


if __name__ == "__main__":
    main(Config, build)
