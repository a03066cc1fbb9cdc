"""Proximal policy optimisation (Schulman et al. 2017), discrete and continuous actions.

python -m recipes.ppo env.id=HalfCheetah-v5 env.num_envs=4 seed=1
python -m recipes.ppo preset=ppo2
python -m recipes.ppo --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Adam

from kit import GAE, EnvConfig, Experiment, FittedCriticConfig, Trainer, Update, main
from kit.config import PositiveFloat, PositiveFraction, ScheduleName
from kit.hooks import AnnealLearningRate, TargetKL, anneal_coefficients, fit_critic
from kit.modules import parameter_groups


@dataclass
class Config(FittedCriticConfig):
    """Settings of PPO."""

    env: EnvConfig = field(
        default_factory=lambda: EnvConfig(normalize_observation=True, normalize_reward=True)
    )
    loss: str = "ClipPPOLoss"
    """Loss of torchrl.objectives (ClipPPOLoss, PPOLoss), or module:Class; with a penalty on the
    divergence: kit.losses:KLPENPPOLoss."""
    clip_epsilon: PositiveFraction = 0.2
    """Clipping range of the probability ratio."""
    clip_schedule: ScheduleName = "constant"
    """Schedule of that range; the same choices as anneal."""
    clip_value: PositiveFloat | Literal[True] | None = None
    """Clipping range of the value around its last estimate; true: clip_epsilon, with its schedule;
    null: none."""
    target_kl: PositiveFloat | None = None
    """An update stops early once the approximate KL exceeds 1.5 times this; null: never."""
    squash_actions: bool = False
    """Whether continuous actions are squashed to their bounds by tanh, with a standard deviation
    learned for each state; otherwise they are clipped to them."""
    learning_rate: PositiveFloat = 5e-4

    @property
    def clip_schedules(self) -> dict[str, str]:
        """Schedules of the clipping ranges, for :func:`~kit.hooks.anneal_coefficients`."""
        ranges = ["clip_epsilon", *(["clip_value"] if self.clip_value is True else [])]
        return dict.fromkeys(ranges, self.clip_schedule)


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Wire PPO; ``make_loss`` replaces ``cfg.loss``, ``parts`` the parts of the trainer."""
    experiment = Experiment(cfg, algorithm="ppo", parts=parts)
    env = experiment.make_env()
    continuous = "tanh_normal" if cfg.squash_actions else "normal"
    actor, critic = experiment.make_actor_critic(env, continuous=continuous, **cfg.networks)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        critic,
        clip_epsilon=cfg.clip_epsilon,
        clip_value=cfg.clip_value,
        entropy_coeff=cfg.entropy_coeff,
        critic_coeff=cfg.joint_critic_coeff or 0.0,  # None would be 1 here
        loss_critic_type=cfg.critic_loss,
        normalize_advantage=cfg.normalize_minibatch,
    )
    groups = parameter_groups(loss, [actor, critic], cfg.learning_rate, cfg.backbone_lr_scale)
    optimizer = experiment.make_optimizer(Adam, groups, eps=1e-5, fused=True)
    return experiment.trainer(
        env,
        actor,
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
