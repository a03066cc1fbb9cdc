"""What tianshou's dialects say about an observed run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from kit.dialects.tianshou import INITIAL_TESTS, Sampling, Tianshou, Tianshou2
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan
from kit.testing.observed import Expectation, figures_of, gradient_steps
from tests.dialects.recorded.counts import evaluations, known, listed

_OPTIMIZERS = {
    **dict.fromkeys(("ppo", "a2c", "reinforce"), 1),
    **dict.fromkeys(("dqn", "iqn", "c51", "rainbow", "qrdqn", "bdqn"), 1),
    **dict.fromkeys(("sac", "discrete_sac", "td3"), 3),
    "ddpg": 2,
}
_SCHEDULED = {"sac": "2", "td3": "2", "ddpg": "1"}
"""Number of the optimiser whose learning rate is scheduled, by first step; 0 for others."""
_ACTOR_DELAY = {"td3": 2}
"""Gradient steps per step of the actor's optimiser, where that is not each."""
_LEARNING_RATE = 1e-3


def expect(case: Mapping[str, Any]) -> Expectation:
    """The figures of a case; up to the failure, if the library failed."""
    settings = _settings(case)
    params, length = case["params"], case["params"].get("episode_length")
    try:
        plan = settings.to_plan()
    except SettingError as error:
        figures = _before_failure(settings, error, length)
        return Expectation(figures, refusal=str(error))
    sampling = settings.resolved().sampling()
    if plan.steps_per_env == 0:
        return Expectation(_offline(plan))
    algo = str(settings.resolved().algo)
    figures = _figures(sampling, plan, algo) | _evaluations(plan, length)
    if params.get("lr_schedule") == "linear":
        figures["lr_each_gradient_step_per_optimizer"] = _learning_rates(sampling, plan, algo)
    return Expectation(figures, warnings=_warnings(sampling))


def _settings(case: Mapping[str, Any]) -> Tianshou | Tianshou2:
    params = dict(case["params"])
    algo = str(case.get("algo", "")).lower()
    algo = "offline" if "offline" in algo else algo
    if str(case.get("version", "")).startswith("2"):
        return Tianshou2(**known(Tianshou2, params) | {"algo": algo, "version": "2.0.1"})
    if params.get("num_train_envs") == -1:
        # As many as the machine of the run had CPUs.
        params["num_train_envs"] = case["observed"].get("num_train_envs", -1)
    # The counting environment rewards each step with 1.
    params.setdefault("test_return", params.get("episode_length"))
    return Tianshou(**known(Tianshou, params) | {"algo": algo, "version": "1.1.0"})


def _figures(sampling: Sampling, plan: StepPlan, algo: str) -> dict[str, Any]:
    count, steps = plan.iterations, gradient_steps(plan)
    total = plan.gradient_steps_after(count)
    start = plan.local_prefill_steps
    collected = count * plan.frames_per_batch
    optimizers = _OPTIMIZERS.get(algo)
    figures = figures_of(plan) | {
        "trainer_env_step": collected,
        "trainer_gradient_step_counter": _gradient_step_counter(sampling, plan),
        "trainer_update_step_counter": count,
        "epochs_run": sampling.epochs_run + (sampling.version == "1.1.0"),
        "train_env_steps_executed": collected + start,
        "num_train_envs": sampling.envs,
        "num_training_envs": sampling.envs,
        "num_test_envs": sampling.names.num_test_envs,
        "start_steps_collected": start,
        "start_steps_random": sampling.start_random,
        "training_steps_iterations": count,
        "env_steps_per_collect": [plan.frames_per_batch] * len(steps),
        "env_steps_total_excluding_start": collected,
        "policy_update_calls_total": count if plan.on_policy else total,
    }
    if optimizers is not None:
        figures["optimizers"] = optimizers if total else 0
        skipped = total - -(-total // _ACTOR_DELAY.get(algo, 1))
        figures["optimizer_step_calls_all_optimizers"] = optimizers * total - skipped
    if plan.on_policy:
        figures["minibatch_sizes_first_iteration"] = plan.minibatch_sizes(1) if count else []
        figures["buffer_len_at_update"] = [plan.rows(k) for k in listed(plan)]
    else:
        figures["sample_size_and_buffer_len_at_update"] = [
            [plan.minibatch_size, min(sampling.capacity, start + k * plan.frames_per_batch)]
            for k in listed(plan)
        ]
    return figures


def _gradient_step_counter(sampling: Sampling, plan: StepPlan) -> int:
    """The trainer's own count: right off-policy, and blind to repeats and merges on-policy."""
    if not plan.on_policy:
        return plan.gradient_steps_after(plan.iterations)
    size = sampling.batch_size
    each = (1 + (1 if size is None else int((plan.rows(k) - 0.1) // size)) for k in listed(plan))
    return sum(each)


def _evaluations(plan: StepPlan, length: int | None) -> dict[str, Any]:
    tests = evaluations(plan)
    figures: dict[str, Any] = {
        "test_step_count": len(tests),
        "test_episodes_finished": len(tests) * plan.evaluation_episodes,
    }
    if length is None:
        return figures
    steps = plan.evaluation_episodes * length
    start, each = plan.local_prefill_steps // plan.num_envs, plan.steps_per_env or 0
    # Every env is reset when the trainer is made, when it runs, and when it is iterated over.
    finished = start // length + plan.iterations * each // length
    return figures | {
        "test_env_steps_executed": len(tests) * steps,
        "train_env_resets": plan.num_envs * (3 + finished),
        "test_steps": [
            {
                "after_training_env_steps": k * plan.frames_per_batch,
                "after_training_step": k,
                "episodes": plan.evaluation_episodes,
                "env_steps": steps,
            }
            for k in tests
        ],
    }


def _learning_rates(sampling: Sampling, plan: StepPlan, algo: str) -> dict[str, list[float]]:
    """A linear schedule, which is stepped once per call of the policy's update.

    It plans with the collection that was asked for, not with the one that is made.
    """
    assert sampling.collect is not None
    planned = -(-sampling.epoch_steps // sampling.collect) * sampling.epochs
    steps = gradient_steps(plan)
    if plan.on_policy:
        updates = [k for k, due in enumerate(steps) for _ in range(due)]
    else:
        updates = list(range(sum(steps)))
    scheduled = [_LEARNING_RATE * (1 - k / planned) for k in updates] if planned else []
    if not updates:
        return {}
    rates = {str(k): [_LEARNING_RATE] * len(updates) for k in range(_OPTIMIZERS.get(algo, 1))}
    return rates | {_SCHEDULED.get(algo, "0"): scheduled[:: _ACTOR_DELAY.get(algo, 1)]}


def _offline(plan: StepPlan) -> dict[str, Any]:
    total = plan.gradient_steps_after(plan.iterations)
    return {
        "gradient_steps_total": total,
        "gradient_steps_per_epoch": plan.gradient_steps_per_iteration,
        "env_step_attribute": total * (plan.minibatch_size or 0),
        "epochs_run": plan.iterations,
    }


def _warnings(sampling: Sampling) -> dict[str, bool]:
    asked = [steps for steps in (sampling.collect, sampling.start) if steps]
    return {f"n_step={steps} is not a multiple of": bool(steps % sampling.envs) for steps in asked}


def _before_failure(
    settings: Tianshou | Tianshou2, error: SettingError, length: int | None
) -> dict[str, Any]:
    """Too small a ratio fails in the first training step, after its collection; others at once."""
    two = isinstance(settings, Tianshou2)
    ratio = "update_step_num_gradient_steps_per_sample" if two else "update_per_step"
    nothing: dict[str, Any] = {
        "training_steps_iterations": 0,
        "env_steps_per_collect": [],
        "env_steps_total_excluding_start": 0,
        "gradient_steps_per_iteration": [],
        "gradient_steps_total": 0,
        "test_steps": [],
        "test_step_count": 0,
    }
    if error.field != ratio:
        return nothing
    possible = copy.copy(settings)
    setattr(possible, ratio, 1.0)
    plan, sampling = possible.to_plan(), possible.resolved().sampling()
    one = plan.replace(iterations=1, evaluation_every_iterations=None, asked={})
    one = one.replace(initial_evaluations=INITIAL_TESTS[sampling.version])
    figures = _figures(sampling, one, str(possible.resolved().algo))
    figures |= _evaluations(one, length) | {
        "gradient_steps_per_iteration": [0],
        "gradient_steps_total": 0,
        "policy_update_calls_total": 0,
        "optimizers": 0,
        "optimizer_step_calls_all_optimizers": 0,
        "first_iteration_with_gradient_step": None,
        "sample_size_and_buffer_len_at_update": [],
    }
    return figures
