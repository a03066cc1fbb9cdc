"""The counts of TorchRL's trainer: from its settings to a plan, and back."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from kit.dialects.base import OFF_POLICY, ON_POLICY, ratio_of, trains
from kit.dialects.torchrl.rules import RULE, arguments
from kit.dialects.torchrl.settings import RANDOM, WITHOUT, TorchRLSettings
from kit.steps.errors import SettingError, one_of, whole_number
from kit.steps.plan import StepPlan


# ---------------------------------------------------------------------- to a plan
def to_plan(trainer: TorchRLSettings) -> dict[str, Any]:
    """The plan's settings."""
    one_of("sampler", trainer.sampler, (RANDOM, WITHOUT))
    batch = trainer.collected
    iterations = -(-trainer.total_frames // (batch * trainer.frame_skip))
    if trainer.collector_total_frames not in (None, -1):
        own = whole_number("collector_total_frames", trainer.collector_total_frames)
        iterations = min(iterations, -(-own // batch))
    random, first = _random_batches(trainer)
    return {
        "iterations": iterations,
        "steps_per_env": batch // trainer.num_envs,
        "random_steps": min(random, iterations) * batch,
        "learning_starts": first * batch if first > 1 else 0,
        **_updates(trainer, iterations, first),
    }


def _random_batches(trainer: TorchRLSettings) -> tuple[int, int]:
    """Batches with random actions, and the first batch that is trained on."""
    if trainer.init_random_frames in (None, -1):
        return 0, 1
    asked = whole_number("init_random_frames", trainer.init_random_frames)
    first = max(-(-asked // (trainer.collected * trainer.frame_skip)), 1)
    if trainer.version == "documented":
        return (first if asked else 0), first
    return -(-asked // trainer.collected), first


def _updates(trainer: TorchRLSettings, iterations: int, first: int) -> dict[str, Any]:
    limit = trainer.optim_steps_per_batch
    if limit is None and trainer.version == "documented":
        limit = trainer.num_envs
    if limit is None and (trainer.sampler == RANDOM or not trainer.iterate):
        when = "with a random sampler" if trainer.sampler == RANDOM else "without iterate"
        raise SettingError("optim_steps_per_batch", None, f"never ends {when}", [1])
    if trainer.sampler == RANDOM:
        steps = (limit or 0) * trainer.num_epochs
        return {"gradient_steps_per_iteration": steps, "minibatch_size": trainer.batch_size}
    if trainer.buffer_size > trainer.collected:
        return _growing(trainer, limit, iterations, first)
    return _without_replacement(trainer, limit)


def _without_replacement(trainer: TorchRLSettings, limit: int | None) -> dict[str, Any]:
    rows = min(trainer.collected, trainer.buffer_size)
    size = min(trainer.batch_size, rows)
    if trainer.drop_last and trainer.batch_size > rows:
        why = f"is more than the {rows} frames of a buffer"
        raise SettingError("batch_size", trainer.batch_size, why, [rows])
    made: dict[str, Any] = {
        "update_epochs": trainer.num_epochs,
        "minibatch_size": size,
        "minibatches_per_epoch": limit or None,
        "last_minibatch": "drop" if trainer.drop_last else "smaller",
        "train_on_newest": rows if rows < trainer.collected else None,
    }
    if limit == 0:
        return made | {"update_epochs": 0}
    available = rows // size if trainer.drop_last else -(-rows // size)
    if trainer.iterate and (limit is None or limit > available):
        return made | {"minibatches_per_epoch": None}
    if trainer.iterate:
        return made | {"counting": "torchrl"}
    if trainer.drop_last:
        return made | {"counting": "torchrl:sample"}
    return made | {"last_minibatch": "carry"}


def _growing(
    trainer: TorchRLSettings, limit: int | None, iterations: int, first: int
) -> dict[str, Any]:
    """Samples a growing buffer without replacement, from training iteration ``first`` on."""
    size, most = trainer.batch_size, trainer.buffer_size // trainer.batch_size
    iterated = {first, first + 1, iterations} if iterations > first else {first}
    rows = [min(k * trainer.collected, trainer.buffer_size) for k in sorted(iterated)]
    if trainer.drop_last and size > min(rows):
        why = f"is more than the {min(rows)} frames of a buffer"
        raise SettingError("batch_size", size, why, [min(rows)])
    if not trainer.drop_last and any(number % size for number in rows):
        held = ", ".join(map(str, rows))
        why = f"does not divide what a growing buffer holds ({held}, ...): "
        why += "minibatches would be of several sizes, sampled from a buffer"
        raise SettingError("batch_size", size, why, [gcd(*rows)], "or drop_last=True")
    epochs = trainer.num_epochs
    limit = most + 1 if limit is None else min(limit, most + 1)
    made: dict[str, Any] = {"minibatch_size": size, "gradient_steps_per_iteration": epochs * limit}
    if trainer.iterate and epochs and limit:
        made["gradient_steps_per_iteration"] = epochs * min(limit, most)
        made["counting"] = f"{RULE}:{trainer.buffer_size},{epochs},{limit}"
    return made


# ---------------------------------------------------------------------- from a plan
def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings nearest to ``plan``."""
    version = settings.get("version")
    made = {
        "algo": settings.get("algo", ON_POLICY if plan.on_policy else OFF_POLICY),
        "frames_per_batch": plan.frames_per_batch,
        "total_frames": plan.total_policy_steps * plan.action_repeat,
        "init_random_frames": _init_random_frames(plan, version) or None,
        "batch_size": plan.minibatch_size or plan.frames_per_batch,
    }
    if not plan.on_policy and trains(plan) and plan.counting.startswith(RULE):
        size, epochs, most = arguments(plan)
        return made | _epochs(epochs, most, size, iterate=True, drop_last=True)
    if not plan.on_policy:
        each = round(ratio_of(plan) * plan.frames_per_batch) if trains(plan) else 0
        return made | {"sampler": RANDOM, "optim_steps_per_batch": each}
    limit = plan.minibatches_per_epoch
    rows = plan.train_on_newest or plan.frames_per_batch
    straddles = plan.last_minibatch == "carry" or plan.counting == "torchrl:sample"
    if limit is None and straddles:
        limit = rows // made["batch_size"]
    elif limit is None and version == "documented":
        limit = rows // made["batch_size"] + 2  # None would mean the number of environments
    drop = plan.last_minibatch == "drop"
    epochs = plan.update_epochs or 0
    return made | _epochs(epochs, limit, rows, iterate=not straddles, drop_last=drop)


def _epochs(epochs: int, limit: int | None, buffer_size: int, **ends: bool) -> dict[str, Any]:
    return {
        "sampler": WITHOUT,
        "num_epochs": epochs,
        "optim_steps_per_batch": limit,
        "buffer_size": buffer_size,
        **ends,
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
