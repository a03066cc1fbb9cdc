"""Caveats of Stable-Baselines3's settings."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from kit.dialects.base import trains
from kit.dialects.sb3.settings import SB3Settings
from kit.steps.plan import StepPlan


def notes(settings: SB3Settings, plan: StepPlan) -> Iterator[str]:
    """One sentence for each caveat of resolved settings."""
    asked = settings.total_timesteps
    over = plan.total_policy_steps - asked
    if over:
        yield (
            f"The run overshoots total_timesteps={asked:,} by {over:,}: whole rollouts of "
            f"{plan.frames_per_batch:,}."
        )
    if over and plan.on_policy and asked:
        yield (
            "A schedule of the remaining progress would end below zero: progress is "
            f"{1 - plan.total_policy_steps / asked:.3g} at the last update."
        )
    elif over and plan.on_policy:
        yield "A schedule of the remaining progress would divide by zero."
    if settings.eval_freq is not None and settings.n_envs > 1:
        yield (
            f"eval_freq counts vector steps: {settings.eval_freq:,} of them are "
            f"{settings.eval_freq * settings.n_envs:,} timesteps."
        )
    yield from _evaluations(settings, plan)
    yield from (_on_policy if plan.on_policy else _off_policy)(settings, plan)


def _evaluations(settings: SB3Settings, plan: StepPlan) -> Iterator[str]:
    if settings.eval_freq is None or not plan.is_exact:
        return
    theirs = plan.total_policy_steps // settings.n_envs // settings.eval_freq
    ours = plan.after(plan.iterations).evaluations - plan.initial_evaluations
    if theirs != ours:
        yield (
            f"Stable-Baselines3 evaluates {theirs:,} times: within rollouts, too, several times "
            f"with the same weights; here one evaluation follows a rollout: {ours:,}."
        )


def _on_policy(settings: SB3Settings, plan: StepPlan) -> Iterator[str]:
    rollout, size = plan.frames_per_batch, settings.batch_size
    yield f"n_steps={settings.n_steps} is per environment: a rollout is {rollout:,} timesteps."
    if settings.algo == "a2c":
        yield "A2C makes one gradient step per rollout, on all of it."
    elif settings.algo == "ppo" and size is not None and size > rollout:
        yield f"batch_size={size} is more than a rollout, which makes one minibatch."
    elif settings.algo == "ppo" and size is not None and rollout % size:
        yield f"The last minibatch of each epoch has {rollout % size} transitions, not {size}."


def _off_policy(settings: SB3Settings, plan: StepPlan) -> Iterator[str]:
    every, unit = settings.frequency()
    steps, starts = settings.gradient_steps, settings.learning_starts
    if steps < 0:
        yield f"gradient_steps={steps} makes as many gradient steps as timesteps: ratio 1."
    elif unit == "step":
        ratio = Fraction(steps, plan.frames_per_batch)
        unscaled = ": it is not scaled by n_envs" if settings.n_envs > 1 else ""
        yield (
            f"gradient_steps={steps} after train_freq={every} vector steps of n_envs="
            f"{settings.n_envs} environments is a replay ratio of {ratio}{unscaled}."
        )
    if steps == 0:
        yield "gradient_steps=0 never trains."
    if starts % settings.n_envs:
        yield (
            f"learning_starts={starts} is rounded up to vector steps: {plan.random_steps} "
            "timesteps have random actions."
        )
    if trains(plan) and starts and steps:
        first = plan.policy_steps_after(plan.first_training_iteration)
        yield (
            f"Training begins strictly after learning_starts={starts:,}: first at {first:,} "
            "timesteps."
        )
    if settings.algo == "dqn":
        calls = max(settings.target_update_interval // settings.n_envs, 1)
        yield (
            f"The target network is updated every {calls:,} vector steps, also before training "
            "begins."
        )
