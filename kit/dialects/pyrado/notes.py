"""Caveats of pyrado's settings."""

from __future__ import annotations

from collections.abc import Iterator

from kit.dialects.pyrado.settings import PyradoSettings
from kit.steps.plan import StepPlan


def notes(settings: PyradoSettings, plan: StepPlan) -> Iterator[str]:
    """One sentence for each caveat of resolved settings."""
    if plan.iterations == 0:
        yield f"max_iter={settings.max_iter} is accepted and trains nothing."
    if settings.min_steps is not None and settings.min_rollouts is not None:
        yield "min_steps and min_rollouts must both be met."
    if settings.rollout_length is None:
        yield "Without the length of a rollout its counts are known only as they come."
    elif settings.min_steps is not None and plan.frames_per_batch != settings.min_steps:
        yield (
            f"A collection is {plan.frames_per_batch} steps, not {settings.min_steps}: whole "
            f"rollouts of {settings.rollout_length} steps."
        )
    if settings.num_workers > 1 and settings.min_steps != 1:
        yield (
            "Several workers run rollouts that are then dropped: more env steps than are counted."
        )
    yield from (_on_policy if plan.on_policy else _value_based)(settings, plan)


def _on_policy(settings: PyradoSettings, plan: StepPlan) -> Iterator[str]:
    if settings.algo == "ppo":
        own = settings.critic_gradient_steps(plan.frames_per_batch) if plan.is_exact else 0
        count = f" {own}" if own else ""
        yield f"The critic makes{count} gradient steps of its own in each iteration, first."
    elif settings.algo == "ppo2":
        yield "Policy and critic share one optimiser; the critic's epochs and batches are unused."
    elif settings.algo == "svpg":
        yield (
            f"The gradients of a pass are averaged into one gradient step of each of "
            f"{settings.num_particles} particles, which the plan counts as processes; horizon is "
            "unused."
        )
    else:
        yield "A2C makes one pass over the rollouts, and each minibatch is a gradient step."


def _value_based(settings: PyradoSettings, plan: StepPlan) -> Iterator[str]:
    asked, least = settings.num_init_memory_steps, settings.warm_up_steps
    if asked is not None and asked != least:
        yield f"num_init_memory_steps={asked} becomes {least}: at least one batch."
    if plan.is_exact and plan.local_prefill_steps != least:
        yield f"The warm-up is {plan.local_prefill_steps} steps, in whole rollouts."
    yield "The first iteration is the warm-up with random actions, and already trains."
    if settings.num_updates_per_step is None and settings.min_steps is not None:
        yield (
            f"num_updates_per_step is guessed as ceil({settings.min_steps} / "
            f"{settings.env_max_steps}) = {settings.updates_per_iteration} from the greatest "
            "length of a rollout, however long they are."
        )
    period = settings.target_update_intvl
    counted = f"target_update_intvl={period} counts gradient steps, not iterations"
    if period > 1:
        there, here = f"1, {period + 1:,}, {2 * period + 1:,}", f"{period:,}, {2 * period:,}"
        counted += f": pyrado's targets follow gradient steps {there}, ..., kit's {here}, ..."
    yield counted + "."
    yield (
        "Each evaluation is 100 rollouts before the update; a logger that is passed makes them "
        "whenever it prints, and eval_intvl is ignored: say logger_print_intvl."
    )
    if settings.algo == "sac":
        own = 3 if settings.learn_ent_coeff else 2
        yield f"One gradient step of SAC is a step of each of {own} optimisers."
