"""Soft actor-critic (Haarnoja et al. 2018). Continuous actions.

kit train sac env.id=Hopper-v5 steps.replay_ratio=1/4 seed=1
kit train sac --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.optim import Adam, Optimizer
from torchrl.objectives import SoftUpdate

from kit import CriticNetworkConfig, EnvConfig, Experiment, OffPolicyConfig, Trainer, Update, main
from kit.config import (
    FiniteFloat,
    NumNetworks,
    PositiveFloat,
    PositiveInt,
    ScheduleName,
    SquashedNoiseConfig,
    UnitInterval,
    reject_unused,
)
from kit.envs import VectorEnv
from kit.hooks import anneal_learning_rates
from kit.modules import make_action_value, make_actor, with_gsde


@dataclass
class Config(SquashedNoiseConfig, CriticNetworkConfig, OffPolicyConfig):
    """Settings for SAC."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="Pendulum-v1", num_envs=1))
    loss: str = "SACLoss"
    """Loss class: a name from torchrl.objectives, or your own as module:Class."""
    num_critics: NumNetworks = 2
    """Number of Q-networks. Targets use the minimum of their estimates."""
    tau: UnitInterval = 0.005
    """Polyak coefficient: weight of the online networks in each target update (1: full copy)."""
    target_update_every: PositiveInt = 1
    """Gradient steps between target network updates."""
    initial_alpha: PositiveFloat = 1.0
    """Initial entropy temperature."""
    fixed_alpha: bool = False
    """Whether the entropy temperature stays at initial_alpha. false: it is learned."""
    target_entropy: FiniteFloat | None = None
    """Target entropy in nats, in the environment's own action units. null: minus the number
    of action dimensions."""
    learning_rate: PositiveFloat = 1e-3
    """Initial Adam learning rate for the actor, the critics and the temperature."""
    lr_schedule: ScheduleName = "constant"
    """Learning-rate schedule: constant; linear or cosine (decay to 0); "piecewise 0.5 0.1"
    (multiplied by 0.1 halfway through the run); or "exponential 0.99" (multiplied by 0.99 after
    each iteration)."""


def make_policy(env: VectorEnv, hidden_sizes: list[int], activation: str, **changes: Any) -> Any:
    """Create an actor with a normal distribution, squashed by tanh to the action bounds."""
    how: Any = {"continuous": "tanh_normal", "orthogonal": False, "return_log_prob": False}
    return make_actor(env, hidden_sizes, activation, **{**how, **changes}).select_out_keys("action")


def temperature(env: VectorEnv, cfg: Any) -> dict[str, Any]:
    """Return the loss arguments for the entropy temperature."""
    if cfg.fixed_alpha:
        reject_unused(cfg, ["target_entropy"], "fixed_alpha=true disables temperature tuning")
    target = cfg.target_entropy
    target = -float(env.action_spec.shape[1:].numel()) if target is None else target
    how = {"alpha_init": cfg.initial_alpha, "fixed_alpha": cfg.fixed_alpha}
    return {**how, "target_entropy": target}


def optimizers(experiment: Experiment, loss: Any, **settings: Any) -> dict[str, Optimizer]:
    """Create one optimizer per loss, so that actor and temperature can be updated less often."""
    critics, actor = loss.qvalue_network_params.parameters(), loss.actor_network_params.parameters()
    parameters = {"loss_qvalue": critics, "loss_actor": actor}
    parameters |= {} if loss.fixed_alpha else {"loss_alpha": [loss.log_alpha]}
    make, settings = experiment.make_optimizer, {"fused": True, **settings}
    return {name: make(Adam, trained, **settings) for name, trained in parameters.items()}


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="sac", parts=parts)
    env = experiment.make_env(actions="continuous")
    sizes, activation = cfg.hidden_sizes, cfg.activation
    actor = experiment.make_actor(make_policy, env, sizes, activation, **cfg.distribution)
    critic = experiment.make_critic(make_action_value, env, cfg.critic_sizes, activation)
    form = {"num_qvalue_nets": cfg.num_critics, "loss_function": "l2", **temperature(env, cfg)}
    loss = experiment.make_loss(make_loss or cfg.loss, actor, critic, **form)
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
