"""Trust region policy optimisation (Schulman 2015). Discrete and continuous actions.

kit train trpo env.id=HalfCheetah-v5 env.num_envs=1 steps.total_policy_steps=1_000_000
kit train trpo --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kit import GAE, EnvConfig, Experiment, OnPolicySteps, Trainer, TrustRegion, main
from kit.config import (
    FittedCriticConfig,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    reject_unused,
)
from kit.hooks import anneal_coefficients, fit_critic


@dataclass
class Config(FittedCriticConfig):
    """Settings for TRPO: one policy update per batch, and a separately fitted critic."""

    env: EnvConfig = field(
        default_factory=lambda: EnvConfig(normalize_observation=True, normalize_reward=True)
    )
    steps: OnPolicySteps = field(
        default_factory=lambda: OnPolicySteps(
            total_policy_steps=51_200, steps_per_env=128, update_epochs=1, minibatch_size=None
        )
    )
    loss: str = "PPOLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class. PPOLoss has no
    clipping, like the surrogate objective in TRPO."""
    max_kl: PositiveFloat = 0.01
    """Maximum mean KL divergence between the policies before and after an update."""
    damping: NonNegativeFloat = 0.1
    """Damping added to the diagonal of the Fisher matrix."""
    conjugate_gradient_steps: PositiveInt = 10
    """Number of conjugate gradient iterations."""
    line_search_steps: PositiveInt = 10
    """Maximum number of step lengths tried in the line search. Each is 0.8 times the previous
    one."""
    critic_epochs: PositiveInt = 10
    """Number of epochs for which the critic is fitted on each batch, before advantages are
    computed."""
    advantage_norm: Literal["batch", "running"] = "batch"  # type: ignore[assignment]
    """Statistics used to normalise advantages: per batch or running."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="trpo", parts=parts)
    unused = ("learning_rate", "lr_schedule", "backbone_lr_scale", "critic_backbone_lr_scale")
    reject_unused(cfg, unused, "max_kl determines the step length")
    env = experiment.make_env()
    actor, critic = experiment.make_actor_critic(env, **cfg.networks)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        critic,
        entropy_coeff=cfg.entropy_coeff,
        critic_coeff=cfg.joint_critic_coeff or 0.0,  # the critic is fitted separately
    )
    update = TrustRegion(
        loss,
        actor,
        max_kl=cfg.max_kl,
        damping=cfg.damping,
        conjugate_gradient_steps=cfg.conjugate_gradient_steps,
        line_search_steps=cfg.line_search_steps,
    )
    return experiment.trainer(
        env,
        actor,
        advantage=GAE(value_network=critic, **cfg.horizon),
        update=update,
        hooks=[
            *anneal_coefficients(loss, entropy_coeff=cfg.entropy_schedule),
            *fit_critic(critic, cfg),
        ],
    )


if __name__ == "__main__":
    main(Config, build)
