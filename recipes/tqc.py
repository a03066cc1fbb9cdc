"""Truncated quantile critics (Kuznetsov et al. 2020). Continuous actions.

kit train tqc env.id=Hopper-v5 steps.total_policy_steps=1_000_000 seed=1
kit train tqc --help
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.optim import Adam
from torchrl.objectives import SoftUpdate

from kit import Experiment, SettingError, Trainer, Update, main
from kit.config import NonNegativeInt, NumNetworks, NumQuantiles
from kit.hooks import anneal_learning_rates
from kit.modules import make_action_value, with_gsde
from recipes import sac


@dataclass
class Config(sac.Config):
    """Settings for TQC: the settings for SAC with different defaults, plus quantiles."""

    loss: str = "TQCLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    num_critics: NumNetworks = 2
    """Number of Q-networks. Each predicts a distribution of the return."""
    num_quantiles: NumQuantiles = 25
    """Number of quantiles that each Q-network predicts."""
    dropped_quantiles: NonNegativeInt = 2
    """Number of the largest target quantiles that are dropped per Q-network, after pooling the
    quantiles of all Q-networks."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="tqc", parts=parts)
    if not 0 <= cfg.dropped_quantiles < cfg.num_quantiles:
        reason = f"It must be at least 0 and less than num_quantiles={cfg.num_quantiles}"
        nearest = 0 if cfg.dropped_quantiles < 0 else cfg.num_quantiles - 1
        raise SettingError("dropped_quantiles", cfg.dropped_quantiles, reason, [nearest])
    env = experiment.make_env(actions="continuous")
    sizes, activation = cfg.hidden_sizes, cfg.activation
    actor = experiment.make_actor(sac.make_policy, env, sizes, activation, **cfg.distribution)
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
        target_update_every=cfg.target_update_every,
    )
    buffer, hooks = experiment.make_replay_buffer(), anneal_learning_rates(update, cfg.lr_schedule)
    policy = with_gsde(actor, env, cfg)
    return experiment.trainer(env, policy, buffer=buffer, update=update, hooks=hooks)


if __name__ == "__main__":
    main(Config, build)
