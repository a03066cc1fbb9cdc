"""PPO from pixels (Schulman et al. 2017). Atari and other image observations.

kit train ppo_pixels preset=atari env.id=ale_py:BreakoutNoFrameskip-v4
kit train ppo_pixels env.id=CarRacing-v3 env.kwargs.continuous=false preprocess=none
kit train ppo_pixels --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Adam

from kit import GAE, ActorCriticConfig, EnvConfig, Experiment, OnPolicySteps, Trainer, Update, main
from kit.config import (
    HiddenSizes,
    NonNegativeFloat,
    NumFrames,
    PositiveFloat,
    PositiveFraction,
    ScheduleName,
)
from kit.envs import pixel_wrappers
from kit.hooks import AnnealLearningRate, TargetKL, anneal_coefficients
from kit.modules import NATURE, parameter_groups


@dataclass
class Config(ActorCriticConfig):
    """Settings for PPO from pixels."""

    env: EnvConfig = field(
        default_factory=lambda: EnvConfig(id="ale_py:PongNoFrameskip-v4", normalize_reward=True)
    )
    steps: OnPolicySteps = field(
        default_factory=lambda: OnPolicySteps(
            total_policy_steps=1_000_448,
            steps_per_env=128,
            update_epochs=4,
            minibatch_size=256,
            evaluation_every=102_400,
        )
    )
    preprocess: Literal["atari", "none"] = "atari"
    """Preprocessing: atari (84 x 84 greyscale, frame skip 4) or none."""
    frame_stack: NumFrames = 4
    """Number of frames stacked into one observation."""
    convolutions: list[list[int]] = field(default_factory=lambda: [list(n) for n in NATURE])
    """Channels, kernel size and stride of each convolution."""
    hidden_sizes: HiddenSizes = field(default_factory=lambda: [512])
    activation: str = "relu"
    shared_backbone: bool = True
    loss: str = "ClipPPOLoss"
    """Loss class: ClipPPOLoss or PPOLoss from torchrl.objectives, kit.losses:KLPENPPOLoss (KL
    penalty), or your own as module:Class."""
    clip_epsilon: PositiveFraction = 0.1
    """Clipping range for the probability ratio."""
    clip_schedule: ScheduleName = "constant"
    """How clip_epsilon changes over the run; same options as lr_schedule."""
    entropy_coeff: NonNegativeFloat = 0.01
    learning_rate: PositiveFloat = 2.5e-4
    target_kl: PositiveFloat | None = None
    """Skip the remaining epochs of an update once the approximate KL divergence exceeds 1.5 times
    this value. null: never skip epochs."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="ppo", parts=parts)
    env = experiment.make_env(wrappers=pixel_wrappers(cfg.preprocess, cfg.frame_stack))
    actor, critic = experiment.make_actor_critic(env, **cfg.networks, convolutions=cfg.convolutions)
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
