"""Caveats of Stable-Baselines3's settings."""

from __future__ import annotations

from fractions import Fraction

from kit.dialects.sb3.settings import SB3Settings
from kit.steps.plan import StepPlan


def notes(settings: SB3Settings, plan: StepPlan) -> list[str]:
    """One sentence for each caveat of resolved settings."""
    found = []
    over = plan.total_policy_steps - settings.total_timesteps
    if over:
        found.append(
            f"The run overshoots total_timesteps={settings.total_timesteps:,} by {over:,}: whole "
            f"rollouts of {plan.frames_per_batch:,}."
        )
    if over and plan.on_policy:
        found.append(
            "A schedule of the remaining progress would end below zero: progress is "
            f"{1 - plan.total_policy_steps / settings.total_timesteps:.3g} at the last update."
            if settings.total_timesteps
            else "A schedule of the remaining progress would divide by zero."
        )
    if settings.eval_freq is not None and settings.n_envs > 1:
        found.append(
            f"eval_freq counts vector steps: {settings.eval_freq:,} of them are "
            f"{settings.eval_freq * settings.n_envs:,} timesteps."
        )
    return found + (_on_policy(settings, plan) if plan.on_policy else _off_policy(settings, plan))


def _on_policy(settings: SB3Settings, plan: StepPlan) -> list[str]:
    found = [
        f"n_steps={settings.n_steps} is per environment: a rollout is "
        f"{plan.frames_per_batch:,} timesteps."
    ]
    size = settings.batch_size
    if size is not None and size > plan.frames_per_batch and settings.algo == "ppo":
        found.append(f"batch_size={size} is more than a rollout, which makes one minibatch.")
    elif size is not None and plan.frames_per_batch % size and settings.algo == "ppo":
        last = plan.frames_per_batch % size
        found.append(f"The last minibatch of each epoch has {last} transitions, not {size}.")
    if settings.algo == "a2c":
        found.append("A2C makes one gradient step per rollout, on all of it.")
    return found


def _off_policy(settings: SB3Settings, plan: StepPlan) -> list[str]:
    found = []
    every, unit = settings.frequency()
    steps = settings.gradient_steps
    assert steps is not None
    assert settings.learning_starts is not None
    if steps < 0:
        found.append(f"gradient_steps={steps} makes as many gradient steps as timesteps: ratio 1.")
    elif unit == "step":
        ratio = Fraction(steps, plan.frames_per_batch)
        unscaled = ": it is not scaled by n_envs" if settings.n_envs > 1 else ""
        found.append(
            f"gradient_steps={steps} after train_freq={every} vector steps of n_envs="
            f"{settings.n_envs} environments is a replay ratio of {ratio}{unscaled}."
        )
    if steps == 0:
        found.append("gradient_steps=0 never trains.")
    if settings.learning_starts % settings.n_envs:
        found.append(
            f"learning_starts={settings.learning_starts} is rounded up to vector steps: "
            f"{plan.random_steps} timesteps have random actions."
        )
    if plan.first_training_iteration <= plan.iterations and settings.learning_starts and steps:
        first = plan.policy_steps_after(plan.first_training_iteration)
        found.append(
            f"Training begins strictly after learning_starts={settings.learning_starts:,}: first "
            f"at {first:,} timesteps."
        )
    if settings.algo == "dqn" and settings.target_update_interval is not None:
        calls = max(settings.target_update_interval // settings.n_envs, 1)
        found.append(
            f"The target network is updated every {calls:,} vector steps, also before training "
            "begins."
        )
    return found
