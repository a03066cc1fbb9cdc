"""Caveats that apply to sheeprl settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kit.dialects.sheeprl.conversions import target_period
from kit.dialects.sheeprl.defaults import DECOUPLED
from kit.dialects.sheeprl.rules import first_due
from kit.steps.plan import StepPlan

if TYPE_CHECKING:
    from kit.dialects.sheeprl import Sheeprl


def notes(settings: Sheeprl, plan: StepPlan) -> Iterator[str]:
    """Yield the caveats that apply to resolved settings."""
    left = settings.total_steps - plan.total_policy_steps
    if left > 0 and not settings.dry_run:
        yield (
            f"total_steps={settings.total_steps:,} is rounded down to whole iterations of "
            f"{settings.policy_steps_per_iteration:,} policy steps; {left:,} are not collected."
        )
    if settings.algo in DECOUPLED:
        yield (
            f"One process collects policy steps and {settings.world_size - 1} processes train. The "
            "plan counts a joint update of all trainers as one gradient step."
        )
    elif settings.world_size > 1:
        yield (
            f"Gradient steps are per process. {settings.world_size} processes make a joint update "
            f"with {settings.world_size} minibatches."
        )
    yield from (_on_policy if plan.on_policy else _off_policy)(settings, plan)
    if settings.action_repeat == 0:
        yield "action_repeat=0 is treated as 1, contrary to the documentation."
    if settings.version != "0.8.4":
        yield f"Version {settings.version}: {settings.VERSIONS[settings.version]}."


def _on_policy(settings: Sheeprl, plan: StepPlan) -> Iterator[str]:
    rows = plan.frames_per_batch
    if settings.per_rank_batch_size > rows:
        yield f"per_rank_batch_size exceeds the batch of {rows}, which becomes one minibatch."
    if settings.algo == "a2c":
        yield "A2C accumulates the gradients of all minibatches for one gradient step."
        if settings.version in ("0.5.7", "0.5.0"):
            yield f"In {settings.version}, A2C minibatches count time steps of all environments."
        elif settings.anneal_lr:
            yield "A2C ignores anneal_lr, so lr is constant."
    elif settings.anneal_lr:
        yield "anneal_lr ends at lr / iterations in the last iteration, not at 0."


def _off_policy(settings: Sheeprl, plan: StepPlan) -> Iterator[str]:
    each = settings.policy_steps_per_iteration
    random = settings.learning_starts // each * each
    if settings.learning_starts % each:
        yield (
            f"learning_starts={settings.learning_starts:,} is rounded down to {random:,} policy "
            "steps" + ("." if random else ", so there are no random actions.")
        )
    yield from _first_training(settings, plan)
    if settings.exploration_steps:
        yield "exploration_steps is documented, but no version of the code reads it."
    yield from _ratio(settings, plan)
    period = target_period(settings.target_network_frequency, settings)
    if settings.algo == "sac" and period > 1:
        yield f"All gradient steps of iterations divisible by {period} update the targets."


def _first_training(settings: Sheeprl, plan: StepPlan) -> Iterator[str]:
    first, each = plan.first_training_iteration, settings.policy_steps_per_iteration
    requested = settings.learning_starts // each
    if settings.version == "0.5.0" and settings.algo == "droq":
        yield "There are no random actions. Training begins strictly after learning_starts."
    elif settings.version == "0.5.0" and first > max(requested, 1):
        strictly = settings.algo == "dreamer_v1" and first == requested + 1
        when = "strictly after learning_starts" if strictly else "after train_every policy steps"
        yield f"Training begins in iteration {first:,}, {when}."
    elif settings.version == "0.5.0" and settings.algo == "sac_ae" and requested > 1:
        yield "Training begins one iteration before learning_starts."
    elif first > max(requested, 1):
        yield f"Training begins in iteration {first}, when each environment has a whole sequence."
    elif plan.random_steps:
        yield "The last iteration with random actions also trains."
    if "finetuning" in str(settings.algo):
        yield "The exploration actor acts until the first gradient step, without random actions."
    if settings.version == "0.5.0" and settings.algo in ("sac", "sac_ae", "sac_decoupled"):
        yield (
            f"The first training includes {plan.gradient_steps(first):,} gradient steps for the "
            "prefill."
        )


def _ratio(settings: Sheeprl, plan: StepPlan) -> Iterator[str]:
    if settings.version == "0.5.0" or plan.replay_ratio is None:
        return
    ratio, envs = float(plan.replay_ratio), settings.num_envs
    if settings.replay_ratio == 0:
        yield "replay_ratio=0 is valid, contrary to the documentation: only pretraining remains."
    lost = envs * ratio - int(envs * ratio)
    if plan.counting == "sheeprl" or (plan.counting == "sheeprl-0.5.7" and not plan.pretrain_steps):
        due = plan.first_training_iteration + first_due(ratio, envs)
        yield (
            f"The ratio permanently drops {lost:.3g} of a gradient step in the first training. The "
            f"first gradient step is due in iteration {due:,}."
        )
    if plan.counting == "sheeprl-0.5.7-sac":
        trained = plan.first_training_iteration
        yield (
            "SAC of 0.5.7 subtracts its prefill in iterations, not in policy steps. The first "
            f"training has {plan.gradient_steps(trained):,} gradient steps."
        )
    if plan.pretrain_steps and plan.counting.startswith("sheeprl-0.5.7"):
        yield (
            f"per_rank_pretrain_steps={plan.pretrain_steps} replaces the gradient steps of the "
            "first training by int(min(pretrain, steps) * ratio), usually a smaller number."
        )
