"""TD3+BC from a dataset (Fujimoto and Gu 2021). Continuous actions.

kit train td3_bc env.id=Pendulum-v1 dataset=[datasets/pendulum-mixed-v0] seed=1
kit train td3_bc --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.optim import Adam
from torchrl.objectives import SoftUpdate

from kit import CriticNetworkConfig, EnvConfig, Experiment, OfflineConfig, Trainer, Update, main
from kit.config import NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval
from kit.modules import half_range, make_action_value, make_actor


@dataclass
class Config(CriticNetworkConfig, OfflineConfig):
    """Settings for TD3+BC."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="Pendulum-v1", num_envs=1))
    gamma: UnitInterval = 0.99
    """Discount factor."""
    loss: str = "TD3BCLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    alpha: NonNegativeFloat = 2.5
    """Weight of the normalised Q-values relative to the behaviour-cloning term (squared error of
    actions)."""
    policy_delay: PositiveInt = 2
    """Number of critic gradient steps per update of the actor and the target networks."""
    policy_noise: NonNegativeFloat = 0.2
    """Standard deviation of the noise added to target actions (target policy smoothing), relative
    to half the action range."""
    noise_clip: NonNegativeFloat = 0.5
    """Maximum absolute value of the noise added to target actions, relative to half the action
    range."""
    tau: UnitInterval = 0.005
    """Polyak coefficient: weight of the online networks in each target update (1: full copy)."""
    learning_rate: PositiveFloat = 1e-3
    """Adam learning rate."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="td3_bc", parts=parts)
    env = experiment.make_env(actions="continuous")
    buffer = experiment.make_dataset(env)
    sizes, activation = cfg.hidden_sizes, cfg.activation
    actor = experiment.make_actor(
        make_actor, env, sizes, activation, continuous="deterministic", orthogonal=False
    )
    unit = half_range(env, cfg.device)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        experiment.make_critic(make_action_value, env, cfg.critic_sizes, activation),
        action_spec=env.action_spec[0],
        alpha=cfg.alpha,
        policy_noise=cfg.policy_noise * unit,
        noise_clip=cfg.noise_clip * unit,
        loss_function="l2",
    )
    networks = {"loss_actor": loss.actor_network_params, "loss_qvalue": loss.qvalue_network_params}
    update = Update(
        loss,
        {
            n: experiment.make_optimizer(Adam, p.parameters(), lr=cfg.learning_rate, fused=True)
            for n, p in networks.items()
        },
        every={"loss_actor": cfg.policy_delay},
        max_grad_norm=cfg.max_grad_norm,
        compile=cfg.compile,
        target_updater=SoftUpdate(loss, tau=cfg.tau),
        target_update_every=cfg.policy_delay,
    )
    return experiment.trainer(env, actor, buffer=buffer, update=update)


if __name__ == "__main__":
    main(Config, build)
