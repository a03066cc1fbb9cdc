"""DreamerV3 (Hafner et al. 2025). Discrete and continuous actions.

Actor and critic are trained on imagined rollouts of a world model with discrete latents.

kit train dreamerv3 env.id=Acrobot-v1 size=tiny seed=1
kit train dreamerv3 --help
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
"""Settings that are passed to the loss under the same name."""


@dataclass
class Config(ReplayConfig):
    """Settings for DreamerV3."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="CartPole-v1", num_envs=1))
    steps: SequenceSteps | Dialect | StepPlan = field(
        default_factory=lambda: SequenceSteps(replay_ratio="1/2")
    )
    size: str = "nano"
    """Size of all networks: nano, tiny, or an approximate number of parameters (1m, 12m, 25m, 50m,
    100m, 200m, 400m)."""
    latents: Annotated[int, Limits(1, 1_024)] | None = None
    """Number of discrete latents. Superfluous latents carry no information. null: determined
    by size."""
    loss: str = "kit.losses:DreamerV3Loss"
    """Loss class, as module:Class."""
    gamma: UnitInterval = 0.997
    """Discount factor."""
    buffer_size: PositiveInt = 100_000
    """Capacity of the replay buffer in records. An episode of T policy steps has T + 1 records."""
    imagination_horizon: Annotated[int, Limits(1, 1_000)] = 15
    """Policy steps in each imagined rollout."""
    imagination_starts: PositiveInt | None = 8
    """Number of time steps, counted from the end of each sequence, from which imagined rollouts
    start. null: all time steps, as in the paper."""
    lmbda: UnitInterval = 0.95
    """Lambda for lambda-returns."""
    entropy_coeff: NonNegativeFloat = 3e-4
    """Weight of the entropy bonus."""
    free_nats: NonNegativeFloat = 1.0
    """KL divergence between posterior and prior, in nats, below which there is no penalty."""
    dynamics_coeff: NonNegativeFloat = 1.0
    """Weight of the KL divergence that trains the prior."""
    representation_coeff: NonNegativeFloat = 0.1
    """Weight of the KL divergence that trains the posterior. Reduce both KL weights if observations
    are a few small numbers, because their reconstruction errors are also small."""
    replay_critic_coeff: NonNegativeFloat = 0.3
    """Weight of the critic loss on replayed transitions between starts of imagined rollouts. No
    effect with imagination_starts=1."""
    stored_latents: bool = True
    """Whether sequences start from latents stored in the replay buffer. false: sequences start from
    zeros."""
    tau: UnitInterval = 0.02
    """Polyak coefficient: weight of the online critic in each update of the target critic (1: full
    copy)."""
    target_update_every: PositiveInt = 1
    """Gradient steps between updates of the target critic."""
    learning_rate: PositiveFloat = 4e-4
    """Learning rate. The paper uses 4e-5 for its models, which are size=12m or larger."""
    warmup_gradient_steps: NonNegativeInt = 0
    """Gradient steps over which the learning rate warms up from 0. 0: no warm-up. The paper uses
    1,000."""
    max_grad_ratio: PositiveFloat = 0.3
    """Maximum gradient norm of each parameter tensor, relative to the norm of that tensor."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
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
    """Create an optimizer from the experiment's settings."""
    cfg: Any = experiment.cfg
    return experiment.make_optimizer(
        DreamerV3Optimizer,
        parameters,
        lr=cfg.learning_rate,
        agc=cfg.max_grad_ratio,
        warmup_steps=cfg.warmup_gradient_steps,
    )


def around(
    experiment: Experiment, env: VectorEnv, loss: Any, player: Player, **optimizers: Optimizer
) -> dict[str, Any]:
    """Create the update, the replay buffer, and an evaluator that samples actions.

    Args:
        experiment: experiment with the settings.
        env: training environments.
        loss: loss module.
        player: policy.
        **optimizers: separate optimizers, keyed by loss name. All other parameters share one
            optimizer, created from the settings.
    """
    cfg: Any = experiment.cfg
    length = experiment.plan.sequence_length
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    separate = {id(parameter) for group in groups for parameter in group["params"]}
    remaining = [parameter for parameter in loss.parameters() if id(parameter) not in separate]
    optimizer = {"": make_optimizer(experiment, remaining), **optimizers}
    update = Update(
        loss,
        optimizer,
        compile=cfg.compile,
        target_updater=SoftUpdate(loss, tau=cfg.tau),
        target_update_every=cfg.target_update_every,
    )
    return {
        "update": update,
        "buffer": SequenceReplay(cfg.buffer_size, length, cfg.device, player.stored),
        "evaluate": experiment.make_evaluator(env, player, exploration_type=ExplorationType.RANDOM),
    }


if __name__ == "__main__":
    main(Config, build)
