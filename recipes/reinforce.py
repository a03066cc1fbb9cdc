"""REINFORCE with an optional baseline (Williams 1992). Discrete and continuous actions.

kit train reinforce env.id=Acrobot-v1 seed=1
kit train reinforce baseline=false
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Adam

from kit import GAE, EnvConfig, Experiment, OnPolicySteps, RewardToGo, Trainer, Update, main
from kit.config import (
    ActorCriticConfig,
    NonNegativeFloat,
    PositiveFloat,
    ScheduleName,
    UnitInterval,
    reject_unused,
)  # fmt: skip
from kit.hooks import AnnealLearningRate, anneal_coefficients
from kit.modules import parameter_groups


@dataclass
class Config(ActorCriticConfig):
    """Settings for REINFORCE. Each batch contains complete episodes and is used once."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(normalize_observation=True))
    steps: OnPolicySteps = field(
        default_factory=lambda: OnPolicySteps(
            total_policy_steps=96_000,
            steps_per_env=None,
            min_steps=1_000,
            update_epochs=1,
            minibatch_size=None,
            evaluation_every=20_000,
        )
    )
    loss: str = "A2CLoss"
    """Loss class: A2CLoss (the REINFORCE loss), or your own as module:Class."""
    baseline: bool = True
    """Whether to subtract a learned state value (Sutton and Barto 2018, section 13.4)."""
    critic_coeff: NonNegativeFloat = 1.0
    gae_lambda: UnitInterval = 1.0
    advantage_norm: Literal["batch", "running"] = "batch"  # type: ignore[assignment]
    """Statistics used to normalise advantages: per batch or running."""
    gamma: UnitInterval = 0.98
    learning_rate: PositiveFloat = 3e-3
    lr_schedule: ScheduleName = "constant"


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="reinforce", parts=parts)
    if not cfg.baseline:
        unused = ("critic_coeff", "critic_hidden_sizes", "critic_loss", "critic_schedule",
                  "gae_lambda", "shared_backbone", "critic_backbone_lr_scale")  # fmt: skip
        reject_unused(cfg, unused, "baseline=false disables the critic")
    env = experiment.make_env()
    actor, critic = experiment.make_actor_critic(env, **cfg.networks)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        critic,
        entropy_coeff=cfg.entropy_coeff,
        critic_coeff=cfg.critic_coeff if cfg.baseline else 0.0,
        loss_critic_type=cfg.critic_loss,
    )
    groups = parameter_groups(loss, [actor, critic], **cfg.learning_rates)
    optimizer = experiment.make_optimizer(Adam, groups, fused=True)
    advantage: Any = RewardToGo(gamma=cfg.gamma, standardize=cfg.standardize)
    if cfg.baseline:
        advantage = GAE(value_network=critic, **cfg.horizon)
    return experiment.trainer(
        env,
        actor,
        advantage=advantage,
        update=Update(loss, optimizer, max_grad_norm=cfg.max_grad_norm, compile=cfg.compile),
        hooks=[
            AnnealLearningRate(optimizer, cfg.lr_schedule),
            *anneal_coefficients(loss, **cfg.schedules),
        ],
    )


if __name__ == "__main__":
    main(Config, build)
