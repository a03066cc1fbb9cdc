"""From a plan to the settings of Stable-Baselines3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kit.dialects.base import ON_POLICY
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


def algorithms_for(plan: StepPlan) -> Iterable[str | None]:
    """Return algorithms that may make ``plan``: the rules of PPO refuse some rollouts of others."""
    return [None, "a2c", ON_POLICY] if plan.on_policy else [None]


def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of Stable-Baselines3 that come nearest to ``plan``."""
    if plan.world_size > 1:
        raise SettingError(
            "world_size", plan.world_size, "cannot be expressed: Stable-Baselines3 has one", [1]
        )
    made: dict[str, Any] = {
        "total_timesteps": plan.total_policy_steps,
        "n_envs": plan.num_envs,
        "action_repeat": plan.action_repeat,
        "max_episode_steps": plan.max_episode_steps,
        "n_eval_episodes": plan.evaluation_episodes,
    }
    every = plan.evaluation_every
    if plan.evaluation_every_iterations:
        every = plan.evaluation_every_iterations * plan.frames_per_batch
    if every:
        made["eval_freq"] = -(-every // plan.num_envs)
    if plan.on_policy:
        return made | _on_policy_from(plan, settings.get("algo"))
    off_policy = _off_policy_from(plan, settings.get("algo"))
    if settings.get("version") == "documented":  # training begins at learning_starts
        off_policy["learning_starts"] = _between(plan, after=1)
    return made | off_policy


def _on_policy_from(plan: StepPlan, algo: str | None) -> dict[str, Any]:
    if plan.collects_episodes:
        raise SettingError(
            "min_episodes", plan.min_episodes, "cannot be expressed on-policy", [None]
        )
    whole = plan.minibatch_size in (None, plan.frames_per_batch)
    name = algo or ("a2c" if whole and plan.update_epochs == 1 else "ppo")
    return {
        "algo": name,
        "n_steps": plan.steps_per_env,
        "n_epochs": plan.update_epochs,
        "batch_size": plan.minibatch_size or plan.frames_per_batch,
    }


def _off_policy_from(plan: StepPlan, algo: str | None) -> dict[str, Any]:
    rollout = plan.frames_per_batch
    made: dict[str, Any] = {"algo": algo or "sac", "batch_size": plan.minibatch_size or 256}
    if plan.collects_episodes:
        length = plan.episode_length
        assert length is not None
        made |= {"train_freq": (rollout // length, "episode"), "episode_length": length}
    else:
        made["train_freq"] = plan.steps_per_env or 1
    steps = plan.gradient_steps_per_iteration
    if plan.replay_ratio is not None:
        each = plan.replay_ratio * rollout
        steps = -1 if plan.replay_ratio == 1 else round(each)
    made["gradient_steps"] = steps or 0
    made["learning_starts"] = _between(plan)
    return made


def _between(plan: StepPlan, after: int = 0) -> int:
    """``learning_starts`` that makes the random steps, if the plan's rollout is to train first.

    Args:
        plan: what is to be said.
        after: 0 if training begins strictly after ``learning_starts``, 1 if at them.
    """
    rollout, starts = plan.frames_per_batch, plan.first_training_iteration
    low = (starts - 1) * rollout + (after if starts > 1 else 0)
    return min(max(plan.random_steps, low), starts * rollout - 1 + after)
