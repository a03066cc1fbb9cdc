"""The counts of Stable-Baselines3: from its settings to a plan, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kit.dialects.base import ON_POLICY
from kit.dialects.sb3.settings import SB3Settings
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


# ---------------------------------------------------------------------- to a plan
def to_plan(sb3: SB3Settings) -> dict[str, Any]:
    """The plan's settings."""
    made = _on_policy(sb3) if sb3.family == ON_POLICY else _off_policy(sb3)
    if sb3.eval_freq is not None:
        made["evaluation_every"] = sb3.eval_freq * sb3.n_envs
    return made


def _on_policy(sb3: SB3Settings) -> dict[str, Any]:
    rollout = sb3.n_steps * sb3.n_envs
    size = None if sb3.algo == "a2c" or sb3.batch_size is None else sb3.batch_size
    if sb3.algo == "ppo" and rollout < 2:
        raise SettingError("n_steps", sb3.n_steps, "makes a rollout of one timestep", [2])
    if sb3.algo == "ppo" and size == 1:
        raise SettingError("batch_size", 1, "leaves nothing to normalise advantages over", [2])
    return {
        "iterations": -(-sb3.total_timesteps // rollout),
        "steps_per_env": sb3.n_steps,
        "update_epochs": sb3.n_epochs,
        "minibatch_size": None if size is None else min(size, rollout),
    }


def _off_policy(sb3: SB3Settings) -> dict[str, Any]:
    (every, unit), rollout = sb3.frequency(), sb3.rollout()
    made: dict[str, Any] = {"minibatch_size": sb3.batch_size}
    if unit == "episode":
        made |= {"min_episodes": every, "episode_length": sb3.episode_length}
    else:
        made["steps_per_env"] = every
    iterations = -(-sb3.total_timesteps // rollout)
    # Training begins with the first rollout that ends strictly after learning_starts, or at it.
    first = sb3.learning_starts // rollout + 1
    if sb3.version == "documented":
        first = max(-(-sb3.learning_starts // rollout), 1)
    random = -(-sb3.learning_starts // sb3.n_envs) * sb3.n_envs
    made |= {
        "iterations": iterations,
        "learning_starts": first * rollout if first > 1 else 0,
        "random_steps": min(random, iterations * rollout),
    }
    if sb3.gradient_steps < 0:
        return made | {"replay_ratio": 1}
    return made | {"gradient_steps_per_iteration": sb3.gradient_steps}


# ---------------------------------------------------------------------- from a plan
def algorithms_for(plan: StepPlan) -> Iterable[str | None]:
    """Algorithms that may make ``plan``: the rules of PPO refuse some rollouts of others."""
    return [None, "a2c", ON_POLICY] if plan.on_policy else [None]


def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings nearest to ``plan``."""
    made: dict[str, Any] = {"total_timesteps": plan.total_policy_steps}
    every = plan.evaluation_every
    if plan.evaluation_every_iterations:
        every = plan.evaluation_every_iterations * plan.frames_per_batch
    if every:
        made["eval_freq"] = -(-every // plan.num_envs)
    if plan.on_policy:
        return made | _on_policy_from(plan, settings.get("algo"))
    documented = settings.get("version") == "documented"
    return made | _off_policy_from(plan, settings.get("algo"), documented)


def _on_policy_from(plan: StepPlan, algo: str | None) -> dict[str, Any]:
    if plan.collects_episodes:
        why = "cannot be expressed on-policy"
        raise SettingError("min_episodes", plan.min_episodes, why, [None])
    whole = plan.minibatch_size in (None, plan.frames_per_batch)
    return {
        "algo": algo or ("a2c" if whole and plan.update_epochs == 1 else "ppo"),
        "n_steps": plan.steps_per_env,
        "n_epochs": plan.update_epochs,
        "batch_size": plan.minibatch_size or plan.frames_per_batch,
    }


def _off_policy_from(plan: StepPlan, algo: str | None, documented: bool) -> dict[str, Any]:
    rollout, starts = plan.frames_per_batch, plan.first_training_iteration
    made: dict[str, Any] = {"algo": algo or "sac", "batch_size": plan.minibatch_size or 256}
    if plan.collects_episodes:
        length = plan.episode_length
        assert length is not None
        made |= {"train_freq": (rollout // length, "episode"), "episode_length": length}
    else:
        made["train_freq"] = plan.steps_per_env or 1
    steps = plan.gradient_steps_per_iteration
    if plan.replay_ratio is not None:
        steps = -1 if plan.replay_ratio == 1 else round(plan.replay_ratio * rollout)
    made["gradient_steps"] = steps or 0
    # The random steps, as far as the plan's first rollout to train is the first after them.
    after = int(documented)
    low = (starts - 1) * rollout + (after if starts > 1 else 0)
    made["learning_starts"] = min(max(plan.random_steps, low), starts * rollout - 1 + after)
    return made
