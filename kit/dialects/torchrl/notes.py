"""Caveats of the settings of TorchRL's trainer."""

from __future__ import annotations

from collections.abc import Iterator

from kit.dialects.torchrl.settings import TorchRLSettings
from kit.steps.plan import StepPlan


def notes(settings: TorchRLSettings, plan: StepPlan) -> Iterator[str]:
    """One sentence for each caveat of resolved settings."""
    if settings.collected != settings.frames_per_batch:
        yield (
            f"A batch is {settings.collected} frames, not {settings.frames_per_batch}: equally "
            f"many of each of {settings.num_envs} environments."
        )
    frames = plan.total_policy_steps * settings.frame_skip
    if frames != settings.total_frames:
        over = frames - settings.total_frames
        yield f"The run makes {frames:,} frames, {over:+,}: whole batches."
    if settings.frame_skip > 1:
        yield (
            f"frame_skip={settings.frame_skip} is only a factor of the trainer's count: "
            f"total_frames={settings.total_frames:,} are env steps, frames_per_batch are policy "
            "steps, and an episode that ends inside a skip is counted in full."
        )
    yield from _random(settings, plan)
    if plan.on_policy and plan.counting == "exact" and plan.last_minibatch == "carry":
        yield "Without iterate, minibatches straddle epochs and batches."
    if plan.counting == "torchrl":
        steps = [plan.gradient_steps(k) for k in range(1, min(plan.iterations, 4) + 1)]
        yield (
            f"An epoch of {settings.optim_steps_per_batch} minibatches that ends just where the "
            "sampler does leaves the next epoch nothing: gradient steps per batch are "
            f"{', '.join(map(str, steps))}, ..."
        )
    if settings.sampler == "without_replacement" and not plan.on_policy:
        yield (
            "The buffer holds more than a batch: a new permutation is drawn whenever it has grown, "
            "also in the middle of one."
        )
    if plan.train_on_newest is not None:
        yield (
            f"The buffer holds {plan.train_on_newest} frames, less than a batch. TorchRL keeps the "
            "end of a flattened batch, its last environments; here the newest of each are kept."
        )
    if settings.iterate and settings.sampler == "without_replacement":
        yield "The trainer counts one optimisation step too many for each ended pass."


def _random(settings: TorchRLSettings, plan: StepPlan) -> Iterator[str]:
    asked = settings.init_random_frames
    if asked in (None, -1, 0):
        return
    if plan.random_steps != asked:
        yield f"init_random_frames={asked} is rounded up to {plan.random_steps} frames."
    trains = plan.first_training_iteration * plan.frames_per_batch
    if settings.frame_skip > 1 and trains < plan.random_steps:
        yield (
            f"The collector acts randomly for {plan.random_steps:,} policy steps, but the trainer, "
            f"which counts env steps, begins to train after {trains:,}."
        )
