"""Compare plans by their step counts, whatever settings lead to these counts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kit.steps.counts import PlannedCounts


def run_key(plan: PlannedCounts) -> tuple[tuple[str, Any], ...]:
    """Return the settings that determine a run's step counts, in a canonical form.

    The result consists of (setting, value) pairs. Two plans with equal results have equal counts in
    every iteration.
    """
    names = ("num_envs", "world_size", "action_repeat", "max_episode_steps", "iterations")
    key = _same(plan, *names, "total_policy_steps", "exploration_steps")
    key |= _collection(plan) | _random(plan) | _updates(plan) | _evaluation(plan)
    return tuple(key.items())


def _same(plan: PlannedCounts, *names: str) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in names}


def differing_settings(one: PlannedCounts, other: PlannedCounts) -> list[tuple[str, Any, Any]]:
    """Return (setting, value, other value) for each setting in which two plans differ."""
    ours = {"counting": "exact"} | dict(run_key(one))
    theirs = {"counting": "exact"} | dict(run_key(other))
    pairs = ((name, ours.get(name), theirs.get(name)) for name in ours | theirs)
    return [(name, one, other) for name, one, other in pairs if one != other]


def _collection(plan: PlannedCounts) -> dict[str, Any]:
    if not plan.collects_episodes:
        batch: dict[str, Any] = {"steps_per_env": plan.steps_per_env}
    elif plan.is_exact:
        assert plan.episode_length is not None
        episodes = plan.frames_per_batch // plan.episode_length
        batch = {"min_episodes": episodes, "episode_length": plan.episode_length}
    else:
        batch = {"min_episodes": plan.min_episodes or 1, "min_steps": plan.min_steps or 0}
    if plan.prefill_steps:
        exact = plan.is_exact
        batch["prefill_steps"] = plan.local_prefill_steps if exact else plan.prefill_steps
        batch["prefill_is_iteration"] = plan.prefill_is_iteration
    return batch


def _random(plan: PlannedCounts) -> dict[str, Any]:
    if plan.is_exact:
        total = plan.policy_steps_after(plan.iterations)
        return {"random_steps": plan.random_steps_until(total)}
    prefill_random = plan.prefill_random if plan.prefill_steps else None
    return {"random_steps": plan.random_steps, "prefill_random": prefill_random}


def _updates(plan: PlannedCounts) -> dict[str, Any]:
    if plan.is_exact and plan.first_training_iteration > plan.iterations:
        return {"gradient_steps_per_iteration": 0}  # a run without training
    key: dict[str, Any] = {"pretrain_steps": plan.pretrain_steps}
    if plan.is_exact:
        key["first_training_iteration"] = plan.first_training_iteration
    else:
        key["learning_starts"] = plan.learning_starts
    if plan.counting != "exact":
        key["counting"] = plan.counting
    if plan.on_policy:
        return key | _on_policy(plan)
    key |= _gradient_steps(plan)
    if plan.pretrain_steps == 0 and key.get("gradient_steps_per_iteration") == 0:
        return {"gradient_steps_per_iteration": 0}
    key |= _same(plan, "minibatch_size", "sequence_length")
    return key | {"minibatches_per_gradient_step": plan.minibatches_per_gradient_step or 1}


def _gradient_steps(plan: PlannedCounts) -> dict[str, Any]:
    """Return the gradient steps per iteration if this number is constant, else the replay ratio."""
    if plan.replay_ratio is None:
        return {"gradient_steps_per_iteration": plan.gradient_steps_per_iteration or 0}
    if plan.counting == "exact":
        if plan.replay_ratio == 0:
            return {"gradient_steps_per_iteration": 0}
        if not plan.collects_episodes:
            each = plan.replay_ratio * plan.frames_per_batch
            if each.denominator == 1:
                return {"gradient_steps_per_iteration": each.numerator}
    return {"replay_ratio": plan.replay_ratio}


def _on_policy(plan: PlannedCounts) -> dict[str, Any]:
    key = _same(plan, "update_epochs", "sequence_length", "minibatch_size", "last_minibatch")
    key |= _same(plan, "minibatches_per_epoch", "minibatches_per_gradient_step")
    if plan.prefill_steps and plan.prefill_in_first_batch:
        key["prefill_in_first_batch"] = True
    if plan.is_exact:
        _same_cut(plan, key)
    return key


def _same_cut(plan: PlannedCounts, key: dict[str, Any]) -> None:
    """Convert minibatch settings to a canonical form, using the known batch sizes."""
    prefill = plan.local_prefill_steps if plan.prefill_in_first_batch else 0
    largest = max(plan.collected(1), plan.frames_per_batch + prefill)
    if plan.train_on_newest is not None and plan.train_on_newest < largest:
        key["train_on_newest"] = plan.train_on_newest
    rows = plan.rows(1) // (plan.sequence_length or 1)
    if plan.rows(1) != plan.rows(2) or not rows:
        return
    size = key["minibatch_size"] = min(plan.minibatch_size or rows, rows)
    full, left = divmod(rows, size)
    if not left and plan.last_minibatch != "carry":
        key["last_minibatch"] = "smaller"
    elif not left and plan.minibatches_per_epoch in (None, full):
        key |= {"last_minibatch": "smaller", "minibatches_per_epoch": None}
    minibatches = plan.minibatches_in_epoch(plan.rows(1))
    if plan.minibatches_per_gradient_step in (None, minibatches):
        key["minibatches_per_gradient_step"] = None if minibatches > 1 else 1


def _evaluation(plan: PlannedCounts) -> dict[str, Any]:
    if not plan.is_exact:
        names = [f.name for f in fields(plan) if "evaluation" in f.name]
        return _same(plan, *names)
    evaluations = plan.evaluations_after(plan.iterations)
    if not evaluations:
        return {"evaluations": 0}
    key: dict[str, Any] = {
        "evaluations": evaluations,
        "evaluation_episodes": plan.evaluation_episodes,
        "initial_evaluations": plan.evaluations_after(0),
        "final_evaluation": plan.final_evaluation or plan.ends_on_evaluation,
    }
    every, each = plan.evaluation_every, plan.policy_steps_per_iteration
    period = plan.evaluation_every_iterations
    if every is not None and not plan.prefill_steps and not plan.evaluate_each_multiple:
        if each >= every > 0:
            period = 1
        elif each and every % each == 0:
            period = every // each
    if period is not None and period < plan.iterations:
        key["evaluation_every_iterations"] = period
    elif period is None and every is not None:
        key["evaluation_every"] = every
    return key
