"""Advantage actor-critic, A2C (Mnih et al. 2016). Discrete and continuous actions.

kit train a2c env.id=HalfCheetah-v5 env.num_envs=4 seed=1
kit train a2c --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Adam

from kit import GAE, EnvConfig, Experiment, FittedCriticConfig, OnPolicySteps, Trainer, Update, main
from kit.config import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ScheduleName,
    StateDependentNoiseConfig,
    UnitInterval,
)
from kit.fast import RMSprop
from kit.hooks import AnnealLearningRate, anneal_coefficients, fit_critic
from kit.modules import drop_log_prob, parameter_groups, with_gsde


@dataclass
class Config(StateDependentNoiseConfig, FittedCriticConfig):
    """Settings for A2C."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(normalize_observation=True))
    steps: OnPolicySteps = field(
        default_factory=lambda: OnPolicySteps(
            total_policy_steps=100_000,
            steps_per_env=5,
            update_epochs=1,
            minibatch_size=None,
            evaluation_every=20_000,
        )
    )
    loss: str = "A2CLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    gae_lambda: UnitInterval = 1.0
    n_step: PositiveInt | None = None
    """Number of rewards summed before bootstrapping. Requires gae_lambda=1. null: use
    gae_lambda."""
    advantage_norm: Literal["batch", "running"] = "batch"  # type: ignore[assignment]
    """Statistics used to normalise advantages: per batch or running."""
    entropy_coeff: NonNegativeFloat = 0.01
    optimizer: Literal["rmsprop", "rmsprop_tf", "adam"] = "rmsprop"
    """Optimiser: rmsprop, as in the paper, rmsprop_tf (TensorFlow's RMSprop, whose first steps are
    smaller) or adam."""
    gamma: UnitInterval = 0.98
    learning_rate: PositiveFloat = 1e-3
    lr_schedule: ScheduleName = "constant"


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="a2c", parts=parts)
    env = experiment.make_env()
    continuous = "gsde" if cfg.gsde else "normal"
    actor, critic = experiment.make_actor_critic(env, continuous=continuous, **cfg.networks)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        critic,
        entropy_coeff=cfg.entropy_coeff,
        critic_coeff=cfg.joint_critic_coeff or 0.0,  # None would mean 1 in PPO's losses
        loss_critic_type=cfg.critic_loss,
    )
    groups = parameter_groups(loss, [actor, critic], **cfg.learning_rates)
    adam = cfg.optimizer == "adam"
    rmsprop = {"alpha": 0.99, "eps": 1e-5, "like_tensorflow": cfg.optimizer == "rmsprop_tf"}
    form: dict[str, Any] = {"fused": True} if adam else rmsprop
    optimizer = experiment.make_optimizer(Adam if adam else RMSprop, groups, **form)
    return experiment.trainer(
        env,
        with_gsde(drop_log_prob(actor, loss), env, cfg),
        advantage=GAE(value_network=critic, n_step=cfg.n_step, **cfg.horizon),
        update=Update(loss, optimizer, max_grad_norm=cfg.max_grad_norm, compile=cfg.compile),
        hooks=[
            AnnealLearningRate(optimizer, cfg.lr_schedule),
            *anneal_coefficients(loss, **cfg.schedules),
            *fit_critic(critic, cfg, n_step=cfg.n_step),
        ],
    )


if __name__ == "__main__":
    main(Config, build)
