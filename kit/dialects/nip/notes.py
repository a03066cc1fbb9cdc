"""Caveats of nip's settings."""

from __future__ import annotations

from collections.abc import Iterator

from kit.dialects.nip.settings import NipSettings
from kit.steps.plan import StepPlan


def notes(settings: NipSettings, plan: StepPlan) -> Iterator[str]:
    """One sentence for each caveat of resolved settings."""
    frames, size = plan.frames_per_batch, settings.minibatch_size
    yield f"{plan.num_envs} environments follow from {frames} frames of {plan.steps_per_env} each."
    if settings.frames_per_batch is not None and settings.rollouts_per_iteration is not None:
        yield "rollouts_per_iteration is ignored where frames_per_batch is given."
    if frames % size and plan.last_minibatch == "carry":
        yield (
            f"An epoch is {frames // size} minibatches, not a pass: the smaller one of "
            f"{frames % size} opens the next epoch, and later epochs straddle two permutations."
        )
    rounds = settings.max_message_rounds
    if rounds is not None and settings.normalize_observations:
        batched, total = settings.normalization_frames(plan.num_envs, rounds)
        yield (
            f"num_normalization_steps={settings.num_normalization_steps} is a minimum for each of "
            f"{settings.num_normalization_keys} keys in each of two environments: {total:,} frames "
            f"of {batched:,} steps in each, if every episode lasts {rounds} rounds."
        )
    if settings.anneal_lr:
        yield "anneal_lr ends at lr / num_iterations in the last iteration, not at 0."
    if settings.num_test_iterations:
        yield (
            f"The test comes once, after training, and still samples its actions: "
            f"{settings.num_test_iterations} batches of {frames} frames, not whole episodes."
        )
