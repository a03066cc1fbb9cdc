"""CrossQ (Bhatt et al. 2024), continuous actions: batch renormalisation, no target network.

python -m recipes.crossq env.id=Hopper-v5 steps.total_policy_steps=1_000_000 seed=1
python -m recipes.crossq --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kit import EnvConfig, Experiment, OffPolicyConfig, OffPolicySteps, Trainer, Update, main
from kit.config import (
    CriticNetworkConfig,
    DecayRate,
    FiniteFloat,
    NonNegativeInt,
    NumNetworks,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
)
from kit.losses import CrossQLoss
from kit.modules import BatchRenorm, make_action_value
from kit.steps import SettingError
from recipes import sac


@dataclass
class Config(CriticNetworkConfig, OffPolicyConfig):
    """Settings of CrossQ."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="Pendulum-v1", num_envs=1))
    steps: OffPolicySteps = field(
        default_factory=lambda: OffPolicySteps(total_policy_steps=20_000, learning_starts=500)
    )
    loss: str = "kit.losses:CrossQLoss"
    """Loss as module:Class, or a name from torchrl.objectives."""
    num_critics: NumNetworks = 2
    """Number of Q-networks; targets use the minimum over them."""
    policy_delay: PositiveInt = 3
    """Gradient steps of the critics for each one of actor and temperature."""
    renorm_actor: bool = False
    """Whether the actor is that of the authors' program: batch renormalisation as well, and log
    deviations clipped to [-20, 2]."""
    momentum: UnitInterval = 0.01
    """Weight of a minibatch in the running statistics of a network."""
    renorm_warmup: NonNegativeInt = 100_000
    """Minibatches of a network with batch normalisation, before running ones renormalise."""
    initial_alpha: PositiveFloat = 1.0
    """Initial entropy temperature."""
    fixed_alpha: bool = False
    """Whether the temperature stays as it is; otherwise it is learned."""
    target_entropy: FiniteFloat | None = None
    """Target entropy of actions in their own units, in nats; null: minus their dimensions."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate of Adam for actor, critics and temperature."""
    beta_1: DecayRate = 0.5
    """DecayRate of Adam's mean of gradients."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Wire CrossQ; ``make_loss`` replaces ``cfg.loss``, ``parts`` the parts of the trainer."""
    experiment = Experiment(cfg, algorithm="crossq", parts=parts)
    env = experiment.make_env(actions="continuous")

    def renorm(width: int) -> list[BatchRenorm]:
        return [BatchRenorm(width, momentum=cfg.momentum, warmup_steps=cfg.renorm_warmup)]

    own = {"after": renorm, "continuous": "clipped_tanh_normal"} if cfg.renorm_actor else {}
    actor = experiment.make_actor(sac.make_policy, env, cfg.hidden_sizes, cfg.activation, **own)
    actor.eval()  # it acts by running statistics, but in its own loss
    critic = experiment.make_critic(
        make_action_value, env, cfg.critic_sizes, cfg.activation, after=renorm
    )
    form = {"num_qvalue_nets": cfg.num_critics, "loss_function": "l2", **sac.temperature(env, cfg)}
    loss = experiment.make_loss(make_loss or cfg.loss, actor, critic, **form)
    if cfg.renorm_actor and not isinstance(loss, CrossQLoss):
        why = "needs a loss that takes minibatches into the actor's running statistics"
        raise SettingError("renorm_actor", True, why, "use loss=kit.losses:CrossQLoss")
    owned = sac.optimizers(experiment, loss, lr=cfg.learning_rate, betas=(cfg.beta_1, 0.999))
    update = Update(
        loss,
        owned,
        every=dict.fromkeys(owned.keys() - {"loss_qvalue"}, cfg.policy_delay),
        max_grad_norm=cfg.max_grad_norm,
        compile=cfg.compile,
    )
    buffer = experiment.make_replay_buffer()
    return experiment.trainer(env, actor, buffer=buffer, update=update)


if __name__ == "__main__":
    main(Config, build)
