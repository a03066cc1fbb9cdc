"""What nip's dialect says about an observed run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kit.dialects.nip import Nip
from kit.steps.errors import SettingError, whole_number
from kit.steps.plan import StepPlan
from kit.testing.observed import Expectation, figures_of, gradient_steps
from tests.dialects.recorded.counts import known, listed


def expect(case: Mapping[str, Any]) -> Expectation:
    """The figures of a case; up to the failure, if the library failed."""
    params = dict(case["params"])
    if "test_on_whole_dataset" in params:
        return Expectation(_text_trainer(params))
    settings = _settings(case, params)
    refusal = None
    try:
        plan = settings.to_plan()
        figures = _figures(settings, plan)
    except SettingError as error:
        refusal = str(error)
        figures = _before_failure(settings, error)
    return Expectation(figures, refusal=refusal)


def _settings(case: Mapping[str, Any], params: dict[str, Any]) -> Nip:
    sizes = re.findall(r"(\d+) (train|test)", str(params.get("dataset", "")))
    found = {name: int(size) for size, name in sizes}
    facts = {"dataset_size": found.get("train"), "test_dataset_size": found.get("test")}
    algo = str(case.get("algo", "vanilla_ppo")).lower()
    return Nip(**facts | known(Nip, params) | {"algo": algo, "version": "ccb3561"})


def _figures(settings: Nip, plan: StepPlan) -> dict[str, Any]:
    made = settings.resolved()
    count, steps, each = plan.iterations, gradient_steps(plan), made.steps_of_each()
    tests = min(made.num_test_iterations, 1) if made.test_run else made.num_test_iterations
    return (
        _environments(made)
        | figures_of(plan)
        | {
            "frames_per_iteration": [plan.frames_per_batch] * len(steps),
            "frames_total": count * plan.frames_per_batch,
            "minibatch_sizes_per_iteration": [plan.minibatch_sizes(k) for k in listed(plan)[:20]],
            "lr_first_gradient_step_per_iteration": [
                made.learning_rate(k) if steps[k - 1] else None for k in listed(plan)
            ],
            "test_batched_steps_and_frames": [tests * each, made.test_rollouts() * each],
        }
    )


def _environments(made: Nip) -> dict[str, Any]:
    """How the train and test environments are made, and normalised."""
    each = made.steps_of_each()
    figures: dict[str, Any] = {"max_message_rounds": made.max_message_rounds}
    normalized = {}
    for name, size in (("train", made.dataset_size), ("test", made.test_dataset_size)):
        frames = made.frames(size or made.dataset_size)
        figures[name] = {
            "frames_per_batch": frames,
            "steps_per_env_per_iteration": each,
            "num_envs": frames // each,
            "dataset_len": size,
        }
        length = made.max_message_rounds or each
        normalized[name] = list(made.normalization_frames(frames // each, length))
    return figures | {"normalization_batched_steps_and_frames": normalized}


def _before_failure(settings: Nip, error: SettingError) -> dict[str, Any]:
    """What happened before the library failed: in its environments, or in the first iteration."""
    nothing: dict[str, Any] = {
        "iterations": 0,
        "frames_per_iteration": [],
        "frames_total": 0,
        "gradient_steps_per_iteration": [],
        "gradient_steps_total": 0,
        "minibatch_sizes_per_iteration": [],
        "lr_first_gradient_step_per_iteration": [],
        "normalization_batched_steps_and_frames": {"train": [0, 0], "test": [0, 0]},
        "test_batched_steps_and_frames": [0, 0],
    }
    made = replace(settings)
    if error.field == "algo":
        return nothing | _environments(made)
    if error.field == "steps_per_env_per_iteration" and made.min_message_rounds:
        # The statistics of the first batch, which has no finished episode, come after its update.
        one = replace(made, min_message_rounds=0, num_iterations=1)
        return _figures(one, one.to_plan()) | {"test_batched_steps_and_frames": [0, 0]}
    if error.field != "minibatch_size":
        return nothing
    figures = nothing | _environments(made)
    frames = figures["train"]["frames_per_batch"]
    return figures | {
        "iterations": 1,
        "frames_per_iteration": [frames],
        "frames_total": frames,
        "gradient_steps_per_iteration": [0],
        "minibatch_sizes_per_iteration": [[]],
        "lr_first_gradient_step_per_iteration": [None],
    }


def _text_trainer(params: dict[str, Any]) -> dict[str, Any]:
    """Trainers on pure text collect and test rollouts, not frames."""
    given = {name: value for name, value in params.items() if value is not None}
    size = given.get("dataset_len", given.get("train_dataset_len", 1))
    rollouts = whole_number("rollouts_per_iteration", given.get("rollouts_per_iteration", size), 1)
    batches = whole_number("num_test_iterations", given.get("num_test_iterations", 10))
    on_all = whole_number("test_dataset_len", given.get("test_dataset_len", size)) * batches
    return {
        "train_rollouts_per_iteration": rollouts,
        "test_rollouts": on_all if params["test_on_whole_dataset"] else rollouts * batches,
        "test_rollouts_if_not_whole_dataset": rollouts * batches,
        "test_rollouts_if_whole_dataset": on_all,
    }
