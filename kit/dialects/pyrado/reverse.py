"""From a plan to the settings of pyrado."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of pyrado that come nearest to ``plan``."""
    if not plan.collects_episodes:
        raise SettingError(
            "steps_per_env",
            plan.steps_per_env,
            "cannot be expressed in pyrado: it collects rollouts",
        )
    every = plan.evaluation_every_iterations
    made: dict[str, Any] = {
        "max_iter": plan.iterations,
        "min_steps": plan.min_steps,
        "min_rollouts": plan.min_episodes,
        "batch_size": plan.minibatch_size,
        "env_max_steps": plan.episode_length,
        "episode_length": plan.episode_length,
        "action_repeat": plan.action_repeat,
        "max_episode_steps": plan.max_episode_steps,
    }
    if plan.on_policy:
        accumulates = plan.minibatches_per_gradient_step is None
        algo = "svpg" if plan.world_size > 1 or accumulates else "ppo"
        made |= {"num_epoch": plan.update_epochs, "algo": settings.get("algo", algo)}
        return made | {"num_particles": plan.world_size}
    return {
        **made,
        "algo": settings.get("algo", "sac"),
        "memory_size": max(plan.prefill_steps, 10**6),
        "num_init_memory_steps": plan.prefill_steps,
        "num_updates_per_step": plan.gradient_steps_per_iteration or 0,
        "eval_intvl": every if every is not None else max(plan.iterations, 1),
    }
