"""From a plan to the settings of tianshou."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from kit.dialects.base import OFF_POLICY, OFFLINE, ON_POLICY
from kit.dialects.tianshou.counting import Sampling
from kit.dialects.tianshou.settings import Tianshou1Settings, Tianshou2Settings
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of 1.x that come nearest to ``plan``."""
    made = sampling_from(plan, settings.get("algo"))
    made.collect = made.collect or 1
    return _said(made, Tianshou1Settings.NEUTRAL)


def settings_2_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of 2.x that come nearest to ``plan``."""
    made = sampling_from(plan, settings.get("algo"))
    made.repeat = made.repeat or 1
    return _said(made, Tianshou2Settings.NEUTRAL)


def _said(made: Sampling, names: Mapping[str, str]) -> dict[str, Any]:
    return {own: getattr(made, meant) for own, meant in names.items()} | {"algo": made.family}


def sampling_from(plan: StepPlan, algo: str | None) -> Sampling:
    """The settings nearest to ``plan``."""
    if plan.world_size > 1:
        raise SettingError(
            "world_size",
            plan.world_size,
            "cannot be expressed in tianshou: one process trains",
            [1],
        )
    rows = plan.frames_per_batch
    family = ON_POLICY if plan.on_policy else OFF_POLICY if rows else OFFLINE
    every = plan.evaluation_every_iterations
    if every is None and plan.evaluation_every and rows:
        every = max(plan.evaluation_every // rows, 1)
    every = min(every or plan.iterations, plan.iterations) or 1
    epochs = -(-plan.iterations // every)
    ratio = plan.replay_ratio
    if ratio is None:
        ratio = Fraction(plan.gradient_steps_per_iteration or 0, rows or 1)
    per_step = float(ratio)
    tests = plan.evaluations_after(plan.iterations) > 0
    capacity = plan.train_on_newest or max(rows + plan.local_prefill_steps, 1)
    return Sampling(
        family=algo or family,
        version="",
        epochs=epochs,
        epoch_steps=every * (rows or plan.gradient_steps_per_iteration or 1),
        envs=plan.num_envs,
        collect=None if plan.collects_episodes else rows,
        collect_episodes=rows // (plan.episode_length or 1) if plan.collects_episodes else None,
        episode_length=plan.episode_length,
        batch_size=plan.minibatch_size,
        repeat=plan.update_epochs if plan.on_policy else 1,
        per_sample=1.0 if plan.on_policy else per_step,
        start=plan.local_prefill_steps,
        start_random=plan.prefill_random and plan.prefill_steps > 0,
        test_episodes=plan.evaluation_episodes if tests else 1,
        buffer=capacity if plan.on_policy else 1_000_000,
    )
