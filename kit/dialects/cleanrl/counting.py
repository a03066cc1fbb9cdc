"""How CleanRL's files turn their arguments into counts."""

from __future__ import annotations

from typing import Any

from kit.dialects.base import ON_POLICY
from kit.dialects.cleanrl.settings import CleanRLSettings
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


def to_plan(args: CleanRLSettings) -> StepPlan:
    """The plan of resolved settings."""
    made: dict[str, Any] = {
        "num_envs": args.num_envs,
        "action_repeat": args.action_repeat,
        "max_episode_steps": args.max_episode_steps,
        "final_evaluation": False,
    }
    if args.family == ON_POLICY:
        made |= _ppo(args)
    else:
        made |= _dqn(args) if str(args.algo).startswith("dqn") else _sac(args)
    plan = StepPlan(**made)
    if plan.total_policy_steps != args.total_timesteps:
        plan.asked["total_policy_steps"] = args.total_timesteps
    return plan


def _ppo(args: CleanRLSettings) -> dict[str, Any]:
    assert args.total_timesteps is not None
    assert args.num_envs is not None
    assert args.num_steps is not None
    assert args.num_minibatches is not None
    batch = args.num_envs * args.num_steps
    if args.num_minibatches > batch:
        raise SettingError(
            "num_minibatches",
            args.num_minibatches,
            f"is more than the {batch} steps of a batch, which CleanRL cannot cut so",
            [batch],
        )
    return {
        "iterations": args.total_timesteps // batch,
        "steps_per_env": args.num_steps,
        "update_epochs": args.update_epochs,
        "minibatch_size": batch // args.num_minibatches,
    }


def _dqn(args: CleanRLSettings) -> dict[str, Any]:
    """Trains at each multiple of ``train_frequency`` greater than ``learning_starts``.

    Steps are counted from 0, so that the first such multiple is collected as the step after
    it. A ratio that is counted from ``train_frequency - 1`` steps before is due there.
    """
    assert args.learning_starts is not None
    if args.num_envs != 1:
        raise SettingError("num_envs", args.num_envs, "is not supported by CleanRL's DQN", [1])
    every = args.train_frequency or 1
    first = (args.learning_starts // every + 1) * every
    return {
        "iterations": args.total_timesteps,
        "learning_starts": first + 2 - every,
        "random_steps": 0,
        "replay_ratio": f"1/{every}",
        "minibatch_size": args.batch_size,
    }


def _sac(args: CleanRLSettings) -> dict[str, Any]:
    assert args.total_timesteps is not None
    assert args.num_envs is not None
    assert args.learning_starts is not None
    return {
        "iterations": args.total_timesteps,
        "learning_starts": (args.learning_starts + 2) * args.num_envs,
        "random_steps": min(args.learning_starts, args.total_timesteps) * args.num_envs,
        "gradient_steps_per_iteration": 1,
        "minibatch_size": args.batch_size,
    }
