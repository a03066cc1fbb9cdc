"""DreamerV3 (Hafner et al. 2025): a world model, and an actor and a critic that learn inside it.

python -m recipes.dreamerv3 env.id=Acrobot-v1 size=tiny seed=1
python -m recipes.dreamerv3 --help
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

from torch.nn import Parameter
from torch.optim import Optimizer
from torchrl.envs.utils import ExplorationType
from torchrl.objectives import SoftUpdate
from torchrl.trainers.algorithms import DreamerV3Optimizer

from kit import EnvConfig, Experiment, ReplayConfig, SequenceSteps, StepPlan, Trainer, Update, main
from kit.buffers import SequenceReplay
from kit.config import (
    Limits,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
)
from kit.dialects import Dialect
from kit.envs import VectorEnv
from kit.modules import LatentActor, Player, make_latent_critic, make_world_model

LOSS_SETTINGS = (
    "imagination_horizon", "imagination_starts", "gamma", "lmbda", "entropy_coeff",
    "free_nats", "dynamics_coeff", "representation_coeff", "replay_critic_coeff", "stored_latents",
)  # fmt: skip
"""Settings that are arguments of the loss, by the same names."""


@dataclass
class Config(ReplayConfig):
    """Settings of DreamerV3."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="CartPole-v1", num_envs=1))
    steps: SequenceSteps | Dialect | StepPlan = field(
        default_factory=lambda: SequenceSteps(replay_ratio="1/2")
    )
    size: str = "nano"
    """Size of all networks: nano, tiny, 1m, 12m, 25m, 50m, 100m, 200m, 400m (parameters)."""
    latents: Annotated[int, Limits(1, 1_024)] | None = None
    """Discrete latents; null: as many as the size has. Those that nothing needs stay random."""
    loss: str = "kit.losses:DreamerV3Loss"
    """Loss, as module:Class."""
    gamma: UnitInterval = 0.997
    """Discount factor."""
    buffer_size: PositiveInt = 100_000
    """Records that the replay holds: observations, with one more for each episode."""
    imagination_horizon: Annotated[int, Limits(1, 1_000)] = 15
    """Imagined policy steps."""
    imagination_starts: PositiveInt | None = 8
    """Last time steps of each sequence from which imagination begins, of a shorter one all; null:
    all, as published."""
    lmbda: UnitInterval = 0.95
    """Weight of longer returns."""
    entropy_coeff: NonNegativeFloat = 3e-4
    """Weight of the actor's entropy."""
    free_nats: NonNegativeFloat = 1.0
    """Divergence between posterior and prior that costs nothing."""
    dynamics_coeff: NonNegativeFloat = 1.0
    """Weight of the divergence that trains the prior."""
    representation_coeff: NonNegativeFloat = 0.1
    """Weight of the divergence that trains the posterior. Where observations are a few small
    numbers, whose errors are small, take less of both."""
    replay_critic_coeff: NonNegativeFloat = 0.3
    """Weight of the critic's loss on replayed sequences, from one start of imagination to the
    next; with one alone there is none."""
    stored_latents: bool = True
    """Whether sequences begin with latents that the replay keeps; false: with zeros."""
    tau: UnitInterval = 0.02
    """Polyak averaging coefficient of the slow critic."""
    learning_rate: PositiveFloat = 4e-4
    """Learning rate; 4e-5 was published, for size=12m and larger."""
    warmup_gradient_steps: NonNegativeInt = 0
    """Gradient steps over which the learning rate rises from 0; 1,000 was published."""
    max_grad_ratio: PositiveFloat = 0.3
    """Maximum norm of a tensor's gradient, relative to that of the tensor."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Wire DreamerV3; ``make_loss`` replaces ``cfg.loss``, ``parts`` the parts of the trainer."""
    experiment = Experiment(cfg, algorithm="dreamer_v3", parts=parts)
    env = experiment.make_env()

    world_model = make_world_model(env, cfg.size, cfg.latents)
    actor = LatentActor(world_model.code, world_model.features, world_model.size)
    loss = experiment.make_loss(
        make_loss or cfg.loss,
        world_model,
        actor,
        make_latent_critic(world_model),
        **{name: getattr(cfg, name) for name in LOSS_SETTINGS},
    )
    player = Player(world_model, actor, stored_latents=cfg.stored_latents).to(cfg.device)
    wired = around(experiment, env, loss, player)
    return experiment.trainer(env, player, **wired)


def make_optimizer(experiment: Experiment, parameters: Iterable[Parameter]) -> Optimizer:
    """Create the optimizer of the settings."""
    cfg: Any = experiment.cfg
    return experiment.make_optimizer(
        DreamerV3Optimizer,
        parameters,
        lr=cfg.learning_rate,
        agc=cfg.max_grad_ratio,
        warmup_steps=cfg.warmup_gradient_steps,
    )


def around(
    experiment: Experiment, env: VectorEnv, loss: Any, player: Player, **own: Optimizer
) -> dict[str, Any]:
    """Create the update, the replay, and an evaluation with sampled actions, as published.

    Args:
        experiment: owner of the settings.
        env: training environments.
        loss: loss module.
        player: policy.
        **own: optimizers of single losses, by name of the loss. All other weights and losses share
            the optimizer of the settings.
    """
    cfg: Any = experiment.cfg
    length = experiment.plan.sequence_length
    groups = [group for optimizer in own.values() for group in optimizer.param_groups]
    left = {id(parameter) for group in groups for parameter in group["params"]}
    shared = make_optimizer(experiment, [one for one in loss.parameters() if id(one) not in left])
    optimizer = {"": shared, **own}
    target_updater = SoftUpdate(loss, tau=cfg.tau)
    return {
        "update": Update(loss, optimizer, compile=cfg.compile, target_updater=target_updater),
        "buffer": SequenceReplay(cfg.buffer_size, length, cfg.device, player.stored),
        "evaluate": experiment.make_evaluator(env, player, exploration_type=ExplorationType.RANDOM),
    }


if __name__ == "__main__":
    main(Config, build)
