"""The counts of nip: from its settings to a plan, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.dialects.nip.settings import NipSettings
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


# ---------------------------------------------------------------------- to a plan
def to_plan(nip: NipSettings) -> dict[str, Any]:
    """The plan's settings."""
    steps = nip.steps_of_each()
    frames = nip.frames(nip.dataset_size)
    _check(nip, steps, frames)
    tests = nip.test_rollouts()
    return {
        "iterations": min(nip.num_iterations, 1) if nip.test_run else nip.num_iterations,
        "num_envs": frames // steps,
        "steps_per_env": steps,
        "update_epochs": 1 if nip.test_run else nip.num_epochs,
        "minibatches_per_epoch": 1 if nip.test_run else None,
        "last_minibatch": "smaller" if nip.version == "documented" else "carry",
        "final_evaluation": tests > 0,
        "evaluation_episodes": max(tests, 1),
    }


def _check(nip: NipSettings, steps: int, frames: int) -> None:
    size, rounds = nip.minibatch_size, nip.max_message_rounds
    if size > frames:
        why = (
            f"is larger than the {frames} frames of an iteration: no gradient step is made, and "
            "nip then divides by zero"
        )
        raise SettingError("minibatch_size", size, why, [frames])
    if rounds is not None and steps < max(nip.min_message_rounds, 1):
        why = (
            f"is less than the {nip.min_message_rounds} rounds of an episode, and nip fails in an "
            "iteration without a finished one"
        )
        raise SettingError("steps_per_env_per_iteration", steps, why, [rounds])
    if nip.algo == "reinforce" and nip.version != "documented":
        why = "fails in nip: its reward-to-go finds no end of an episode"
        raise SettingError("algo", "reinforce", why, ["vanilla_ppo", "spg"])


# ---------------------------------------------------------------------- from a plan
def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings nearest to ``plan``."""
    del settings
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
    }
