"""Twin delayed DDPG (Fujimoto et al. 2018). Continuous actions.

kit train td3 env.id=Hopper-v5 steps.total_policy_steps=1_000_000 seed=1
kit train td3 --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tensordict.nn import TensorDictSequential
from torch.optim import Adam
from torchrl.objectives import SoftUpdate

from kit import CriticNetworkConfig, EnvConfig, Experiment, OffPolicyConfig, Trainer, Update, main
from kit.config import NonNegativeFloat, PositiveFloat, PositiveInt, ScheduleName, UnitInterval
from kit.hooks import anneal_learning_rates
from kit.modules import half_range, make_action_value, make_actor, make_noise


@dataclass
class Config(CriticNetworkConfig, OffPolicyConfig):
    """Settings for TD3."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="Pendulum-v1", num_envs=1))
    loss: str = "kit.losses:TD3Loss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    policy_delay: PositiveInt = 2
    """Number of critic gradient steps per update of the actor and the target networks."""
    exploration_noise: NonNegativeFloat = 0.1
    """Standard deviation of the action noise, relative to half the action range."""
    noise_type: Literal["normal", "ou"] = "normal"
    """Action noise: normal (independent Gaussian noise) or ou (Ornstein-Uhlenbeck process with
    sigma exploration_noise)."""
    policy_noise: NonNegativeFloat = 0.2
    """Standard deviation of the noise added to target actions (target policy smoothing), relative
    to half the action range."""
    noise_clip: NonNegativeFloat = 0.5
    """Maximum absolute value of the noise added to target actions, relative to half the action
    range."""
    tau: UnitInterval = 0.005
    """Polyak coefficient: weight of the online networks in each target update (1: full copy)."""
    learning_rate: PositiveFloat = 1e-3
    """Initial Adam learning rate for the actor and the critics."""
    lr_schedule: ScheduleName = "constant"
    """Learning-rate schedule: constant; linear or cosine (decay to 0); "piecewise 0.5 0.1"
    (multiplied by 0.1 halfway through the run); or "exponential 0.99" (multiplied by 0.99 after
    each iteration)."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="td3", parts=parts)
    env = experiment.make_env(actions="continuous")

    sizes, activation = cfg.hidden_sizes, cfg.activation
    actor = experiment.make_actor(
        make_actor, env, sizes, activation, continuous="deterministic", orthogonal=False
    )
    noise = make_noise(env, cfg.noise_type, float(cfg.exploration_noise))
    unit = half_range(env, cfg.device)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        actor,
        experiment.make_critic(make_action_value, env, cfg.critic_sizes, activation),
        action_spec=env.action_spec[0],
        policy_noise=cfg.policy_noise * unit,
        noise_clip=cfg.noise_clip * unit,
        loss_function="l2",
    )
    networks = {"loss_actor": loss.actor_network_params, "loss_qvalue": loss.qvalue_network_params}
    update = Update(
        loss,
        {
            name: experiment.make_optimizer(
                Adam, parameters.parameters(), lr=cfg.learning_rate, fused=True
            )
            for name, parameters in networks.items()
        },
        every={"loss_actor": cfg.policy_delay},
        max_grad_norm=cfg.max_grad_norm,
        compile=cfg.compile,
        target_updater=SoftUpdate(loss, tau=cfg.tau),
        target_update_every=cfg.policy_delay,
    )
    policy = TensorDictSequential(actor, noise).to(cfg.device)
    buffer = experiment.make_replay_buffer()
    hooks = anneal_learning_rates(update, cfg.lr_schedule)
    return experiment.trainer(env, policy, buffer=buffer, update=update, hooks=hooks)


if __name__ == "__main__":
    main(Config, build)
