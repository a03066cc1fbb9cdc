"""Caveats of CleanRL's arguments."""

from __future__ import annotations

from collections.abc import Iterator

from kit.dialects.base import ON_POLICY
from kit.dialects.cleanrl.settings import CleanRLSettings
from kit.steps.plan import StepPlan


def notes(made: CleanRLSettings, plan: StepPlan) -> Iterator[str]:
    """One sentence for each caveat of resolved settings."""
    if made.family == ON_POLICY:
        left = made.total_timesteps - plan.total_policy_steps
        if left:
            yield f"{left:,} of total_timesteps do not fill a batch: never played."
        rows = plan.frames_per_batch
        if rows % (rows // made.num_minibatches):
            yield (
                f"num_minibatches={made.num_minibatches} does not divide {rows} steps: there "
                "is one more minibatch, a smaller one."
            )
        if made.anneal_lr:
            yield "anneal_lr ends at lr / iterations in the last iteration, not at 0."
        return
    dqn = str(made.algo).startswith("dqn")
    first = plan.policy_steps_after(plan.first_training_iteration)
    first += made.train_frequency - 1 if dqn else 0
    yield f"Training begins strictly after learning_starts: with policy step {first:,}."
    if made.num_envs > 1:
        yield (
            f"total_timesteps and learning_starts count vector steps of {made.num_envs} "
            f"environments: {plan.total_policy_steps:,} policy steps."
        )
    if dqn:
        yield "Random actions come from epsilon-greedy exploration and are not counted."
