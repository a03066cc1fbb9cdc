"""The counts of Dreamer: from its settings to a plan, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.dialects.base import ratio_of, step_by_step, trains
from kit.dialects.dreamer.settings import DreamerPaperSettings, DreamerSettings
from kit.steps.errors import SettingError, real_number
from kit.steps.plan import StepPlan
from kit.steps.ratio import as_fraction
from kit.steps.validation import LARGEST_RATIO


# ---------------------------------------------------------------------- to a plan
def to_plan(dreamer: DreamerSettings) -> dict[str, Any]:
    """The plan's settings."""
    replayed = real_number("train_ratio", dreamer.train_ratio)
    rows = dreamer.batch_size * dreamer.batch_length
    ratio = replayed / rows if replayed >= 0 else 1.0
    if ratio > LARGEST_RATIO:
        most = LARGEST_RATIO * rows
        raise SettingError("train_ratio", dreamer.train_ratio, "is more than any run does", [most])
    stored = dreamer.batch_size * dreamer.stored_length
    if stored > dreamer.replay_size:
        why = "does not hold one batch of sequences"
        raise SettingError("replay_size", dreamer.replay_size, why, [stored])
    first = dreamer.first_transition
    iteration = -(-first // dreamer.envs)
    exact = dreamer.version == "documented" or ratio == 0
    return {
        "iterations": dreamer.transitions // dreamer.envs,
        "learning_starts": iteration * dreamer.envs if iteration > 1 else 0,
        "random_steps": 0,
        "replay_ratio": as_fraction("train_ratio", ratio),
        "counting": "exact" if exact else f"dreamer:{first}",
    }


def paper_plan(paper: DreamerPaperSettings) -> dict[str, Any]:
    """The settings of a plan of Algorithm 1.

    The updates that open the loop are those of the iteration that collected before.
    """
    episodes = -(-paper.steps // paper.episode_length)
    return {
        "iterations": max(episodes - paper.seed_episodes, 0) + 1,
        "min_episodes": 1,
        "episode_length": paper.policy_steps_per_episode,
        "prefill_steps": paper.seed_episodes * paper.policy_steps_per_episode,
        "prefill_is_iteration": True,
        "random_steps": 0,
    }


# ---------------------------------------------------------------------- from a plan
def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of DreamerV3 nearest to ``plan``."""
    del settings
    plan = step_by_step(plan)
    size, length = plan.minibatch_size or 16, plan.sequence_length or 1
    # What the first training waits for beyond a batch is the context of the sequences.
    _, _, first = plan.counting.partition(":")
    vector_steps = -(-plan.learning_starts // plan.num_envs)
    waits = int(first) if first.isdecimal() else vector_steps * plan.num_envs
    stored = (waits - size * length) // plan.num_envs + 1
    context = max(stored - length, 0)
    return {
        "steps": plan.total_policy_steps,
        "train_ratio": float(ratio_of(plan) * size * length) if trains(plan) else 0.0,
        "replay_context": context,
        "batch_size": size,
        "batch_length": length,
        "envs": plan.num_envs,
        "replay_size": max(5_000_000, size * (length + context)),
        "version": "e3f0224" if plan.counting.startswith("dreamer") else "documented",
    }


def paper_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of Algorithm 1 nearest to ``plan``."""
    del settings
    if plan.episode_length is None:
        why = "leaves open how long an episode is"
        raise SettingError("episode_length", None, why, "give it")
    return {
        "steps": plan.total_policy_steps * plan.action_repeat,
        "seed_episodes": max(plan.local_prefill_steps // plan.episode_length, 1),
        "collect_interval": plan.gradient_steps_per_iteration or 0,
        "batch_size": plan.minibatch_size or 50,
        "sequence_length": plan.sequence_length or 50,
        "episode_length": plan.episode_length * plan.action_repeat,
    }
