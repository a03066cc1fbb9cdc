"""The counts of CleanRL's files: from their arguments to a plan, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.dialects.base import ON_POLICY
from kit.dialects.cleanrl.settings import CleanRLSettings
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


# ---------------------------------------------------------------------- to a plan
def to_plan(args: CleanRLSettings) -> dict[str, Any]:
    """The plan's settings."""
    if args.family == ON_POLICY:
        return _ppo(args)
    if args.num_envs != 1 and str(args.algo).startswith(("dqn", "ddpg")):
        name = str(args.algo).partition("_")[0].upper()
        raise SettingError("num_envs", args.num_envs, f"is not supported by CleanRL's {name}", [1])
    return _dqn(args) if str(args.algo).startswith("dqn") else _sac(args)


def _ppo(args: CleanRLSettings) -> dict[str, Any]:
    batch = args.num_envs * args.num_steps
    if args.num_minibatches > batch:
        why = f"is more than the {batch} steps of a batch, which CleanRL cannot cut so"
        raise SettingError("num_minibatches", args.num_minibatches, why, [batch])
    size = batch // args.num_minibatches
    return {"iterations": args.total_timesteps // batch, "minibatch_size": size}


def _dqn(args: CleanRLSettings) -> dict[str, Any]:
    """Trains at each multiple of ``train_frequency`` greater than ``learning_starts``.

    Steps are counted from 0, so that the first such multiple is collected as the step after
    it. A ratio that is counted from ``train_frequency - 1`` steps before is due there.
    """
    every = args.train_frequency
    first = (args.learning_starts // every + 1) * every
    return {
        "iterations": args.total_timesteps,
        "learning_starts": first + 2 - every,
        "random_steps": 0,
        "replay_ratio": f"1/{every}",
    }


def _sac(args: CleanRLSettings) -> dict[str, Any]:
    return {
        "iterations": args.total_timesteps,
        "learning_starts": (args.learning_starts + 2) * args.num_envs,
        "random_steps": min(args.learning_starts, args.total_timesteps) * args.num_envs,
        "gradient_steps_per_iteration": 1,
    }


# ---------------------------------------------------------------------- from a plan
def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments nearest to ``plan``."""
    if plan.on_policy:
        size = plan.minibatch_size or plan.frames_per_batch
        return {
            "algo": settings.get("algo", "ppo"),
            "total_timesteps": plan.total_policy_steps,
            "num_minibatches": max(plan.frames_per_batch // size, 1),
        }
    made = {
        "total_timesteps": plan.total_policy_steps // plan.num_envs,
        "batch_size": plan.minibatch_size or 256,
    }
    starts, ratio, algo = plan.first_training_iteration, plan.replay_ratio, settings.get("algo")
    if ratio is not None and ratio.numerator == 1 and plan.num_envs == 1:
        algo = algo or ("sac" if ratio == 1 and plan.random_steps else "dqn")
        if algo.startswith("dqn"):
            every = ratio.denominator
            first = max(starts + every - 3, 0)
            return made | {"algo": algo, "train_frequency": every, "learning_starts": first}
    return made | {"algo": algo or "sac", "learning_starts": max(starts - 2, 0)}
