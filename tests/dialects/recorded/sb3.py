"""What Stable-Baselines3's dialect says about an observed run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.dialects.sb3 import SB3
from kit.steps.plan import StepPlan
from kit.testing.observed import Expectation, figures_of, gradient_steps
from tests.dialects.recorded.counts import known, listed, renamed


def expect(case: Mapping[str, Any]) -> Expectation:
    """The figures of a case."""
    params = renamed(dict(case["params"]), {"num_envs": "n_envs"})
    follows_progress = params.get("learning_rate") == "p"
    for schedule in ("learning_rate", "clip_range"):  # a record may have it in words
        if isinstance(params.get(schedule), str):
            del params[schedule]
    settings = SB3(**known(SB3, params) | {"algo": str(case.get("algo", "")).lower()})
    plan = settings.to_plan()
    made = settings.resolved()
    figures = _figures(made, plan, params.get("episode_length"))
    figures |= (
        _on_policy(made, plan, follows_progress) if plan.on_policy else _off_policy(made, plan)
    )
    return Expectation(figures)


def _figures(made: SB3, plan: StepPlan, length: int | None) -> dict[str, Any]:
    count, total = plan.iterations, plan.gradient_steps_after(plan.iterations)
    trained = [k for k, due in enumerate(gradient_steps(plan), 1) if due]
    played = plan.total_policy_steps
    figures = figures_of(plan) | {
        "num_timesteps_attr": played,
        "vector_steps": played // made.n_envs,
        "train_calls": len(trained),
        "gradient_steps_per_train_call": [plan.gradient_steps(k) for k in trained],
        "policy_steps_at_train_calls": [plan.policy_steps_after(k) for k in trained],
        "optimizer_step_calls_per_optimizer": _optimizer_steps(made, total),
    }
    if length is not None:
        figures["env_steps_total"] = plan.env_steps_after(count, length)
    if made.eval_freq is not None:
        calls = range(made.eval_freq, played // made.n_envs + 1, made.eval_freq)
        times = [call * made.n_envs for call in calls]
        at = ("evaluations_at_timesteps", "eval_at_timesteps", "evaluations_timesteps")
        figures |= dict.fromkeys(at, times)
        figures |= dict.fromkeys(("evaluations", "eval_calls", "evaluations_total"), len(calls))
        episodes = len(calls) * made.n_eval_episodes
        figures |= dict.fromkeys(("eval_episodes", "eval_episodes_total"), episodes)
        if length is not None:
            steps = episodes * length
            figures |= dict.fromkeys(("eval_env_steps", "eval_env_steps_total"), steps)
    return figures


def _optimizer_steps(made: SB3, total: int) -> dict[str, int]:
    """Steps of each optimiser, in the order of their first step."""
    if not total:
        return {}
    if made.algo == "sac":
        return {"0": total, "1": total, "2": total}
    if made.algo in ("td3", "ddpg"):
        actor = total // (made.policy_delay or 1)
        return {"0": total} | ({"1": actor} if actor else {})
    return {"0": total}


def _on_policy(made: SB3, plan: StepPlan, follows_progress: bool) -> dict[str, Any]:
    """``_n_updates`` counts epochs; the progress of a schedule is asked after the rollout."""
    count, epochs = plan.iterations, plan.update_epochs or 0
    rates = []
    for k in listed(plan):
        progress = 1 - plan.policy_steps_after(k) / made.total_timesteps
        rates.append(progress * 1e-3 if follows_progress else made.learning_rate)
    return {
        "n_updates_attr": count * epochs,
        "minibatch_sizes_first_train_call": plan.minibatch_sizes(1) if count else [],
        "lr_per_train_call": rates,
    }


def _off_policy(made: SB3, plan: StepPlan) -> dict[str, Any]:
    total = plan.gradient_steps_after(plan.iterations)
    figures: dict[str, Any] = {
        "n_updates_attr": total,
        "sample_batch_sizes": [plan.minibatch_size] if total else [],
    }
    if made.algo == "dqn" and made.target_update_interval is not None:
        every = max(made.target_update_interval // made.n_envs, 1)
        calls = range(every, plan.total_policy_steps // made.n_envs + 1, every)
        figures["target_updates_at_timesteps"] = [call * made.n_envs for call in calls]
    return figures
