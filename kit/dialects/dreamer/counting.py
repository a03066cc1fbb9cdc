"""How Dreamer turns its settings into counts."""

from __future__ import annotations

from kit.dialects.dreamer.settings import DreamerPaperSettings, DreamerSettings
from kit.steps.errors import SettingError, real_number
from kit.steps.plan import StepPlan
from kit.steps.ratio import as_fraction
from kit.steps.validation import LARGEST_RATIO


def to_plan(dreamer: DreamerSettings) -> StepPlan:
    """The plan of resolved settings."""
    replayed = real_number("train_ratio", dreamer.train_ratio)
    ratio = replayed / (dreamer.batch_size * dreamer.batch_length)
    if ratio > LARGEST_RATIO:
        most = LARGEST_RATIO * dreamer.batch_size * dreamer.batch_length
        raise SettingError("train_ratio", dreamer.train_ratio, "is more than any run does", [most])
    if ratio < 0:
        ratio = 1.0
    if dreamer.batch_size * dreamer.stored_length > dreamer.replay_size:
        raise SettingError(
            "replay_size",
            dreamer.replay_size,
            "does not hold one batch of sequences",
            [dreamer.batch_size * dreamer.stored_length],
        )
    first = dreamer.first_transition
    trains = -(-first // dreamer.envs)
    exact = dreamer.version == "documented" or ratio == 0
    plan = StepPlan(
        iterations=dreamer.transitions // dreamer.envs,
        num_envs=dreamer.envs,
        action_repeat=dreamer.repeat,
        max_episode_steps=dreamer.max_episode_steps,
        learning_starts=trains * dreamer.envs if trains > 1 else 0,
        random_steps=0,
        replay_ratio=as_fraction("train_ratio", ratio),
        counting="exact" if exact else f"dreamer:{first}",
        minibatch_size=dreamer.batch_size,
        sequence_length=dreamer.batch_length,
        final_evaluation=False,
    )
    if plan.total_policy_steps != dreamer.steps:
        plan.asked["total_policy_steps"] = dreamer.steps
    return plan


def paper_plan(paper: DreamerPaperSettings) -> StepPlan:
    """The run of Algorithm 1.

    The updates that open the loop are those of the iteration that collected before.
    """
    episodes = -(-paper.steps // paper.episode_length)
    return StepPlan(
        iterations=max(episodes - paper.seed_episodes, 0) + 1,
        min_episodes=1,
        episode_length=paper.policy_steps_per_episode,
        action_repeat=paper.action_repeat,
        prefill_steps=paper.seed_episodes * paper.policy_steps_per_episode,
        prefill_is_iteration=True,
        random_steps=0,
        gradient_steps_per_iteration=paper.collect_interval,
        minibatch_size=paper.batch_size,
        sequence_length=paper.sequence_length,
        final_evaluation=False,
    )
