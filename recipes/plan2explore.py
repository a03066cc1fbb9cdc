"""Plan2Explore (Sekar et al. 2020) on DreamerV3: explore what is unknown, then solve the task.

python -m recipes.plan2explore steps.exploration_steps=20_000   # all of the run: zero-shot
python -m recipes.plan2explore --help
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import recipes.dreamerv3
from kit.config import Limits, Positive
from kit.dialects.base import Dialect
from kit.experiment import EnvConfig, Experiment, main
from kit.hooks import EndOfExploration
from kit.modules.world import Ensemble, LatentActor, Player, make_critic, make_world_model
from kit.steps import SettingError, StepPlan
from kit.steps.settings import ExplorationSteps
from kit.trainer import Trainer
from recipes.dreamerv3 import LOSS_SETTINGS, around


@dataclass
class Config(recipes.dreamerv3.Config):
    """Settings of Plan2Explore: those of DreamerV3, and the ensemble's."""

    env: EnvConfig = field(default_factory=lambda: EnvConfig(id="MountainCar-v0", num_envs=1))
    steps: ExplorationSteps | Dialect | StepPlan = field(default_factory=ExplorationSteps)
    loss: str = "kit.losses:Plan2ExploreLoss"
    """Loss, as module:Class."""
    learning_rate: Positive = 1e-3
    """Learning rate; explorers of a maze were trained with this one (docs/worlds.md)."""
    ensemble: Annotated[int, Limits(2, 1_000)] = 8
    """One-step models whose disagreement rewards the explorer."""
    intrinsic_reward_multiplier: Positive = 1.0
    """Factor of the disagreement: returns whose spread is below 1 are not scaled up to it."""


def build(cfg: Config, make_loss: Any = None, **parts: Any) -> Trainer:
    """Wire Plan2Explore; ``make_loss`` replaces ``cfg.loss``, ``parts`` those of the trainer."""
    experiment = Experiment(cfg, algorithm="p2e_dv3_exploration", parts=parts)
    plan = experiment.plan
    before = max(plan.learning_starts, plan.random_steps or 0)
    if plan.exploration_steps <= before:
        why = f"leaves the explorer nothing to do: it acts trained after {before} policy steps"
        works = f"give more than {before}, or use dreamerv3"
        raise SettingError("steps.exploration_steps", plan.exploration_steps, why, works)
    env = experiment.make_env()

    model = make_world_model(env, cfg.size, cfg.latents)
    features, size = model.features, model.size
    actor, explorer = (LatentActor(model.code, features, size) for _ in range(2))
    ensemble = Ensemble(cfg.ensemble, features, model.code.features, size)
    networks = model, actor, make_critic(model), explorer, make_critic(model), ensemble
    names = (*LOSS_SETTINGS, "intrinsic_reward_multiplier")
    settings = {name: getattr(cfg, name) for name in names}
    loss = experiment.make_loss(make_loss or cfg.loss, *networks, **settings)

    # The actor is evaluated from the beginning: zero-shot.
    player, exploration_policy = (
        Player(model, one, stored_latents=cfg.stored_latents).to(cfg.device)
        for one in (actor, explorer)
    )
    wired = around(experiment, env, loss, player)
    wired["exploration_policy"] = exploration_policy
    wired["hooks"] = [EndOfExploration(loss)]
    return experiment.trainer(env, player, **wired)


if __name__ == "__main__":
    main(Config, build)
