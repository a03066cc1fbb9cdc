"""Proximal policy optimisation (Schulman et al. 2017). Discrete and continuous actions.

kit train ppo env.id=HalfCheetah-v5 env.num_envs=4 seed=1
kit train ppo preset=ppo2
kit train ppo --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Adam

from kit import GAE, EnvConfig, Experiment, FittedCriticConfig, Trainer, Update, main
from kit.config import PositiveFloat, PositiveFraction, ScheduleName, StateDependentNoiseConfig
from kit.hooks import AnnealLearningRate, TargetKL, anneal_coefficients, fit_critic
from kit.modules import parameter_groups, with_gsde


@dataclass
class Config(StateDependentNoiseConfig, FittedCriticConfig):
    """Settings for PPO."""

    env: EnvConfig = field(
        default_factory=lambda: EnvConfig(normalize_observation=True, normalize_reward=True)
    )
    loss: str = "ClipPPOLoss"
    """Loss class: ClipPPOLoss or PPOLoss from torchrl.objectives, kit.losses:KLPENPPOLoss (KL
    penalty), or your own as module:Class."""
    clip_epsilon: PositiveFraction = 0.2
    """Clipping range for the probability ratio."""
    clip_schedule: ScheduleName = "constant"
    """How clip_epsilon changes over the run; same options as lr_schedule."""
    clip_value: PositiveFloat | Literal[True] | None = None
    """Clipping range for value updates. true: same range and schedule as clip_epsilon. null: no
    clipping."""
    target_kl: PositiveFloat | None = None
    """Skip the remaining epochs of an update once the approximate KL divergence exceeds 1.5 times
    this value. null: never skip epochs."""
    squash_actions: bool = False
    """Whether continuous actions are squashed by tanh and have a state-dependent standard
    deviation. false: actions are clipped to their bounds."""
    learning_rate: PositiveFloat = 5e-4

    @property
    def clip_schedules(self) -> dict[str, str]:
        """Schedules of the clipping ranges, for :func:`~kit.hooks.anneal_coefficients`."""
        ranges = ["clip_epsilon", *(["clip_value"] if self.clip_value is True else [])]
        return dict.fromkeys(ranges, self.clip_schedule)


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="ppo", parts=parts)
    env = experiment.make_env()
    continuous = "gsde" if cfg.gsde else "tanh_normal" if cfg.squash_actions else "normal"
    actor, critic = experiment.make_actor_critic(env, continuous=continuous, **cfg.networks)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        critic,
        clip_epsilon=cfg.clip_epsilon,
        clip_value=cfg.clip_value,
        entropy_coeff=cfg.entropy_coeff,
        critic_coeff=cfg.joint_critic_coeff or 0.0,  # None would mean 1
        loss_critic_type=cfg.critic_loss,
        normalize_advantage=cfg.normalize_minibatch,
    )
    groups = parameter_groups(loss, [actor, critic], **cfg.learning_rates)
    optimizer = experiment.make_optimizer(Adam, groups, eps=1e-5, fused=True)
    return experiment.trainer(
        env,
        with_gsde(actor, env, cfg),
        advantage=GAE(value_network=critic, **cfg.horizon),
        update=Update(loss, optimizer, max_grad_norm=cfg.max_grad_norm, compile=cfg.compile),
        hooks=[
            AnnealLearningRate(optimizer, cfg.lr_schedule),
            *anneal_coefficients(loss, **cfg.clip_schedules, **cfg.schedules),
            TargetKL(cfg.target_kl),
            *fit_critic(critic, cfg),
        ],
    )


if __name__ == "__main__":
    main(Config, build)
