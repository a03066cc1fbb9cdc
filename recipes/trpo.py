"""Trust region policy optimisation (Schulman et al. 2015), discrete and continuous actions.

python -m recipes.trpo env.id=HalfCheetah-v5 env.num_envs=1 steps.total_policy_steps=1_000_000
python -m recipes.trpo --help
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
    """Settings of TRPO: one step of the policy for each batch, beside a critic that is fitted."""

    env: EnvConfig = field(
        default_factory=lambda: EnvConfig(normalize_observation=True, normalize_reward=True)
    )
    steps: OnPolicySteps = field(
        default_factory=lambda: OnPolicySteps(
            total_policy_steps=51_200, steps_per_env=128, update_epochs=1, minibatch_size=None
        )
    )
    loss: str = "PPOLoss"
    """Loss of torchrl.objectives (PPOLoss is the surrogate of TRPO), or module:Class."""
    max_kl: PositiveFloat = 0.01
    """Largest mean Kullback-Leibler divergence of the policy after a step from that before it."""
    damping: NonNegativeFloat = 0.1
    """Added to the diagonal of the Fisher matrix."""
    conjugate_gradient_steps: PositiveInt = 10
    """Iterations in which the natural gradient is solved for."""
    line_search_steps: PositiveInt = 10
    """Lengths of the step that are tried, each 0.8 of the one before."""
    critic_epochs: PositiveInt = 10
    """Passes over each batch in which an optimiser of its own fits the critic, before advantages
    are estimated."""
    advantage_norm: Literal["batch", "running"] = "batch"  # type: ignore[assignment]
    """Rows over which advantages are normalised: each batch, or all batches so far."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Wire TRPO; ``make_loss`` replaces ``cfg.loss``, ``parts`` the parts of the trainer."""
    experiment = Experiment(cfg, algorithm="trpo", parts=parts)
    unused = ("learning_rate", "lr_schedule", "backbone_lr_scale")
    reject_unused(cfg, unused, "the length of a step follows from max_kl")
    env = experiment.make_env()
    actor, critic = experiment.make_actor_critic(env, **cfg.networks)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        critic,
        entropy_coeff=cfg.entropy_coeff,
        critic_coeff=cfg.joint_critic_coeff or 0.0,  # it is fitted alone
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
