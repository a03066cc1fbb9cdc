"""From a plan to the settings of nip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of nip that come nearest to ``plan``."""
    del settings
    for name, wanted in (("world_size", 1), ("collects_episodes", False)):
        if getattr(plan, name) != wanted:
            raise SettingError(name, getattr(plan, name), "cannot be expressed in nip", [wanted])
    if not plan.on_policy:
        raise SettingError(
            "update_epochs", None, "cannot be expressed in nip: all its trainers are on-policy", [1]
        )
    evaluates = plan.evaluations_after(plan.iterations) > 0
    batches, left = divmod(plan.evaluation_episodes, plan.num_envs)
    single = plan.minibatches_per_epoch == 1 and (plan.update_epochs or 0) <= 1
    frames: dict[str, Any] = {"frames_per_batch": plan.frames_per_batch}
    if evaluates and (left or (single and batches > 1)):
        # One batch of all points of another dataset has as many episodes as are wanted.
        frames = {"frames_per_batch": None, "dataset_size": plan.num_envs}
        frames["test_dataset_size"] = plan.evaluation_episodes
        batches = 1
    return {
        **frames,
        "steps_per_env_per_iteration": plan.steps_per_env,
        "num_iterations": plan.iterations,
        "num_epochs": plan.update_epochs or 0,
        "minibatch_size": plan.minibatch_size or plan.frames_per_batch,
        "num_test_iterations": batches if evaluates else 0,
        "test_run": single,
        "action_repeat": plan.action_repeat,
        "max_episode_steps": plan.max_episode_steps,
    }
