"""Randomised ensembled double Q-learning (Chen et al. 2021), continuous actions.

Critics, those of a target, gradient steps and policy delay are those of the authors' code.

python -m recipes.redq env.id=Hopper-v5 steps.total_policy_steps=125_000 seed=1
python -m recipes.redq --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchrl.objectives import SoftUpdate

from kit import Experiment, OffPolicySteps, SettingError, Trainer, Update, main
from kit.config import NumNetworks, PositiveInt
from kit.modules import make_action_value
from recipes import sac


@dataclass
class Config(sac.Config):
    """Settings of REDQ: those of SAC, with these defaults, and the critics of a target."""

    steps: OffPolicySteps = field(
        default_factory=lambda: OffPolicySteps(
            total_policy_steps=3_000, learning_starts=500, replay_ratio=20, minibatch_size=128
        )
    )
    loss: str = "kit.losses:REDQLoss"
    """Loss of torchrl.objectives, or module:Class."""
    num_critics: NumNetworks = 10
    """Number of Q-networks; the actor ascends their mean."""
    num_target_critics: NumNetworks = 2
    """Q-networks drawn at random for each gradient step; its targets use the minimum over them."""
    policy_delay: PositiveInt = 20
    """Gradient steps of the critics for each one of actor and temperature."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Wire REDQ; ``make_loss`` replaces ``cfg.loss``, ``parts`` the parts of the trainer."""
    experiment = Experiment(cfg, algorithm="redq", parts=parts)
    if cfg.num_target_critics >= cfg.num_critics:
        why = f"leaves none out of num_critics={cfg.num_critics}, and then nothing is random"
        works = [max(1, cfg.num_critics - 1)]
        raise SettingError("num_target_critics", cfg.num_target_critics, why, works)
    if experiment.plan.sequence_length == 1:  # TorchRL's REDQLoss takes it for another axis
        why = "makes sequences of which each is a transition"
        raise SettingError("steps.sequence_length", 1, why, [None, 2])
    env = experiment.make_env(actions="continuous")
    actor = experiment.make_actor(sac.make_policy, env, cfg.hidden_sizes, cfg.activation)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        experiment.make_critic(make_action_value, env, cfg.critic_sizes, cfg.activation),
        num_qvalue_nets=cfg.num_critics,
        sub_sample_len=cfg.num_target_critics,
        loss_function="l2",
        **sac.temperature(env, cfg),
        min_alpha=1e-12,  # TorchRL's REDQLoss bounds it by itself, to 0.1 and 10
        max_alpha=1e12,
    )
    _ = getattr(loss, "target_entropy", None)  # a buffer that TorchRL registers when first read
    owned = sac.optimizers(experiment, loss, lr=cfg.learning_rate)
    update = Update(
        loss,
        owned,
        every=dict.fromkeys(owned.keys() - {"loss_qvalue"}, cfg.policy_delay),
        max_grad_norm=cfg.max_grad_norm,
        compile=cfg.compile,
        target_updater=SoftUpdate(loss, tau=cfg.tau),
    )
    buffer = experiment.make_replay_buffer()
    return experiment.trainer(env, actor, buffer=buffer, update=update)


if __name__ == "__main__":
    main(Config, build)
