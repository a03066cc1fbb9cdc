"""Caveats of CleanRL's arguments."""

from __future__ import annotations

from kit.dialects.base import ON_POLICY
from kit.dialects.cleanrl.settings import CleanRLSettings
from kit.steps.plan import StepPlan


def notes(made: CleanRLSettings, plan: StepPlan) -> list[str]:
    """One sentence for each caveat of resolved settings."""
    assert made.total_timesteps is not None
    if made.family == ON_POLICY:
        left = made.total_timesteps - plan.total_policy_steps
        found = [f"{left:,} of total_timesteps do not fill a batch: never played."] if left else []
        rows = plan.frames_per_batch
        if rows % (rows // (made.num_minibatches or 1)):
            found.append(
                f"num_minibatches={made.num_minibatches} does not divide {rows} steps: there "
                "is one more minibatch, a smaller one."
            )
        if made.anneal_lr:
            found.append("anneal_lr ends at lr / iterations in the last iteration, not at 0.")
        return found
    first = plan.policy_steps_after(plan.first_training_iteration)
    if str(made.algo).startswith("dqn"):
        every = made.train_frequency or 1
        first += every - 1
    found = [f"Training begins strictly after learning_starts: with policy step {first:,}."]
    if made.num_envs and made.num_envs > 1:
        found.append(
            f"total_timesteps and learning_starts count vector steps of {made.num_envs} "
            f"environments: {plan.total_policy_steps:,} policy steps."
        )
    if str(made.algo).startswith("dqn"):
        found.append("Random actions come from epsilon-greedy exploration and are not counted.")
    return found
