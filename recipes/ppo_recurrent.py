"""PPO with an LSTM or GRU, for partial observability (Ni et al. 2022).

Actor and critic share their hidden layers and the recurrent layer. Minibatches are sequences of
consecutive steps. Each sequence starts from the hidden state stored during collection.

kit train ppo_recurrent env.id=CartPole-v1 recurrent=gru
kit train ppo_recurrent --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Adam

from kit import GAE, ActorCriticConfig, EnvConfig, Experiment, OnPolicySteps, Trainer, Update, main
from kit.config import LayerWidth, NonNegativeInt, PositiveFloat, PositiveFraction, ScheduleName
from kit.hooks import AnnealLearningRate, TargetKL, anneal_coefficients
from kit.modules import check_sequences, parameter_groups


@dataclass
class Config(ActorCriticConfig):
    """Settings for recurrent PPO."""

    env: EnvConfig = field(
        default_factory=lambda: EnvConfig(normalize_observation=True, normalize_reward=True)
    )
    steps: OnPolicySteps = field(
        default_factory=lambda: OnPolicySteps(
            total_policy_steps=65_536, steps_per_env=128, sequence_length=16, minibatch_size=16
        )
    )
    shared_backbone: bool = True
    recurrent: Literal["lstm", "gru"] = "lstm"
    """Type of the recurrent layer."""
    recurrent_size: LayerWidth = 64
    """Number of units in the recurrent layer."""
    burn_in: NonNegativeInt = 0
    """Number of time steps at the start of each sequence that only warm up the hidden state."""
    loss: str = "ClipPPOLoss"
    """Loss class: ClipPPOLoss or PPOLoss from torchrl.objectives, kit.losses:KLPENPPOLoss (KL
    penalty), or your own as module:Class."""
    clip_epsilon: PositiveFraction = 0.2
    """Clipping range for the probability ratio."""
    clip_schedule: ScheduleName = "constant"
    """How clip_epsilon changes over the run; same options as lr_schedule."""
    target_kl: PositiveFloat | None = None
    """Skip the remaining epochs of an update once the approximate KL divergence exceeds 1.5 times
    this value. null: never skip epochs."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="ppo_recurrent", parts=parts)
    env = experiment.make_env()
    check_sequences(experiment.plan.sequence_length, cfg.burn_in)
    layer: dict[str, Any] = {"recurrent": cfg.recurrent, "recurrent_size": cfg.recurrent_size}
    actor, critic = experiment.make_actor_critic(env, **cfg.networks, **layer, burn_in=cfg.burn_in)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        critic,
        clip_epsilon=cfg.clip_epsilon,
        entropy_coeff=cfg.entropy_coeff,
        critic_coeff=cfg.critic_coeff,
        loss_critic_type=cfg.critic_loss,
        normalize_advantage=cfg.normalize_minibatch,
    )
    groups = parameter_groups(loss, [actor, critic], **cfg.learning_rates)
    optimizer = experiment.make_optimizer(Adam, groups, eps=1e-5, fused=True)
    schedules = anneal_coefficients(loss, clip_epsilon=cfg.clip_schedule, **cfg.schedules)
    return experiment.trainer(
        env,
        actor,
        advantage=GAE(value_network=critic, **cfg.horizon),
        update=Update(loss, optimizer, max_grad_norm=cfg.max_grad_norm, compile=cfg.compile),
        hooks=[AnnealLearningRate(optimizer, cfg.lr_schedule), *schedules, TargetKL(cfg.target_kl)],
    )


if __name__ == "__main__":
    main(Config, build)
