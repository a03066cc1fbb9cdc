"""What sheeprl does when it resumes a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kit.dialects.sheeprl.rules import SheeprlRatio
from kit.steps.plan import StepPlan

if TYPE_CHECKING:
    from kit.dialects.sheeprl import Sheeprl


def resumed(new: Sheeprl, first: Sheeprl) -> StepPlan:
    """The plan of ``Sheeprl.resumed``."""
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
    """The settings that the resumed run goes by."""
    if new.version != "0.8.4":
        return first
    return replace(first, total_steps=new.total_steps, learning_starts=new.learning_starts)


def _updates(new: Sheeprl, first: Sheeprl, done: int, whole: StepPlan) -> dict[str, Any]:
    starts = whole.first_training_iteration
    wait = starts if not first.buffer_checkpoint else starts - done
    made: dict[str, Any] = {
        "learning_starts": wait * whole.policy_steps_per_iteration if wait > 1 else 0
    }
    if not first.buffer_checkpoint:
        return made
    asked = resumed_ratio(new, first)
    made["pretrain_steps"] = whole.pretrain_steps * (wait > 0)
    counts_exactly = whole.counting == "exact" and asked.prev in (None, asked.steps)
    if counts_exactly or new.version != "0.8.4":  # before, nothing is left to do
        return made
    prev = "" if asked.prev is None else f",{asked.prev!r}"
    return made | {"counting": f"sheeprl:{asked.steps}{prev}"}


def resumed_ratio(new: Sheeprl, first: Sheeprl) -> SheeprlRatio:
    """The ratio as it is when the resumed run trains first.

    It is the checkpoint's. Where it is not what the new ``learning_starts`` would have made of the
    steps played so far, it continues from these steps.
    """
    done, ran = first.to_plan().iterations, resumed_settings(new, first)
    whole = ran.to_plan()
    starts = whole.first_training_iteration
    if not first.buffer_checkpoint:
        return ran.ratio()
    saved, each = ratio_after(first, done), whole.frames_per_batch
    if new.version != "0.8.4":
        return saved
    played, prev = (done + 1 - starts) * each, saved.prev
    if prev is not None and saved.ratio and not -1e-6 <= played - prev < 1 / saved.ratio + 1e-6:
        prev = played
    return SheeprlRatio(saved.ratio, start=max(played, 0), prev=prev)


def ratio_after(settings: Sheeprl, iterations: int) -> SheeprlRatio:
    """The library's ratio as it is at the end of some iteration."""
    plan, asked = settings.to_plan(), settings.ratio()
    for _ in range(iterations - plan.first_training_iteration + 1):
        asked.advance(plan.frames_per_batch)
    return asked
