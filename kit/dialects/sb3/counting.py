"""How Stable-Baselines3 turns its settings into counts."""

from __future__ import annotations

from typing import Any

from kit.dialects.base import ON_POLICY
from kit.dialects.sb3.settings import SB3Settings
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


def to_plan(sb3: SB3Settings) -> StepPlan:
    """The plan of resolved settings."""
    made: dict[str, Any] = {
        "num_envs": sb3.n_envs,
        "action_repeat": sb3.action_repeat,
        "max_episode_steps": sb3.max_episode_steps,
        "final_evaluation": False,
        "evaluation_episodes": sb3.n_eval_episodes,
    }
    if sb3.eval_freq is not None:
        made["evaluation_every"] = sb3.eval_freq * sb3.n_envs
    made |= _on_policy(sb3) if sb3.family == ON_POLICY else _off_policy(sb3)
    plan = StepPlan(**made)
    if plan.is_exact and plan.total_policy_steps != sb3.total_timesteps:
        plan.asked["total_policy_steps"] = sb3.total_timesteps
    return plan


def _on_policy(sb3: SB3Settings) -> dict[str, Any]:
    assert sb3.n_steps is not None
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
    assert sb3.learning_starts is not None
    assert sb3.batch_size is not None
    every, unit = sb3.frequency()
    random = -(-sb3.learning_starts // sb3.n_envs) * sb3.n_envs
    made: dict[str, Any] = {"minibatch_size": sb3.batch_size}
    if unit == "episode":
        if sb3.episode_length is None:
            raise SettingError(
                "episode_length",
                None,
                "is needed where train_freq counts episodes, to know the counts beforehand",
                "give it, or count steps",
            )
        rollout = every * sb3.episode_length
        made |= {"min_episodes": every, "episode_length": sb3.episode_length}
    else:
        rollout = every * sb3.n_envs
        made |= {"steps_per_env": every}
    iterations = -(-sb3.total_timesteps // rollout)
    trains = max(_first_training(sb3, rollout), 1)
    made |= {
        "iterations": iterations,
        "learning_starts": trains * rollout if trains > 1 else 0,
        "random_steps": min(random, iterations * rollout),
    }
    assert sb3.gradient_steps is not None
    if sb3.gradient_steps < 0:
        return made | {"replay_ratio": 1}
    return made | {"gradient_steps_per_iteration": sb3.gradient_steps}


def _first_training(sb3: SB3Settings, rollout: int) -> int:
    """The first rollout that ends strictly after ``learning_starts``."""
    assert sb3.learning_starts is not None
    if sb3.version == "documented":
        return -(-sb3.learning_starts // rollout)
    return sb3.learning_starts // rollout + 1
