"""Plans for resumed sheeprl runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kit.dialects.sheeprl.rules import SheeprlRatio
from kit.steps.plan import StepPlan

if TYPE_CHECKING:
    from kit.dialects.sheeprl import Sheeprl


def resumed(new: Sheeprl, first: Sheeprl) -> StepPlan:
    """Return the plan for a resumed run, as described in ``Sheeprl.resumed``."""
    before, whole = first.to_plan(), resumed_settings(new, first).to_plan()
    changes: dict[str, Any] = {
        "iterations": max(whole.iterations - before.iterations, 0),
        "random_steps": max(whole.random_steps - before.total_policy_steps, 0),
        "asked": {},
    }
    if not whole.on_policy:
        changes |= _updates(new, first, before.iterations, whole)
    return whole.replace(**changes)


def resumed_settings(new: Sheeprl, first: Sheeprl) -> Sheeprl:
    """Return the settings that take effect in the resumed run."""
    if new.version != "0.8.4":
        return first
    return replace(first, total_steps=new.total_steps, learning_starts=new.learning_starts)


def _updates(new: Sheeprl, first: Sheeprl, done: int, whole: StepPlan) -> dict[str, Any]:
    starts = whole.first_training_iteration
    wait = starts if not first.buffer_checkpoint else starts - done
    changes: dict[str, Any] = {
        "learning_starts": wait * whole.policy_steps_per_iteration if wait > 1 else 0
    }
    if not first.buffer_checkpoint:
        return changes
    ratio = resumed_ratio(new, first)
    changes["pretrain_steps"] = whole.pretrain_steps * (wait > 0)
    counts_exactly = whole.counting == "exact" and ratio.prev in (None, ratio.steps)
    if counts_exactly or new.version != "0.8.4":  # Older versions cannot extend a finished run.
        return changes
    prev = "" if ratio.prev is None else f",{ratio.prev!r}"
    return changes | {"counting": f"sheeprl:{ratio.steps}{prev}"}


def resumed_ratio(new: Sheeprl, first: Sheeprl) -> SheeprlRatio:
    """Return the replay ratio in its state when the resumed run starts to train.

    The state is loaded from the checkpoint. If the state does not match the new
    ``learning_starts``, the ratio restarts from the current step count.
    """
    done, settings = first.to_plan().iterations, resumed_settings(new, first)
    whole = settings.to_plan()
    starts = whole.first_training_iteration
    if not first.buffer_checkpoint:
        return settings.ratio()
    saved, each = ratio_after(first, done), whole.frames_per_batch
    if new.version != "0.8.4":
        return saved
    steps, prev = (done + 1 - starts) * each, saved.prev
    if prev is not None and saved.ratio and not -1e-6 <= steps - prev < 1 / saved.ratio + 1e-6:
        prev = steps
    return SheeprlRatio(saved.ratio, start=max(steps, 0), prev=prev)


def ratio_after(settings: Sheeprl, iterations: int) -> SheeprlRatio:
    """Return the replay ratio in its state after ``iterations`` iterations."""
    plan, ratio = settings.to_plan(), settings.ratio()
    for _ in range(iterations - plan.first_training_iteration + 1):
        ratio.advance(plan.frames_per_batch)
    return ratio
