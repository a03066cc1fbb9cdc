"""IMPALA with V-trace (Espeholt et al. 2018). Discrete and continuous actions.

A worker process steps the environments while the learner trains. Batches may therefore come from an
older policy, and V-trace corrects for the difference. ``collector_kwargs.max_staleness`` limits how
many updates old this policy may be.

kit train impala env.id=Acrobot-v1 collector_kwargs.max_staleness=4
kit train impala --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kit import EnvConfig, Experiment, OnPolicySteps, Trainer, Update, VTrace, main
from kit.config import (
    ActorCriticConfig,
    NonNegativeFloat,
    PositiveFloat,
    ScheduleName,
    UnitInterval,
)
from kit.fast import RMSprop
from kit.hooks import AnnealLearningRate, anneal_coefficients
from kit.modules import parameter_groups


@dataclass
class Config(ActorCriticConfig):
    """Settings for IMPALA."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(normalize_observation=True))
    collector: str | None = "async"
    steps: OnPolicySteps = field(
        default_factory=lambda: OnPolicySteps(
            total_policy_steps=96_000,
            steps_per_env=5,
            update_epochs=1,
            minibatch_size=None,
            evaluation_every=20_000,
        )
    )
    loss: str = "A2CLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class. It is applied to
    V-trace advantages."""
    max_rho: PositiveFloat = 1.0
    """Upper bound for the importance weights of TD errors (rho-bar)."""
    max_c: PositiveFloat = 1.0
    """Upper bound for the importance weights that propagate TD errors to earlier steps (c-bar)."""
    gae_lambda: UnitInterval = 1.0
    """Lambda for V-trace: factor applied to the weights that propagate TD errors to earlier
    steps."""
    entropy_coeff: NonNegativeFloat = 0.01
    normalize_advantage: bool = False
    advantage_norm: Literal["batch", "running"] = "batch"  # type: ignore[assignment]
    """Statistics used to normalise advantages: per batch or running."""
    gamma: UnitInterval = 0.98
    learning_rate: PositiveFloat = 1e-3
    lr_schedule: ScheduleName = "constant"


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="impala", parts=parts)
    env = experiment.make_env()
    actor, critic = experiment.make_actor_critic(env, **cfg.networks)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        critic,
        entropy_coeff=cfg.entropy_coeff,
        critic_coeff=cfg.critic_coeff,
        loss_critic_type=cfg.critic_loss,
    )
    groups = parameter_groups(loss, [actor, critic], **cfg.learning_rates)
    # RMSprop without momentum, as in the paper.
    optimizer = experiment.make_optimizer(RMSprop, groups, alpha=0.99, eps=1e-5)
    advantage = VTrace(
        value_network=critic,
        actor_network=actor,
        max_rho=cfg.max_rho,
        max_c=cfg.max_c,
        **cfg.horizon,
    )
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
