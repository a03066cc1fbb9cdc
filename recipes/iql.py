"""Implicit Q-learning from a dataset (Kostrikov et al. 2022). Continuous actions.

kit train iql env.id=Pendulum-v1 dataset=[datasets/pendulum-mixed-v0] seed=1
kit train iql --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.optim import Adam
from torchrl.objectives import SoftUpdate

from kit import CriticNetworkConfig, EnvConfig, Experiment, OfflineConfig, Trainer, Update, main
from kit.config import NumNetworks, PositiveFloat, UnitInterval
from kit.modules import make_action_value, make_actor, make_value


@dataclass
class Config(CriticNetworkConfig, OfflineConfig):
    """Settings for IQL."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="Pendulum-v1", num_envs=1))
    gamma: UnitInterval = 0.99
    """Discount factor."""
    loss: str = "kit.losses:IQLLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    num_critics: NumNetworks = 2
    """Number of Q-networks. The minimum of their estimates is used."""
    expectile: UnitInterval = 0.7
    """Expectile in the regression of the state value on the dataset actions' Q-values (eq. 5)."""
    temperature: PositiveFloat = 3.0
    """Factor applied to advantages in the exponential weights of the actor loss (beta in eq. 7)."""
    tau: UnitInterval = 0.005
    """Polyak coefficient: weight of the online networks in each target update (1: full copy)."""
    learning_rate: PositiveFloat = 1e-3
    """Adam learning rate."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="iql", parts=parts)
    env = experiment.make_env(actions="continuous")
    buffer = experiment.make_dataset(env)
    sizes, activation = cfg.hidden_sizes, cfg.activation
    how: Any = {"continuous": "tanh_normal", "orthogonal": False, "return_log_prob": False}
    actor = experiment.make_actor(make_actor, env, sizes, activation, **how)
    actor = actor.select_out_keys("action")
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        experiment.make_critic(make_action_value, env, cfg.critic_sizes, activation),
        make_value(env, cfg.critic_sizes, activation, orthogonal=False),
        num_qvalue_nets=cfg.num_critics,
        expectile=cfg.expectile,
        temperature=cfg.temperature,
        loss_function="l2",
    )
    update = Update(
        loss,
        experiment.make_optimizer(Adam, loss.parameters(), lr=cfg.learning_rate, fused=True),
        max_grad_norm=cfg.max_grad_norm,
        compile=cfg.compile,
        target_updater=SoftUpdate(loss, tau=cfg.tau),
    )
    return experiment.trainer(env, actor, buffer=buffer, update=update)


if __name__ == "__main__":
    main(Config, build)
