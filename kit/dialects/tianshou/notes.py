"""Caveats of tianshou's settings."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from kit.dialects.base import OFF_POLICY, OFFLINE, ON_POLICY
from kit.dialects.tianshou.counting import INITIAL_TESTS, Sampling
from kit.dialects.tianshou.counting import sampling as resolved_sampling
from kit.dialects.tianshou.settings import TianshouSettings
from kit.steps.plan import StepPlan


def notes(settings: TianshouSettings, plan: StepPlan) -> Iterator[str]:
    """One sentence for each caveat of resolved settings."""
    del plan
    sampling = resolved_sampling(settings)
    if sampling.names.algo not in sampling.names.ALGORITHMS:
        read = sampling.family.replace("_", "-")
        yield f"Read as {read}: no algorithm is named, algo=... does."
    if sampling.family == OFFLINE:
        yield "Offline, an epoch is so many gradient steps; nothing is collected."
        return
    if sampling.collect is not None and sampling.collected != sampling.collect:
        yield (
            f"A collection is {sampling.collected} environment steps, not {sampling.collect}: "
            f"equally many from each of {sampling.envs} environments."
        )
    epoch = sampling.trainings_per_epoch * sampling.collected
    if epoch != sampling.epoch_steps:
        yield (
            f"An epoch is {epoch:,} environment steps, not {sampling.epoch_steps:,}: "
            f"{sampling.trainings_per_epoch:,} whole collections."
        )
    if sampling.epochs_run != sampling.epochs:
        yield "num_epochs=0 still runs one epoch."
    if INITIAL_TESTS[sampling.version] == 2:
        yield "The initial test is run twice: there are two tests more than epochs."
    stop = getattr(sampling.names, "stop_rew", None)
    if stop is not None and not sampling.stops:
        yield (
            f"stop_rew={stop:g} ends the run after the first epoch whose test reaches it: these "
            "counts are those of a run that never does. Give test_return where it is known."
        )
    yield from _start_notes(sampling)
    yield from (_ratio_notes if sampling.family == OFF_POLICY else _batch_notes)(sampling)
    yield from _schedule_notes(sampling)


def _start_notes(sampling: Sampling) -> Iterator[str]:
    if not sampling.start:
        return
    yield (
        f"start_timesteps: {sampling.up(sampling.start):,} environment steps before training are "
        "part of no epoch, and the environments are reset after them."
    )
    if sampling.family == ON_POLICY and sampling.version != "documented":
        yield "They are trained on as part of the first batch."


def _ratio_notes(sampling: Sampling) -> Iterator[str]:
    name, ratio = sampling.name_of("per_sample"), sampling.per_sample
    steps = sampling.gradient_steps()
    if Fraction(repr(float(ratio))) * sampling.collected != steps:
        yield (
            f"{name}={ratio} makes round({ratio} * {sampling.collected}) = {steps} gradient steps "
            f"of each collection, half to even and without carry: {steps / sampling.collected:.4g} "
            "per environment step."
        )


def _batch_notes(sampling: Sampling) -> Iterator[str]:
    if sampling.capacity < sampling.collected:
        yield (
            f"The buffer holds {sampling.capacity} transitions, fewer than a collection: only the "
            "newest are trained on, without a word."
        )
    rows, size = min(sampling.collected, sampling.capacity), sampling.batch_size
    if size is not None and rows % size and rows > size and sampling.version != "documented":
        yield (
            f"The last minibatch takes the remainder: {size + rows % size} transitions, not {size}."
        )


def _schedule_notes(sampling: Sampling) -> Iterator[str]:
    """How a linear learning rate falls: at each ``update``, over the training steps it expects."""
    if sampling.collect is None or not sampling.epochs:
        return
    expected = -(-sampling.epoch_steps // sampling.collect) * sampling.epochs
    made, unit = sampling.trainings_per_epoch * sampling.epochs_run, "training step"
    if sampling.family == OFF_POLICY:
        made, unit = made * sampling.gradient_steps(), "gradient step"
    if not made:
        return
    falls = f"A linear learning rate falls after each {unit}, to zero after {expected:,}"
    if (negative := made - expected - 1) > 0:
        yield (
            f"{falls}, the training steps that it expects, and is negative in the last "
            f"{negative:,} of {made:,}."
        )
    else:
        left = 1 - (made - 1) / expected
        yield f"{falls}; the last of {made:,} is made with {left:.3g} of the rate."
