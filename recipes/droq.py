"""DroQ, SAC with dropout in the critics (Hiraoka et al. 2022). Continuous actions.

kit train droq env.id=Hopper-v5 steps.total_policy_steps=125_000 seed=1
kit train droq --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.nn import Dropout, LayerNorm
from torchrl.objectives import SoftUpdate

from kit import Experiment, OffPolicySteps, Trainer, Update, main
from kit.config import PositiveInt, UnitInterval
from kit.hooks import anneal_learning_rates
from kit.modules import make_action_value, with_gsde
from recipes import sac


@dataclass
class Config(sac.Config):
    """Settings for DroQ: the settings for SAC with different defaults, plus dropout."""

    steps: OffPolicySteps = field(
        default_factory=lambda: OffPolicySteps(
            total_policy_steps=3_000, learning_starts=500, replay_ratio=20, minibatch_size=128
        )
    )
    loss: str = "kit.losses:DroQLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    dropout: UnitInterval = 0.01
    """Dropout probability in the hidden layers of the critics and target critics."""
    policy_delay: PositiveInt = 20
    """Number of critic gradient steps per gradient step of the actor and the temperature."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="droq", parts=parts)
    env = experiment.make_env(actions="continuous")
    sizes, activation = cfg.hidden_sizes, cfg.activation
    actor = experiment.make_actor(sac.make_policy, env, sizes, activation, **cfg.distribution)
    critic = experiment.make_critic(
        make_action_value,
        env,
        cfg.critic_sizes,
        cfg.activation,
        before=lambda width: [Dropout(cfg.dropout), LayerNorm(width)],
    )
    form = {"num_qvalue_nets": cfg.num_critics, "loss_function": "l2"}
    alpha = sac.temperature(env, cfg)
    loss = experiment.make_loss(make_loss or cfg.loss, actor, critic, **form, **alpha)
    optimizers = sac.optimizers(experiment, loss, lr=cfg.learning_rate)
    update = Update(
        loss,
        optimizers,
        every=dict.fromkeys(optimizers.keys() - {"loss_qvalue"}, cfg.policy_delay),
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
