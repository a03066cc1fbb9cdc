"""Plan2Explore on DreamerV3 (Sekar et al. 2020): explore first, then solve the task.

kit train plan2explore steps.exploration_steps=20_000   # explore during the whole run (zero-shot)
kit train plan2explore --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torch.optim import Adam

import recipes.dreamerv3
from kit import EnvConfig, Experiment, SettingError, StepPlan, Trainer, main
from kit.buffers import dataset_loading_disabled
from kit.config import Limits, NonNegativeFloat, PositiveFloat
from kit.dialects import Dialect
from kit.hooks import EndOfExploration
from kit.modules import Ensemble, LatentActor, Player, make_latent_critic, make_world_model
from kit.steps import ExplorationSteps
from recipes.dreamerv3 import LOSS_SETTINGS, around, make_optimizer


@dataclass
class Config(recipes.dreamerv3.Config):
    """Settings for Plan2Explore: the settings for DreamerV3 and for the explorer."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="MountainCar-v0", num_envs=1))
    steps: ExplorationSteps | Dialect | StepPlan = field(default_factory=ExplorationSteps)
    loss: str = "kit.losses:Plan2ExploreLoss"
    """Loss class, as module:Class."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate. The default was tuned on a maze (docs/worlds.md)."""
    ensemble: Annotated[int, Limits(2, 1_000)] = 8
    """Number of one-step prediction models. Their disagreement is the intrinsic reward."""
    ensemble_learning_rate: PositiveFloat = 1e-3
    """Adam learning rate for the ensemble."""
    intrinsic_weight: PositiveFloat = 1.0
    """Weight of the intrinsic-reward advantages in the explorer's loss."""
    extrinsic_weight: NonNegativeFloat = 0.0
    """Weight of the task-reward advantages in the explorer's loss. sheeprl uses 1, with
    intrinsic_weight=0.1."""
    intrinsic_reward_multiplier: PositiveFloat = 1.0
    """Factor applied to the intrinsic reward after it is divided by its running standard
    deviation."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Build a trainer. ``make_loss`` replaces ``cfg.loss``; ``parts`` replace trainer parts."""
    fine_tunes = getattr(cfg.steps, "algo", None) == "p2e_dv3_finetuning"
    algorithm = "p2e_dv3_finetuning" if fine_tunes else "p2e_dv3_exploration"
    experiment = Experiment(cfg, algorithm=algorithm, parts=parts)
    explores = _explores(cfg, experiment.plan)
    env = experiment.make_env()

    model = make_world_model(env, cfg.size, cfg.latents)
    features, size = model.features, model.size
    actor, explorer = (LatentActor(model.code, features, size) for _ in range(2))
    ensemble = Ensemble(cfg.ensemble, features, model.code.features, model.embedding, size)
    networks = (
        model,
        actor,
        make_latent_critic(model),
        explorer,
        make_latent_critic(model),
        ensemble,
    )
    own = ("intrinsic_weight", "extrinsic_weight", "intrinsic_reward_multiplier")
    settings = {name: getattr(cfg, name) for name in (*LOSS_SETTINGS, *own)}
    loss = experiment.make_loss(make_loss or cfg.loss, *networks, **settings)
    loss.exploring = explores

    # Evaluations use the task actor from the start of the run (zero-shot).
    player, exploration_policy = (
        Player(model, one, stored_latents=cfg.stored_latents).to(cfg.device)
        for one in (actor, explorer)
    )
    wired = around(
        experiment,
        env,
        loss,
        player,
        loss_ensemble=Adam(ensemble.parameters(), lr=cfg.ensemble_learning_rate, eps=1e-5),
        loss_explorer_actor=make_optimizer(experiment, explorer.parameters()),
    )
    if experiment.plan.exploration_steps:
        wired["exploration_policy"] = exploration_policy
    wired["hooks"] = [EndOfExploration(loss)] if explores else []
    return experiment.trainer(env, player, start_with_buffer=True, **wired)


def _explores(cfg: Config, plan: StepPlan) -> bool:
    """Return whether the explorer acts after its first gradient step.

    Raises:
        SettingError: if the trained explorer never acts, and the run starts from random weights.
    """
    trained = max(plan.learning_starts, plan.random_steps)
    if plan.is_exact:
        later = range(plan.first_training_iteration, plan.iterations + 1)
        trains = (iteration for iteration in later if plan.gradient_steps(iteration))
        trained = max(trained, plan.policy_steps_after(next(trains, 0)))
    if plan.exploration_steps > trained:
        return True
    checked_before = cfg.resume is not None or dataset_loading_disabled()
    if cfg.init_from is None and not checked_before:
        reason = f"The explorer would never act, because it is untrained until step {trained}"
        advice = (
            f"Use more than {trained}, set init_from=RUN to an exploration run, or use dreamerv3"
        )
        raise SettingError("steps.exploration_steps", plan.exploration_steps, reason, advice)
    return False


if __name__ == "__main__":
    main(Config, build)
