"""Conservative Q-learning from a dataset (Kumar et al. 2020). Continuous actions.

kit train cql env.id=Pendulum-v1 dataset=[datasets/pendulum-mixed-v0] seed=1
kit train cql --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torch.optim import Adam
from torchrl.objectives import SoftUpdate

from kit import CriticNetworkConfig, EnvConfig, Experiment, OfflineConfig, Trainer, Update, main
from kit.config import FiniteFloat, Limits, NonNegativeFloat, PositiveFloat, UnitInterval
from kit.modules import make_action_value, make_actor


@dataclass
class Config(CriticNetworkConfig, OfflineConfig):
    """Settings for CQL."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="Pendulum-v1", num_envs=1))
    gamma: UnitInterval = 0.99
    """Discount factor."""
    loss: str = "kit.losses:CQLLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    min_q_weight: NonNegativeFloat = 1.0
    """Weight of the conservative penalty relative to the squared TD error, as in the authors' code.
    It is twice the alpha in eq. 4 of the paper, where the TD error is halved."""
    num_random: Annotated[int, Limits(1, 1_000)] = 10
    """Number of actions sampled from each of three distributions to estimate the penalty: uniform,
    policy at the current state and policy at the next state."""
    initial_alpha: PositiveFloat = 1.0
    """Initial entropy temperature. The temperature is learned."""
    target_entropy: FiniteFloat | None = None
    """Target entropy in nats, in the environment's own action units. null: minus the number
    of action dimensions."""
    tau: UnitInterval = 0.005
    """Polyak coefficient: weight of the online networks in each target update (1: full copy)."""
    learning_rate: PositiveFloat = 1e-3
    """Adam learning rate."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="cql", parts=parts)
    env = experiment.make_env(actions="continuous")
    buffer = experiment.make_dataset(env)
    sizes, activation = cfg.hidden_sizes, cfg.activation
    how: Any = {"continuous": "tanh_normal", "orthogonal": False, "return_log_prob": False}
    actor = experiment.make_actor(make_actor, env, sizes, activation, **how)
    actor = actor.select_out_keys("action")
    entropy = -float(env.action_spec.shape[1:].numel())
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        experiment.make_critic(make_action_value, env, cfg.critic_sizes, activation),
        action_spec=env.action_spec[0],
        min_q_weight=cfg.min_q_weight,
        num_random=cfg.num_random,
        alpha_init=cfg.initial_alpha,
        target_entropy=entropy if cfg.target_entropy is None else cfg.target_entropy,
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
