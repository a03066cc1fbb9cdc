"""Truncated quantile critics (Kuznetsov et al. 2020), continuous actions.

python -m recipes.tqc env.id=Hopper-v5 steps.total_policy_steps=1_000_000 seed=1
python -m recipes.tqc --help
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Adam
from torchrl.objectives import SoftUpdate

from kit import Experiment, SettingError, Trainer, Update, main
from kit.config import NonNegativeInt, NumNetworks, NumQuantiles
from kit.modules import make_action_value
from recipes import sac


@dataclass
class Config(sac.Config):
    """Settings of TQC: those of SAC, with these defaults, and quantiles."""

    loss: str = "TQCLoss"
    """Loss of torchrl.objectives, or module:Class."""
    num_critics: NumNetworks = 2
    """Number of Q-networks, each of which estimates the distribution of the return."""
    num_quantiles: NumQuantiles = 25
    """Quantiles that each of the Q-networks estimates."""
    dropped_quantiles: NonNegativeInt = 2
    """Largest quantiles left out of targets, of all Q-networks together, for each of them."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Wire TQC; ``make_loss`` replaces ``cfg.loss``, ``parts`` the parts of the trainer."""
    experiment = Experiment(cfg, algorithm="tqc", parts=parts)
    if not 0 <= cfg.dropped_quantiles < cfg.num_quantiles:
        why = f"is not from 0 to num_quantiles={cfg.num_quantiles}, exclusively"
        nearest = 0 if cfg.dropped_quantiles < 0 else cfg.num_quantiles - 1
        raise SettingError("dropped_quantiles", cfg.dropped_quantiles, why, [nearest])
    env = experiment.make_env(actions="continuous")
    actor = experiment.make_actor(sac.make_policy, env, cfg.hidden_sizes, cfg.activation)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        experiment.make_critic(
            make_action_value, env, cfg.critic_sizes, cfg.activation, outputs=cfg.num_quantiles
        ),
        num_qvalue_nets=cfg.num_critics,
        top_quantiles_to_drop_per_net=cfg.dropped_quantiles,
        **sac.temperature(env, cfg),
    )
    update = Update(
        loss,
        experiment.make_optimizer(Adam, loss.parameters(), lr=cfg.learning_rate, fused=True),
        max_grad_norm=cfg.max_grad_norm,
        compile=cfg.compile,
        target_updater=SoftUpdate(loss, tau=cfg.tau),
    )
    buffer = experiment.make_replay_buffer()
    return experiment.trainer(env, actor, buffer=buffer, update=update)


if __name__ == "__main__":
    main(Config, build)
