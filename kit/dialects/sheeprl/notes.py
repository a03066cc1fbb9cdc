"""Caveats of sheeprl's settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kit.dialects.sheeprl.defaults import DECOUPLED
from kit.dialects.sheeprl.rules import first_due
from kit.steps.plan import StepPlan

if TYPE_CHECKING:
    from kit.dialects.sheeprl import Sheeprl


def notes(settings: Sheeprl, plan: StepPlan) -> Iterator[str]:
    """One sentence for each caveat of resolved settings."""
    left = settings.total_steps - plan.total_policy_steps
    if left > 0 and not settings.dry_run:
        yield (
            f"total_steps={settings.total_steps:,} is rounded down to whole iterations of "
            f"{settings.policy_steps_per_iteration:,} policy steps: {left:,} are never played."
        )
    if settings.algo in DECOUPLED:
        yield (
            f"One process plays and {settings.world_size - 1} train: policy steps are those of one "
            "process, and the plan counts one update of all trainers together as one gradient step."
        )
    elif settings.world_size > 1:
        yield (
            f"Gradient steps are per process; {settings.world_size} processes make the same "
            f"parameter update together, with {settings.world_size} minibatches."
        )
    yield from (_on_policy if plan.on_policy else _off_policy)(settings, plan)
    if settings.action_repeat == 0:
        yield "action_repeat=0 is taken as 1, against the documentation."
    if settings.version != "0.8.4":
        yield f"Version {settings.version}: {settings.VERSIONS[settings.version]}."


def _on_policy(settings: Sheeprl, plan: StepPlan) -> Iterator[str]:
    rows = plan.frames_per_batch
    if settings.per_rank_batch_size > rows:
        yield f"per_rank_batch_size is more than a batch of {rows}, which is one minibatch."
    if settings.algo == "a2c":
        yield "A2C accumulates the gradients of all minibatches into one gradient step."
        if settings.version in ("0.5.7", "0.5.0"):
            yield f"In {settings.version} minibatches of A2C count time steps of all environments."
        elif settings.anneal_lr:
            yield "A2C accepts anneal_lr and never steps its scheduler: lr is constant."
    elif settings.anneal_lr:
        yield "anneal_lr ends at lr / iterations in the last iteration, not at 0."


def _off_policy(settings: Sheeprl, plan: StepPlan) -> Iterator[str]:
    each = settings.policy_steps_per_iteration
    random = settings.learning_starts // each * each
    if settings.learning_starts % each:
        yield (
            f"learning_starts={settings.learning_starts:,} is rounded down to {random:,} policy "
            "steps" + ("." if random else ", so no action is random.")
        )
    yield from _first_training(settings, plan)
    if settings.exploration_steps:
        yield "exploration_steps is documented and read by no version of the code."
    yield from _ratio(settings, plan)
    period = target_period(settings)
    if settings.algo == "sac" and period > 1:
        yield f"Target updates: at every gradient step of the iterations divisible by {period}."


def _first_training(settings: Sheeprl, plan: StepPlan) -> Iterator[str]:
    first, each = plan.first_training_iteration, settings.policy_steps_per_iteration
    asked = settings.learning_starts // each
    if settings.version == "0.5.0" and settings.algo == "droq":
        yield "No action is random, and training begins strictly after learning_starts."
    elif settings.version == "0.5.0" and first > max(asked, 1):
        strictly = settings.algo == "dreamer_v1" and first == asked + 1
        why = "strictly after learning_starts" if strictly else "once train_every has passed"
        yield f"Training begins in iteration {first:,}, {why}."
    elif settings.version == "0.5.0" and settings.algo == "sac_ae" and asked > 1:
        yield "Training begins one iteration before learning_starts."
    elif first > max(asked, 1):
        yield f"Training waits until each environment has a whole sequence: iteration {first}."
    elif plan.random_steps:
        yield "The last iteration with random actions already trains."
    if "finetuning" in str(settings.algo):
        yield "No action is random: the exploring actor plays until the first gradient step."
    if settings.version == "0.5.0" and settings.algo in ("sac", "sac_ae", "sac_decoupled"):
        yield (
            f"The first training makes up for the prefill: {plan.gradient_steps(first):,} gradient "
            "steps."
        )


def _ratio(settings: Sheeprl, plan: StepPlan) -> Iterator[str]:
    if settings.version == "0.5.0" or plan.replay_ratio is None:
        return
    ratio, own = float(plan.replay_ratio), settings.num_envs
    if settings.replay_ratio == 0:
        yield "replay_ratio=0 is accepted, against the documentation: only pretraining."
    lost = own * ratio - int(own * ratio)
    if plan.counting == "sheeprl" or (plan.counting == "sheeprl-0.5.7" and not plan.pretrain_steps):
        due = plan.first_training_iteration + first_due(ratio, own)
        yield (
            f"The first answer of its ratio drops {lost:.3g} of a gradient step for good; the "
            f"first one that is due comes in iteration {due:,}."
        )
    if plan.counting == "sheeprl-0.5.7-sac":
        trained = plan.first_training_iteration
        yield (
            "SAC of 0.5.7 subtracts its prefill in iterations, not in policy steps: the first "
            f"training makes {plan.gradient_steps(trained):,} gradient steps."
        )
    if plan.pretrain_steps and plan.counting.startswith("sheeprl-0.5.7"):
        yield (
            f"per_rank_pretrain_steps={plan.pretrain_steps} replaces the gradient steps due at the "
            "first training by int(min(pretrain, steps) * ratio), and so hardly ever happens."
        )


def target_period(settings: Sheeprl) -> int:
    """Every which iteration updates the target network of SAC."""
    return settings.target_network_frequency // settings.policy_steps_per_iteration + 1
