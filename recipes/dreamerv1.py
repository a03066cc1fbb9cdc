"""Dreamer (Hafner et al. 2020). Discrete and continuous actions.

The actor is trained in a world model with Gaussian latents. Its gradients are backpropagated
through the learned dynamics.

kit train dreamerv1 steps=dreamer-paper steps.collect_interval=50 seed=1
kit train dreamerv1 --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.optim import Adam

from kit import EnvConfig, Experiment, ReplayConfig, SequenceSteps, StepPlan, Trainer, Update, main
from kit.buffers import SequenceReplay
from kit.config import NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval, reject_unused
from kit.dialects import Dialect
from kit.hooks import Anneal
from kit.modules import GaussianWorldModel, Player, TanhActor, elu_network


def episodes() -> SequenceSteps:
    """Return step settings that train after each complete episode, as in Algorithm 1."""
    return SequenceSteps(
        steps_per_env=None, min_episodes=1, learning_starts=1_000, random_steps=None,
        replay_ratio="1/2",
    )  # fmt: skip


@dataclass
class Config(ReplayConfig):
    """Settings for Dreamer."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="Pendulum-v1", num_envs=1))
    steps: SequenceSteps | Dialect | StepPlan = field(default_factory=episodes)
    size: str = "nano"
    """Size of all networks: nano, tiny or published (as in the paper)."""
    loss: str = "kit.losses:DreamerV1Loss"
    """Loss class, as module:Class."""
    buffer_size: PositiveInt = 100_000
    """Capacity of the replay buffer in records. An episode of T policy steps has T + 1 records."""
    imagination_horizon: PositiveInt = 15
    """Policy steps in each imagined rollout."""
    imagination_starts: PositiveInt | None = 8
    """Number of time steps, counted from the end of each sequence, from which imagined rollouts
    start. null: all time steps, as in the paper."""
    lmbda: UnitInterval = 0.95
    """Lambda for lambda-returns."""
    free_nats: NonNegativeFloat = 1.0
    """KL divergence between posterior and prior, in nats, below which there is no penalty. The
    paper uses 3, for pixels."""
    divergence_coeff: NonNegativeFloat = 0.1
    """Weight of the KL divergence. The paper uses 1, for pixels."""
    continuation_coeff: NonNegativeFloat = 10.0
    """Weight of the continuation loss. 0: imagined episodes never end."""
    exploration_noise: NonNegativeFloat = 0.3
    """Standard deviation of the noise added to continuous actions, which are scaled to [-1, 1]."""
    exploration_epsilon: UnitInterval = 0.0
    """Probability of a random action, for discrete actions."""
    exploration_halving: PositiveFloat | None = None
    """Policy steps in which the noise or the probability halves. null: they are constant."""
    exploration_min: NonNegativeFloat = 0.0
    """Value below which the noise or the probability does not fall."""
    model_learning_rate: PositiveFloat = 6e-4
    """Adam learning rate for the world model."""
    learning_rate: PositiveFloat = 3e-4
    """Adam learning rate for the actor and the critic. The paper uses 8e-5."""
    max_grad_norm: PositiveFloat | None = 100.0
    """Maximum gradient norm, applied separately to the world model, the actor and the critic. null:
    no clipping."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    experiment = Experiment(cfg, algorithm="dreamer_v1", parts=parts)
    env = experiment.make_env()

    model = GaussianWorldModel(env, cfg.size)
    if model.code.discrete and not cfg.exploration_epsilon:
        reject_unused(cfg, ("exploration_noise",), "noise is not added to discrete actions")
    if cfg.exploration_halving is None:
        reject_unused(cfg, ("exploration_min",), "exploration is constant")
    actor = TanhActor(model.code, model.features, model.size)
    critic = elu_network(model.features, model.size.units, 3, 1)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        model,
        actor,
        critic,
        imagination_horizon=cfg.imagination_horizon,
        imagination_starts=cfg.imagination_starts,
        gamma=cfg.gamma,
        lmbda=cfg.lmbda,
        free_nats=cfg.free_nats,
        divergence_coeff=cfg.divergence_coeff,
        continuation_coeff=cfg.continuation_coeff,
    )
    rates = {"model": cfg.model_learning_rate, "actor": cfg.learning_rate}
    trained = {"model": model, "actor": actor, "critic": critic}
    optimizers = {
        f"loss_{name}": experiment.make_optimizer(
            Adam, module.parameters(), lr=rates.get(name, cfg.learning_rate), eps=1e-7, fused=True
        )
        for name, module in trained.items()
    }
    update = Update(loss, optimizers, max_grad_norm=cfg.max_grad_norm, compile=cfg.compile)

    player = Player(model, actor, cfg.exploration_noise, epsilon=cfg.exploration_epsilon)
    player.to(cfg.device)
    buffer = SequenceReplay(cfg.buffer_size, experiment.plan.sequence_length, cfg.device)
    hooks = [] if cfg.exploration_halving is None else [decaying_exploration(player, cfg)]
    return experiment.trainer(env, player, buffer=buffer, update=update, hooks=hooks)


def decaying_exploration(player: Player, cfg: Config) -> Anneal:
    """Create a hook that reduces the player's exploration, and logs it."""
    name = "epsilon" if player.actor.code.discrete else "exploration_noise"
    start, halving, least = getattr(player, name), cfg.exploration_halving, cfg.exploration_min
    assert halving is not None
    return Anneal(player, name, lambda steps: max(start * 0.5 ** (steps / halving), least))


if __name__ == "__main__":
    main(Config, build)
