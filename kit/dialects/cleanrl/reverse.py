"""From a plan to the settings of CleanRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of CleanRL that come nearest to ``plan``."""
    if plan.world_size > 1 or plan.collects_episodes:
        name = "min_episodes" if plan.collects_episodes else "world_size"
        raise SettingError(name, getattr(plan, name), "cannot be expressed in CleanRL")
    made: dict[str, Any] = {
        "num_envs": plan.num_envs,
        "action_repeat": plan.action_repeat,
        "max_episode_steps": plan.max_episode_steps,
    }
    if plan.on_policy:
        size = plan.minibatch_size or plan.frames_per_batch
        return {
            **made,
            "algo": settings.get("algo", "ppo"),
            "total_timesteps": plan.total_policy_steps,
            "num_steps": plan.steps_per_env,
            "num_minibatches": max(plan.frames_per_batch // size, 1),
            "update_epochs": plan.update_epochs,
        }
    starts = plan.first_training_iteration
    made |= {
        "total_timesteps": plan.total_policy_steps // plan.num_envs,
        "batch_size": plan.minibatch_size or 256,
    }
    ratio = plan.replay_ratio
    if ratio is not None and ratio.numerator == 1 and plan.num_envs == 1:
        first = starts + ratio.denominator - 2
        algo = settings.get("algo", "sac" if ratio == 1 and plan.random_steps else "dqn")
        if algo.startswith("dqn"):
            every = ratio.denominator
            return {
                **made,
                "algo": algo,
                "train_frequency": every,
                "learning_starts": max(first - 1, 0),
            }
    algo = settings.get("algo", "sac")
    return {
        **made,
        "algo": algo,
        "learning_starts": max(starts - 2, 0),
    }
