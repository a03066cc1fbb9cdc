"""REINFORCE with baseline (Williams 1992; Sutton and Barto 2018, section 13.4).

Run it::

    python -m recipes.reinforce env.id=Acrobot-v1 seed=1
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Adam

from kit.advantages import RewardToGo
from kit.config import Positive
from kit.experiment import EnvConfig, Experiment, OnPolicyConfig, OnPolicySteps, main
from kit.hooks import AnnealLearningRate
from kit.modules import make_actor, make_value
from kit.trainer import Trainer
from kit.update import Update


@dataclass
class Config(OnPolicyConfig):
    """Settings of REINFORCE: whole episodes, each used once."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(normalize_observation=True))
    steps: OnPolicySteps = field(
        default_factory=lambda: OnPolicySteps(
            total_policy_steps=96_000,
            steps_per_env=None,
            min_steps=500,
            update_epochs=1,
            minibatch_size=None,
            evaluation_every=20_000,
        )
    )
    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers of policy and baseline."""
    activation: str = "tanh"
    """Activation: tanh, sigmoid_tanh (faster on a CPU), relu, elu, silu, gelu."""
    loss: str = "ReinforceLoss"
    """Loss of torchrl.objectives, or module:Class."""
    normalize_advantage: bool = True
    """Whether advantages are normalised to mean 0 and deviation 1 in each batch."""
    learning_rate: Positive = 5e-3
    """Initial learning rate of Adam."""
    anneal: Literal["linear", "cosine", "constant"] = "constant"
    """Schedule of the learning rate; all but constant end at 0."""
    max_grad_norm: Positive = 0.5
    """Maximum norm of the gradient."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Wire REINFORCE; ``make_loss`` replaces ``cfg.loss``, ``parts`` the parts of the trainer."""
    experiment = Experiment(cfg, algorithm="reinforce")
    env = experiment.make_env()

    actor = make_actor(env, cfg.hidden_sizes, cfg.activation).to(cfg.device)
    baseline = make_value(env, cfg.hidden_sizes, cfg.activation).to(cfg.device)
    loss = experiment.make_loss(make_loss or cfg.loss, actor, baseline, loss_critic_type="l2")
    optimizer = Adam(loss.parameters(), lr=cfg.learning_rate, fused=True)
    returns = RewardToGo(gamma=cfg.gamma, value_network=baseline, normalize=cfg.normalize_advantage)

    return experiment.trainer(
        env,
        actor,
        advantage=returns,
        update=Update(loss, optimizer, max_grad_norm=cfg.max_grad_norm, compile=cfg.compile),
        hooks=[AnnealLearningRate(optimizer, cfg.anneal)],
        parts=parts,
    )


if __name__ == "__main__":
    main(Config, build)
