"""Deep deterministic policy gradient (Lillicrap et al. 2016). Continuous actions.

kit train ddpg env.id=HalfCheetah-v5 steps.total_policy_steps=1_000_000 seed=1
kit train ddpg --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tensordict.nn import TensorDictSequential
from torch.optim import Adam
from torchrl.objectives import SoftUpdate

from kit import CriticNetworkConfig, EnvConfig, Experiment, OffPolicyConfig, Trainer, Update, main
from kit.config import HiddenSizes, NonNegativeFloat, PositiveFloat, ScheduleName, UnitInterval
from kit.hooks import anneal_learning_rates
from kit.modules import make_action_value, make_actor, make_noise


@dataclass
class Config(CriticNetworkConfig, OffPolicyConfig):
    """Settings for DDPG."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="Pendulum-v1", num_envs=1))
    hidden_sizes: HiddenSizes = field(default_factory=lambda: [64, 64])
    """Hidden layer sizes for the actor and the critic."""
    loss: str = "DDPGLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    exploration_noise: NonNegativeFloat = 0.2
    """Standard deviation of the action noise, relative to half the action range."""
    noise_type: Literal["normal", "ou"] = "normal"
    """Action noise: normal (independent Gaussian noise) or, as in the paper, ou (Ornstein-Uhlenbeck
    process with sigma exploration_noise)."""
    tau: UnitInterval = 0.005
    """Polyak coefficient: weight of the online networks in each target update (1: full copy)."""
    learning_rate: PositiveFloat = 1e-3
    """Initial Adam learning rate for the actor and the critic."""
    lr_schedule: ScheduleName = "constant"
    """Learning-rate schedule: constant; linear or cosine (decay to 0); "piecewise 0.5 0.1"
    (multiplied by 0.1 halfway through the run); or "exponential 0.99" (multiplied by 0.99 after
    each iteration)."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="ddpg", parts=parts)
    env = experiment.make_env(actions="continuous")
    sizes, activation = cfg.hidden_sizes, cfg.activation
    actor = experiment.make_actor(
        make_actor, env, sizes, activation, continuous="deterministic", orthogonal=False
    )
    critic = experiment.make_critic(make_action_value, env, cfg.critic_sizes, activation)
    noise = make_noise(env, cfg.noise_type, float(cfg.exploration_noise))
    loss = experiment.make_loss(make_loss or cfg.loss, actor, critic, delay_actor=True)
    update = Update(
        loss,
        experiment.make_optimizer(Adam, loss.parameters(), lr=cfg.learning_rate, fused=True),
        max_grad_norm=cfg.max_grad_norm,
        compile=cfg.compile,
        target_updater=SoftUpdate(loss, tau=cfg.tau),
    )
    policy = TensorDictSequential(actor, noise).to(cfg.device)
    buffer = experiment.make_replay_buffer()
    hooks = anneal_learning_rates(update, cfg.lr_schedule)
    return experiment.trainer(env, policy, buffer=buffer, update=update, hooks=hooks)


if __name__ == "__main__":
    main(Config, build)
