"""What the dialect of the official DreamerV3 says about an observed run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.dialects.dreamer import Dreamer
from kit.steps.plan import StepPlan
from kit.testing.observed import Expectation, figures_of, gradient_steps
from tests.dialects.recorded.counts import first_training, known, renamed

_NAMES = {"num_envs": "envs", "run_steps": "steps", "action_repeat": "repeat"}


def expect(case: Mapping[str, Any]) -> Expectation:
    """The figures of a case."""
    params = renamed(dict(case["params"]), _NAMES)
    settings = Dreamer(**known(Dreamer, params))
    plan = settings.to_plan()
    return Expectation(_figures(settings.resolved(), plan, params.get("episode_length")))


def _figures(made: Dreamer, plan: StepPlan, length: int | None) -> dict[str, Any]:
    steps, played = gradient_steps(plan), plan.total_policy_steps
    items = plan.num_envs * max(plan.iterations - made.stored_length + 1, 0)
    ratio = made.train_ratio / (made.batch_size * made.batch_length)
    figures = figures_of(plan) | {
        "driver_steps": plan.iterations,
        "step_counter": played,
        "env_step_calls": played,
        "replay_len_end": min(items, made.replay_size),
        "gradient_steps_per_driver_step": steps,
        "first_driver_step_with_gradient_step": first_training(plan),
        "ratio_gradient_steps_per_step": ratio,
    }
    return figures | (_resets(plan, length) if length is not None else {})


def _resets(plan: StepPlan, length: int) -> dict[str, int]:
    """Each episode has one transition more than actions, for the observation after its reset."""
    repeat = plan.action_repeat
    transitions = -(-length // repeat) + 1
    episodes, rest = divmod(plan.iterations, transitions)
    env_steps = episodes * length + min(max(rest - 1, 0) * repeat, length)
    return {
        "raw_env_steps": plan.num_envs * env_steps,
        "reset_transitions_counted_as_steps": plan.num_envs * (episodes + (rest > 0)),
    }
