"""A plan in the words of sheeprl."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from kit.steps.dialects.base import step_by_step, trains
from kit.steps.plan import StepPlan


def settings_from(plan: StepPlan, algo: str | None) -> dict[str, Any]:
    """Return the settings of sheeprl that come nearest to ``plan``."""
    plan = step_by_step(plan)
    made: dict[str, Any] = {
        "algo": algo or _algorithm_of(plan),
        "total_steps": plan.total_policy_steps,
        "num_envs": plan.num_envs,
        "world_size": plan.world_size,
        "action_repeat": plan.action_repeat,
        "max_episode_steps": plan.max_episode_steps,
        "run_test": plan.evaluations_after(plan.iterations) > 0,
    }
    if plan.on_policy:
        return made | _on_policy(plan, made["algo"])
    return made | _off_policy(plan, made["algo"])


def _algorithm_of(plan: StepPlan) -> str:
    if plan.on_policy:
        return "ppo" if plan.minibatches_per_gradient_step is not None else "a2c"
    return "dreamer_v3" if plan.sequence_length else "sac"


def _on_policy(plan: StepPlan, algo: str) -> dict[str, Any]:
    epochs = {} if algo == "a2c" else {"update_epochs": plan.update_epochs}
    return epochs | {
        "rollout_steps": plan.steps_per_env,
        "per_rank_batch_size": plan.minibatch_size or plan.frames_per_batch,
    }


def _off_policy(plan: StepPlan, algo: str) -> dict[str, Any]:
    ratio, starts = plan.replay_ratio, plan.random_steps
    if ratio is None:
        each = max(plan.frames_per_batch, 1)
        ratio = Fraction(plan.gradient_steps_per_iteration or 0, each)
    if "finetuning" in algo:  # it plays no random actions
        starts = max(starts, plan.learning_starts)
    learns = trains(plan)
    return {
        "learning_starts": starts,
        "replay_ratio": float(ratio) if learns else 0.0,
        "per_rank_pretrain_steps": plan.pretrain_steps if learns else 0,
        "per_rank_sequence_length": plan.sequence_length,
        "per_rank_batch_size": plan.minibatch_size,
        "exploration_steps": plan.exploration_steps,
        "version": "0.5.7" if plan.counting.startswith("sheeprl-0.5.7") else "0.8.4",
    }
