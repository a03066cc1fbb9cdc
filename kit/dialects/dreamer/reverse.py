"""From a plan to the settings of Dreamer."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from kit.dialects.base import step_by_step, trains
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of DreamerV3 that come nearest to ``plan``."""
    for name, wanted in (("on_policy", False), ("world_size", 1)):
        if getattr(plan, name) != wanted:
            why = "cannot be expressed in DreamerV3: one process trains from a replay"
            raise SettingError(name, getattr(plan, name), why, [wanted])
    del settings
    plan = step_by_step(plan)
    size, length = plan.minibatch_size or 16, plan.sequence_length or 1
    ratio = plan.replay_ratio
    if ratio is None:
        each = max(plan.frames_per_batch, 1)
        ratio = Fraction(plan.gradient_steps_per_iteration or 0, each)
    # What the first training waits for beyond a batch is the context of the sequences.
    _, _, told = plan.counting.partition(":")
    vector_steps = -(-plan.learning_starts // plan.num_envs)
    first = int(told) if told.isdecimal() else vector_steps * plan.num_envs
    stored = (first - size * length) // plan.num_envs + 1
    context = max(stored - length, 0)
    return {
        "steps": plan.total_policy_steps,
        "train_ratio": float(ratio * size * length) if trains(plan) else 0.0,
        "replay_context": context,
        "batch_size": size,
        "batch_length": length,
        "envs": plan.num_envs,
        "repeat": plan.action_repeat,
        "max_episode_steps": plan.max_episode_steps,
        "replay_size": max(5_000_000, size * (length + context)),
        "version": "e3f0224" if plan.counting.startswith("dreamer") else "documented",
    }


def paper_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of Algorithm 1 that come nearest to ``plan``."""
    del settings
    if not plan.collects_episodes or plan.episode_length is None:
        raise SettingError(
            "steps_per_env", plan.steps_per_env, "cannot be expressed: the loop collects episodes"
        )
    length = plan.episode_length * plan.action_repeat
    return {
        "steps": plan.total_policy_steps * plan.action_repeat,
        "seed_episodes": max(plan.local_prefill_steps // plan.episode_length, 1),
        "collect_interval": plan.gradient_steps_per_iteration or 0,
        "batch_size": plan.minibatch_size or 50,
        "sequence_length": plan.sequence_length or 50,
        "action_repeat": plan.action_repeat,
        "episode_length": length,
    }
