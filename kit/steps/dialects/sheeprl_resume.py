"""What sheeprl does when it resumes a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kit.steps.dialects.sheeprl import Sheeprl
    from kit.steps.dialects.sheeprl_ratio import SheeprlRatio
    from kit.steps.plan import StepPlan


def resumed(new: Sheeprl, first: Sheeprl) -> StepPlan:
    """Return the run that resumes ``first`` from its last checkpoint with the settings ``new``.

    0.8.4 goes by the new settings. With the replay buffer in the checkpoint it goes on with the
    ratio, and without it fills a new buffer with its policy and then trains as a new run does.
    Before 0.8.4 the old settings win, so that a run that has ended stays ended.
    """
    before = first.to_plan()
    whole = (new if new.version == "0.8.4" else first).to_plan()
    left = max(whole.iterations - before.iterations, 0)
    random = max(whole.random_steps - before.total_policy_steps, 0)
    changes: dict[str, Any] = {"iterations": left, "random_steps": random, "asked": {}}
    if not whole.on_policy:
        changes |= _updates(first, before.iterations, whole)
    return whole.replace(**changes)


def _updates(first: Sheeprl, done: int, whole: StepPlan) -> dict[str, Any]:
    starts = whole.first_training_iteration
    if not first.buffer_checkpoint or done < starts:
        wait = starts if not first.buffer_checkpoint else starts - done
        return {"learning_starts": wait * whole.policy_steps_per_iteration if wait > 1 else 0}
    ratio = ratio_after(first, done)
    goes_on = {"learning_starts": 0, "pretrain_steps": 0}
    if whole.counting == "exact" or ratio.prev is None:
        return goes_on
    return goes_on | {"counting": f"sheeprl:{ratio.steps},{ratio.prev!r}"}


def ratio_after(settings: Sheeprl, iterations: int) -> SheeprlRatio:
    """Return the library's ratio as it is at the end of some iteration."""
    plan, ratio = settings.to_plan(), settings.ratio()
    for _ in range(iterations - plan.first_training_iteration + 1):
        ratio.advance(plan.frames_per_batch)
    return ratio
