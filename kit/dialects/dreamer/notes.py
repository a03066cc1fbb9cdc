"""Caveats of Dreamer's settings."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from kit.dialects.dreamer.settings import DreamerPaperSettings, DreamerSettings
from kit.steps.plan import StepPlan


def notes(made: DreamerSettings, plan: StepPlan) -> Iterator[str]:
    """One sentence for each caveat of resolved settings."""
    batch = made.batch_size * made.batch_length
    yield (
        f"train_ratio={made.train_ratio:g} counts replayed time steps: with "
        f"{made.batch_size} x {made.batch_length} of them in a minibatch it is a replay ratio "
        f"of {made.train_ratio / batch:.6g}."
    )
    if plan.total_policy_steps != made.steps:
        yield f"steps is rounded up to {plan.total_policy_steps:,}: whole driver chunks."
    yield "The observation after a reset is counted as a step there; here a reset costs none."
    yield (
        f"No action is random by plan; training begins with transition "
        f"{made.first_transition:,}, when the replay holds {batch:,} sequence starts."
    )
    if plan.counting.startswith("dreamer"):
        yield (
            "Its ratio answers 1 at first, and gradient steps come between the environments of one "
            "vector step; here they follow the vector step."
        )


def paper_notes(made: DreamerPaperSettings, plan: StepPlan) -> Iterator[str]:
    """One sentence for each caveat of resolved settings."""
    del plan
    ratio = Fraction(made.collect_interval, made.policy_steps_per_episode)
    yield (
        f"C={made.collect_interval} updates per episode of {made.policy_steps_per_episode} "
        f"policy steps are a replay ratio of {ratio}."
    )
    yield (
        "The updates that open the loop are counted with the collection before them, the seed "
        "episodes at first; an episode after the last updates would train nothing."
    )
