"""Advantage actor-critic, synchronous (Mnih et al. 2016), discrete and continuous actions.

Run it::

    python -m recipes.a2c env.id=HalfCheetah-v5 env.num_envs=4 seed=1
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import RMSprop

from kit.advantages import GAE
from kit.config import NotNegative, Positive, UnitInterval
from kit.experiment import EnvConfig, Experiment, OnPolicyConfig, OnPolicySteps, main
from kit.hooks import AnnealLearningRate
from kit.modules import make_actor, make_value
from kit.trainer import Trainer
from kit.update import Update


@dataclass
class Config(OnPolicyConfig):
    """Settings of A2C."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(normalize_observation=True))
    steps: OnPolicySteps = field(
        default_factory=lambda: OnPolicySteps(
            total_policy_steps=100_000,
            steps_per_env=5,
            update_epochs=1,
            minibatch_size=None,
            evaluation_every=20_000,
        )
    )
    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers of actor and critic."""
    activation: str = "tanh"
    """Activation: tanh, sigmoid_tanh (faster on a CPU), relu, elu, silu, gelu."""
    loss: str = "A2CLoss"
    """Loss of torchrl.objectives, or module:Class."""
    entropy_coeff: NotNegative = 0.0
    """Weight of the entropy bonus."""
    critic_coeff: NotNegative = 0.5
    """Weight of the value loss."""
    gae_lambda: UnitInterval = 1.0
    """Lambda of generalised advantage estimation; 1: returns with a bootstrapped end."""
    learning_rate: Positive = 1e-3
    """Initial learning rate of RMSprop."""
    anneal: Literal["linear", "cosine", "constant"] = "linear"
    """Schedule of the learning rate, down to 0 at the end of the run."""
    max_grad_norm: Positive = 0.5
    """Maximum norm of the gradient."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Wire A2C; ``make_loss`` replaces ``cfg.loss``, ``parts`` the parts of the trainer."""
    experiment = Experiment(cfg, algorithm="a2c")
    env = experiment.make_env()

    actor = make_actor(env, cfg.hidden_sizes, cfg.activation).to(cfg.device)
    critic = make_value(env, cfg.hidden_sizes, cfg.activation).to(cfg.device)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        critic,
        entropy_coeff=cfg.entropy_coeff,
        critic_coeff=cfg.critic_coeff,
        loss_critic_type="l2",
    )
    optimizer = RMSprop(loss.parameters(), lr=cfg.learning_rate, alpha=0.99, eps=1e-5)

    return experiment.trainer(
        env,
        actor,
        advantage=GAE(gamma=cfg.gamma, lmbda=cfg.gae_lambda, value_network=critic),
        update=Update(loss, optimizer, max_grad_norm=cfg.max_grad_norm, compile=cfg.compile),
        hooks=[AnnealLearningRate(optimizer, cfg.anneal)],
        parts=parts,
    )


if __name__ == "__main__":
    main(Config, build)
