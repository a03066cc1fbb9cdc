"""From a plan to the settings of TorchRL's trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.dialects.base import OFF_POLICY, ON_POLICY, trains
from kit.dialects.torchrl.rules import RULE, arguments
from kit.dialects.torchrl.settings import RANDOM, WITHOUT
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of TorchRL that come nearest to ``plan``."""
    if plan.world_size > 1 or plan.collects_episodes:
        name = "min_episodes" if plan.collects_episodes else "world_size"
        raise SettingError(name, getattr(plan, name), "cannot be said of a TorchRL trainer")
    if not plan.frames_per_batch:
        why = "cannot be said of a TorchRL trainer: an iteration collects"
        raise SettingError("steps_per_env", plan.steps_per_env, why, [1])
    made: dict[str, Any] = {
        "frames_per_batch": plan.frames_per_batch,
        "total_frames": plan.total_policy_steps * plan.action_repeat,
        "frame_skip": plan.action_repeat,
        "init_random_frames": _init_random_frames(plan, settings.get("version")) or None,
        "num_envs": plan.num_envs,
        "max_episode_steps": plan.max_episode_steps,
        "batch_size": plan.minibatch_size or plan.frames_per_batch,
    }
    if not plan.on_policy:
        ratio = plan.replay_ratio
        steps = plan.gradient_steps_per_iteration or 0
        each = steps if ratio is None else round(ratio * plan.frames_per_batch)
        each = each if trains(plan) else 0
        algo = settings.get("algo", OFF_POLICY)
        if each and plan.counting.startswith(RULE):
            buffer_size, epochs, most = arguments(plan)
            return {
                **made,
                "algo": algo,
                "sampler": WITHOUT,
                "num_epochs": epochs,
                "optim_steps_per_batch": most,
                "iterate": True,
                "drop_last": True,
                "buffer_size": buffer_size,
            }
        return {
            **made,
            "algo": algo,
            "sampler": RANDOM,
            "optim_steps_per_batch": each,
        }
    limit = plan.minibatches_per_epoch
    rows = plan.train_on_newest or plan.frames_per_batch
    straddles = plan.last_minibatch == "carry" or plan.counting == "torchrl:sample"
    if straddles and limit is None:
        limit = rows // made["batch_size"]
    elif limit is None and settings.get("version") == "documented":
        limit = rows // made["batch_size"] + 2  # None would mean the number of environments
    return {
        **made,
        "algo": settings.get("algo", ON_POLICY),
        "sampler": WITHOUT,
        "num_epochs": plan.update_epochs or 0,
        "optim_steps_per_batch": limit,
        "iterate": not straddles,
        "drop_last": plan.last_minibatch == "drop",
        "buffer_size": rows,
    }


def _init_random_frames(plan: StepPlan, version: str | None) -> int:
    """Frames that make the plan's random steps, and begin to train where it does."""
    batch, first = plan.frames_per_batch, plan.first_training_iteration
    skipped = batch * plan.action_repeat
    if version == "documented":
        return first * skipped if plan.random_steps else 0
    for frames in (plan.random_steps, (first - 1) * skipped + 1, first * skipped):
        random = min(-(-frames // batch) * batch, plan.iterations * batch)
        starts = max(-(-frames // skipped), 1)
        if random == min(plan.random_steps, plan.iterations * batch) and starts == first:
            return frames
    return plan.random_steps
