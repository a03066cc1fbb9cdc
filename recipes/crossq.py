"""CrossQ, SAC without target networks (Bhatt et al. 2024). Continuous actions.

The critics use batch renormalisation instead of target networks.

kit train crossq env.id=Hopper-v5 steps.total_policy_steps=1_000_000 seed=1
kit train crossq --help
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
    """Settings for CrossQ."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="Pendulum-v1", num_envs=1))
    steps: OffPolicySteps = field(
        default_factory=lambda: OffPolicySteps(total_policy_steps=20_000, learning_starts=500)
    )
    loss: str = "kit.losses:CrossQLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    num_critics: NumNetworks = 2
    """Number of Q-networks. Targets use the minimum of their estimates."""
    policy_delay: PositiveInt = 3
    """Number of critic gradient steps per gradient step of the actor and the temperature."""
    renorm_actor: bool = False
    """Whether the actor also uses batch renormalisation and clips log standard deviations to [-20,
    2], as in the authors' code."""
    momentum: UnitInterval = 0.01
    """Weight of each minibatch in the running statistics of batch renormalisation."""
    renorm_warmup: NonNegativeInt = 100_000
    """Number of minibatches for which plain batch normalisation is used before batch
    renormalisation starts."""
    initial_alpha: PositiveFloat = 1.0
    """Initial entropy temperature."""
    fixed_alpha: bool = False
    """Whether the entropy temperature stays at initial_alpha. false: it is learned."""
    target_entropy: FiniteFloat | None = None
    """Target entropy in nats, in the environment's own action units. null: minus the number
    of action dimensions."""
    learning_rate: PositiveFloat = 1e-3
    """Adam learning rate for the actor, the critics and the temperature."""
    beta_1: DecayRate = 0.5
    """Adam's decay rate for the running average of gradients."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="crossq", parts=parts)
    env = experiment.make_env(actions="continuous")

    def renorm(width: int) -> list[BatchRenorm]:
        return [BatchRenorm(width, momentum=cfg.momentum, warmup_steps=cfg.renorm_warmup)]

    own = {"after": renorm, "continuous": "clipped_tanh_normal"} if cfg.renorm_actor else {}
    actor = experiment.make_actor(sac.make_policy, env, cfg.hidden_sizes, cfg.activation, **own)
    actor.eval()  # the actor uses minibatch statistics only in the actor loss
    critic = experiment.make_critic(
        make_action_value, env, cfg.critic_sizes, cfg.activation, after=renorm
    )
    form = {"num_qvalue_nets": cfg.num_critics, "loss_function": "l2", **sac.temperature(env, cfg)}
    loss = experiment.make_loss(make_loss or cfg.loss, actor, critic, **form)
    if cfg.renorm_actor and not isinstance(loss, CrossQLoss):
        reason = "It needs a loss that updates the actor's running statistics"
        raise SettingError("renorm_actor", True, reason, "Use loss=kit.losses:CrossQLoss")
    optimizers = sac.optimizers(experiment, loss, lr=cfg.learning_rate, betas=(cfg.beta_1, 0.999))
    update = Update(
        loss,
        optimizers,
        every=dict.fromkeys(optimizers.keys() - {"loss_qvalue"}, cfg.policy_delay),
        max_grad_norm=cfg.max_grad_norm,
        compile=cfg.compile,
    )
    buffer = experiment.make_replay_buffer()
    return experiment.trainer(env, actor, buffer=buffer, update=update)


if __name__ == "__main__":
    main(Config, build)
