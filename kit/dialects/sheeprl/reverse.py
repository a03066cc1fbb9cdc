"""From a plan to the settings of sheeprl."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from kit.dialects.base import step_by_step, trains
from kit.steps.plan import StepPlan


def algorithms_for(plan: StepPlan) -> list[str]:
    """Return algorithms that may make ``plan``, the likeliest first.

    They count differently, in some versions: SAC, the others without sequences, and those that
    finetune without random actions.
    """
    if plan.on_policy:
        ppo, a2c = ["ppo", "ppo_decoupled"], ["a2c"]
        return ppo + a2c if plan.minibatches_per_gradient_step is not None else a2c + ppo
    if plan.sequence_length:
        return ["dreamer_v3", "p2e_dv3_finetuning"]
    return ["sac", "droq", "sac_decoupled"]


def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of sheeprl that come nearest to ``plan``.

    Args:
        plan: what is to be said.
        settings: settings to keep: the algorithm, and the version; without it, the one whose rule
            the plan counts by.
    """
    algo, version = settings.get("algo") or algorithms_for(plan)[0], settings.get("version")
    plan = step_by_step(plan)
    if version is None:
        told = plan.counting.partition(":")[0].split("-")
        version = told[1] if told[0] == "sheeprl" and len(told) > 1 else "0.8.4"
    made: dict[str, Any] = {
        "algo": algo,
        "version": version,
        "total_steps": plan.total_policy_steps,
        "num_envs": plan.num_envs,
        "world_size": _processes(plan, algo),
        "action_repeat": plan.action_repeat,
        "max_episode_steps": plan.max_episode_steps,
        "run_test": plan.evaluations_after(plan.iterations) > 0,
    }
    if plan.on_policy:
        return made | _on_policy(plan, algo, version)
    each = plan.minibatch_size
    if algo == "sac_decoupled" and each is not None:
        each = max(each // (made["world_size"] - 1), 1)
    made |= {
        "per_rank_sequence_length": plan.sequence_length,
        "per_rank_batch_size": each,
        "exploration_steps": plan.exploration_steps,
    }
    if version == "0.5.0":
        return made | _train_every(plan, algo)
    return made | _replay_ratio(plan, algo, version)


def _processes(plan: StepPlan, algo: str) -> int:
    """Processes of the plan, and those that train for the one that plays."""
    if not algo.endswith("decoupled") or plan.world_size > 1:
        return plan.world_size
    rule, _, trainers = plan.counting.partition(":")
    return 1 + int(float(trainers)) if rule == "sheeprl-0.5.7-decoupled" else 2


def _on_policy(plan: StepPlan, algo: str, version: str) -> dict[str, Any]:
    size = plan.minibatch_size or plan.frames_per_batch
    if algo == "a2c" and version in ("0.5.7", "0.5.0"):  # its rows are those of all environments
        size = max(size // plan.num_envs, 1)
    epochs = {} if algo == "a2c" else {"update_epochs": plan.update_epochs}
    return epochs | {"rollout_steps": plan.steps_per_env, "per_rank_batch_size": size}


def _replay_ratio(plan: StepPlan, algo: str, version: str) -> dict[str, Any]:
    starts = plan.random_steps
    if "finetuning" in algo:  # it plays no random actions
        starts = max(starts, plan.learning_starts)
    if not trains(plan):
        if version != "documented":
            return {"learning_starts": starts, "replay_ratio": 0.0, "per_rank_pretrain_steps": 0}
        # A ratio of 0 is not documented, but a run may end before it has learned.
        after = (plan.iterations + 1) * plan.policy_steps_per_iteration
        return {"learning_starts": after, "replay_ratio": 1.0, "per_rank_pretrain_steps": 0}
    ratio = plan.replay_ratio
    if ratio is None:
        each = max(plan.frames_per_batch, 1)
        ratio = Fraction(plan.gradient_steps_per_iteration or 0, each)
    return {
        "learning_starts": starts,
        "replay_ratio": float(ratio),
        "per_rank_pretrain_steps": plan.pretrain_steps,
    }


def _train_every(plan: StepPlan, algo: str) -> dict[str, Any]:
    """Before ``replay_ratio``: so many gradient steps in every so many policy steps."""
    each = plan.policy_steps_per_iteration
    if not trains(plan):
        made = {"train_every": each, "per_rank_gradient_steps": 0, "per_rank_pretrain_steps": 0}
        return made | {"learning_starts": plan.random_steps}
    steps = plan.gradient_steps_per_iteration
    if steps is None:
        steps = round((plan.replay_ratio or 0) * plan.frames_per_batch)
    rule, _, told = plan.counting.partition(":")
    period, at_first = 1, steps + plan.pretrain_steps
    if rule == "sheeprl-0.5.0":
        period, at_first = (int(float(number)) for number in told.split(","))
    starts = plan.random_steps
    if "finetuning" in algo:  # it plays no random actions
        starts = plan.first_training_iteration * each
    return {
        "learning_starts": starts,
        "train_every": period * each,
        "per_rank_gradient_steps": steps,
        "per_rank_pretrain_steps": at_first,
    }
