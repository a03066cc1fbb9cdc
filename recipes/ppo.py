"""Proximal policy optimisation (Schulman et al. 2017), discrete and continuous actions.

python -m recipes.ppo env.id=HalfCheetah-v5 env.num_envs=4 seed=1
python -m recipes.ppo --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch.optim import Adam

from kit.advantages import GAE
from kit.config import NotNegative, Positive, UnitInterval
from kit.experiment import EnvConfig, Experiment, OnPolicyConfig, main
from kit.hooks import AnnealLearningRate, TargetKL
from kit.modules import make_actor, make_body, make_value
from kit.trainer import Trainer
from kit.update import Update


@dataclass
class Config(OnPolicyConfig):
    """Settings of PPO."""

    env: EnvConfig = field(
        default_factory=lambda: EnvConfig(normalize_observation=True, normalize_reward=True)
    )
    hidden_sizes: list[int] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers of actor and critic."""
    activation: str = "tanh"
    """Activation: tanh, sigmoid_tanh (faster on a CPU), relu, elu, silu, gelu."""
    shared_body: bool = False
    """Whether actor and critic share their hidden layers."""
    initial_log_std: float = 0.0
    """Initial log standard deviation of the Gaussian policy."""
    loss: str = "ClipPPOLoss"
    """Loss of torchrl.objectives (ClipPPOLoss, KLPENPPOLoss, PPOLoss), or module:Class."""
    clip_epsilon: Positive = 0.2
    """Clipping range of the probability ratio."""
    clip_value: Positive | None = None
    """Clipping range of the value around its last estimate; null: not clipped."""
    entropy_coeff: NotNegative = 0.0
    """Weight of the entropy bonus."""
    critic_coeff: NotNegative = 0.5
    """Weight of the value loss."""
    critic_loss: Literal["l2", "l1", "smooth_l1"] = "l2"
    """Distance between value and return: squared, absolute, or both (Huber)."""
    normalize_advantage: bool = True
    """Whether advantages are normalised to mean 0 and deviation 1 in each minibatch."""
    gae_lambda: UnitInterval = 0.95
    """Lambda of generalised advantage estimation."""
    learning_rate: Positive = 1e-3
    """Initial learning rate of Adam."""
    anneal: Literal["linear", "cosine", "constant"] = "linear"
    """Schedule of the learning rate, down to 0 at the end of the run."""
    max_grad_norm: Positive = 0.5
    """Maximum norm of the gradient."""
    target_kl: Positive | None = None
    """An update stops early once the approximate KL exceeds 1.5 times this; null: never."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Wire PPO; ``make_loss`` replaces ``cfg.loss``, ``parts`` the parts of the trainer."""
    experiment = Experiment(cfg, algorithm="ppo")
    env = experiment.make_env()
    body = make_body(env, cfg.hidden_sizes, cfg.activation) if cfg.shared_body else None
    shape: dict[str, Any] = {"hidden_sizes": cfg.hidden_sizes, "activation": cfg.activation}
    actor = make_actor(env, **shape, body=body, initial_log_std=cfg.initial_log_std).to(cfg.device)
    critic = make_value(env, **shape, body=body).to(cfg.device)
    clips = {"clip_epsilon": cfg.clip_epsilon, "clip_value": cfg.clip_value}
    weights = {"entropy_coeff": cfg.entropy_coeff, "critic_coeff": cfg.critic_coeff}
    form = {"normalize_advantage": cfg.normalize_advantage, "loss_critic_type": cfg.critic_loss}
    loss = experiment.make_loss(make_loss or cfg.loss, actor, critic, **clips, **weights, **form)
    optimizer = Adam(loss.parameters(), lr=cfg.learning_rate, eps=1e-5, fused=True)
    return experiment.trainer(
        env,
        actor,
        advantage=GAE(gamma=cfg.gamma, lmbda=cfg.gae_lambda, value_network=critic),
        update=Update(loss, optimizer, max_grad_norm=cfg.max_grad_norm, compile=cfg.compile),
        hooks=[AnnealLearningRate(optimizer, cfg.anneal), TargetKL(cfg.target_kl)],
        parts=parts,
    )


if __name__ == "__main__":
    main(Config, build)
