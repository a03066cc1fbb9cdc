"""Stein variational policy gradient (Liu et al. 2017). Discrete and continuous actions.

Several policies (particles) are trained together with A2C or PPO. Each particle is an actor-critic
pair with its own environments. Good policies attract the other particles, and a kernel keeps all
particles apart. A policy step is one action in one environment.

kit train svpg num_particles=8 env.num_envs=16 temperature=0.01
kit train svpg preset=ppo
kit train svpg --help
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torch.optim import Adam

from kit import GAE, ActorCriticConfig, EnvConfig, Experiment, OnPolicySteps, Trainer, Update, main
from kit.buffers import GroupedMinibatches
from kit.config import Limits, PositiveFloat
from kit.hooks import AnnealLearningRate, anneal_coefficients
from kit.losses import SteinGradients
from kit.modules import in_one_process, make_particles, parameter_groups


@dataclass
class Config(ActorCriticConfig):
    """Settings for SVPG."""

    env: EnvConfig = field(
        default_factory=lambda: EnvConfig(num_envs=32, normalize_observation=True)
    )
    steps: OnPolicySteps = field(
        default_factory=lambda: OnPolicySteps(
            total_policy_steps=409_600, steps_per_env=8, update_epochs=1, minibatch_size=None
        )
    )
    learning_rate: PositiveFloat = 5e-3
    """Initial Adam learning rate for the actors and the critics."""
    num_particles: Annotated[int, Limits(1, 64)] = 4
    """Number of policies (particles) trained together; environments and minibatches are split
    evenly among them."""
    temperature: PositiveFloat = 0.1
    """Weight of the repulsion between particles relative to the return."""
    loss: str = "A2CLoss"
    """Loss class: a name from torchrl.objectives (A2CLoss, ClipPPOLoss, ...), or your own as
    module:Class."""
    normalize_advantage: bool = False
    advantage_norm: Literal["batch", "running"] = "batch"  # type: ignore[assignment]
    """Statistics used to normalise advantages: per batch (over all particles) or running."""
    max_grad_norm: PositiveFloat | None = None
    """Maximum gradient norm, computed over all particles. null: no clipping."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="svpg", parts=parts)
    count = cfg.num_particles
    experiment.plan = in_one_process(experiment.plan, count)
    env = experiment.make_env()
    make = functools.partial(experiment.make_actor_critic, env, **cfg.networks)
    actor, critic = make_particles(make, count, experiment.plan)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        critic,
        entropy_coeff=cfg.entropy_coeff,
        critic_coeff=cfg.critic_coeff,
        loss_critic_type=cfg.critic_loss,
    )
    groups = parameter_groups(loss, [actor, critic], **cfg.learning_rates)
    optimizer = experiment.make_optimizer(Adam, groups, eps=1e-5, fused=True)
    stein = SteinGradients(actor, cfg.temperature)
    schedules = anneal_coefficients(loss, **cfg.schedules)
    return experiment.trainer(
        env,
        actor,
        buffer=GroupedMinibatches(count),
        advantage=GAE(value_network=critic, **cfg.horizon),
        update=Update(
            loss, optimizer, max_grad_norm=cfg.max_grad_norm, gradients=stein, compile=cfg.compile
        ),
        evaluate=experiment.make_evaluator(env, actor, particles=count),
        hooks=[AnnealLearningRate(optimizer, cfg.lr_schedule), *schedules],
    )


if __name__ == "__main__":
    main(Config, build)
