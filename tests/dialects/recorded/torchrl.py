"""What the dialect of TorchRL's trainer says about an observed run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.dialects.torchrl import RANDOM, RULE, WITHOUT, GrowingSampler, IteratedSampler, TorchRL
from kit.steps.counting import counting_rule
from kit.steps.plan import StepPlan
from kit.testing.observed import Expectation, figures_of
from tests.dialects.recorded.counts import known, listed, renamed

_NAMES = {"minibatch": "batch_size", "buffer": "buffer_size"}
_SAMPLERS = {"random": RANDOM, "noreplace": WITHOUT}


def expect(case: Mapping[str, Any]) -> Expectation:
    """The figures of a case."""
    params = renamed(dict(case["params"]), _NAMES)
    params["sampler"] = _SAMPLERS.get(str(params.get("sampler") or "random"), params.get("sampler"))
    if params.get("collector_total_frames") is None:
        params["collector_total_frames"] = params.get("total_frames")
    settings = TorchRL(**known(TorchRL, params))
    plan = settings.to_plan()
    made = settings.resolved()
    figures = _figures(made, plan, params.get("episode_length"))
    return Expectation(figures, warnings=_warnings(made))


def _figures(made: TorchRL, plan: StepPlan, length: int | None) -> dict[str, Any]:
    count, batch = plan.iterations, plan.frames_per_batch
    played = plan.total_policy_steps
    counted = [_optimizer_count(made, plan, k) for k in (0, *listed(plan))]
    figures = figures_of(plan) | {
        "policy_steps_per_iteration": [batch] * len(listed(plan)),
        "trainer_collected_frames": played * made.frame_skip,
        "policy_forward_calls_times_envs": played - plan.random_steps_until(played),
        "trainer_optim_count": _optimizer_count(made, plan, count),
        "minibatch_sizes_per_iteration": [plan.minibatch_sizes(k) for k in listed(plan)[:20]],
        "utd_hook_values_before_each_update": [
            {
                "utd_ratio": round((made.batch_size or 0) * counted[k - 1] / (k * batch), 4),
                "write_count": k * batch,
                "update_count": counted[k - 1],
            }
            for k in listed(plan)
        ],
        "rb_write_count": played,
        "collector_internal_frames": played,
    }
    if length is not None:
        figures["env_steps_total"] = plan.env_steps_after(count, length)
    return figures


def _optimizer_count(made: TorchRL, plan: StepPlan, iteration: int) -> int:
    """The trainer's own count: one more for each pass that it finds to have ended."""
    trained = max(iteration - plan.first_training_iteration + 1, 0)
    if plan.counting.startswith(RULE):
        growing = counting_rule(plan.counting)(plan)
        assert isinstance(growing, GrowingSampler)
        due = sum(growing.advance(plan.frames_per_batch) for _ in range(trained))
        return due + growing.attempts
    if not plan.on_policy or not made.iterate:
        return plan.gradient_steps_after(iteration)
    if plan.counting == "torchrl":
        sampler = counting_rule(plan.counting)(plan)
        assert isinstance(sampler, IteratedSampler)
        return sampler.after(trained, attempts=True)
    return plan.gradient_steps_after(iteration) + trained * (plan.update_epochs or 0)


def _warnings(made: TorchRL) -> dict[str, bool]:
    frames, asked = made.frames_per_batch, made.init_random_frames
    total = made.collector_total_frames
    due = {
        f"frames_per_batch ({frames}) is not exactly divisible": bool(frames % made.num_envs),
    }
    if total is not None and total > 0:
        due[f"total_frames ({total}) is not exactly divisible"] = bool(total % frames)
    if asked not in (None, -1, 0):
        due[f"init_random_frames ({asked}) is not exactly a multiple"] = bool(asked % frames)
    return due
