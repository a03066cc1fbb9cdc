"""Randomised ensembled double Q-learning (Chen et al. 2021). Continuous actions.

The number of critics, critics per target, replay ratio and policy delay are the same as in the
authors' code.

kit train redq env.id=Hopper-v5 steps.total_policy_steps=125_000 seed=1
kit train redq --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrl.objectives import SoftUpdate

from kit import Experiment, OffPolicySteps, SettingError, Trainer, Update, main
from kit.config import NumNetworks, PositiveInt
from kit.hooks import anneal_learning_rates
from kit.modules import make_action_value, with_gsde
from recipes import sac


@dataclass
class Config(sac.Config):
    """Settings for REDQ: the settings for SAC with different defaults, plus critics per target."""

    steps: OffPolicySteps = field(
        default_factory=lambda: OffPolicySteps(
            total_policy_steps=3_000, learning_starts=500, replay_ratio=20, minibatch_size=128
        )
    )
    loss: str = "kit.losses:REDQLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    num_critics: NumNetworks = 10
    """Number of Q-networks. The actor maximises the mean of their estimates."""
    num_target_critics: NumNetworks = 2
    """Number of Q-networks sampled in each gradient step to compute targets. Targets use the
    minimum of their estimates."""
    policy_delay: PositiveInt = 20
    """Number of critic gradient steps per gradient step of the actor and the temperature."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="redq", parts=parts)
    if cfg.num_target_critics >= cfg.num_critics:
        reason = f"It must be smaller than num_critics={cfg.num_critics} for a random subset"
        near = [max(1, cfg.num_critics - 1)]
        raise SettingError("num_target_critics", cfg.num_target_critics, reason, near)
    if experiment.plan.sequence_length == 1:  # TorchRL's REDQLoss mixes up dimensions
        reason = "REDQLoss does not support sequences of one transition"
        raise SettingError("steps.sequence_length", 1, reason, [None, 2])
    env = experiment.make_env(actions="continuous")
    sizes, activation = cfg.hidden_sizes, cfg.activation
    actor = experiment.make_actor(sac.make_policy, env, sizes, activation, **cfg.distribution)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        experiment.make_critic(make_action_value, env, cfg.critic_sizes, cfg.activation),
        num_qvalue_nets=cfg.num_critics,
        sub_sample_len=cfg.num_target_critics,
        loss_function="l2",
        **sac.temperature(env, cfg),
        min_alpha=1e-12,  # effectively no bounds; TorchRL's defaults are 0.1 and 10
        max_alpha=1e12,
    )
    _ = getattr(loss, "target_entropy", None)  # TorchRL registers this buffer on first access
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
