"""What sheeprl's dialect says about an observed run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kit.dialects.sheeprl import Sheeprl
from kit.dialects.sheeprl.conversions import target_period
from kit.dialects.sheeprl.resume import resumed_ratio, resumed_settings
from kit.dialects.sheeprl.rules import SheeprlRatio
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan
from kit.testing.observed import Expectation, figures_of, gradient_steps
from tests.dialects.recorded.counts import first_training, known, listed

_OPTIMIZERS = {"sac": 3, "ppo": 1, "a2c": 1, "dreamer_v1": 3, "dreamer_v2": 3, "dreamer_v3": 3}


def expect(case: Mapping[str, Any]) -> Expectation:
    """The figures of a case, and of the run that resumes it, if one does."""
    params = dict(case["params"])
    length = params.get("episode_length")
    resumed_with = params.pop("resumed_with", None)
    settings = settings_of(case, params)
    plan = settings.to_plan()
    stubbed = "optimizer counts are 0" in str(case.get("how", ""))
    figures = _figures(settings, plan, length, stubbed)
    figures |= _figures_of_rules(case["observed"], plan)
    warnings = _warnings(settings, plan)
    if not isinstance(resumed_with, Mapping | None):
        raise SettingError("resumed_with", resumed_with, "is no mapping of settings", "give one")
    if resumed_with is None:
        return Expectation(figures, warnings=warnings)
    new = settings_of(case, {**resumed_with, "buffer_checkpoint": settings.buffer_checkpoint})
    rest = new.resumed(settings)
    ran = resumed_settings(new, settings)
    again = _figures(ran, rest, length, stubbed, done=plan.iterations)
    if not plan.on_policy:
        again["ratio_calls_arg_result"] = _ratio_calls(resumed_ratio(new, settings), rest)
    return Expectation(
        {f"first_run.{name}": value for name, value in figures.items()}
        | {f"resumed_run.{name}": value for name, value in again.items()},
        warnings=warnings,
    )


def settings_of(case: Mapping[str, Any], params: Mapping[str, Any] | None = None) -> Sheeprl:
    """Return the dialect's settings of a case."""
    params = case["params"] if params is None else params
    algo = str(case.get("algo", "")).lower()
    algo = "sac" if algo.startswith("sac-") else algo
    old = {"train_every", "per_rank_gradient_steps"} & set(params)
    version = "0.5.0" if old else _version(str(case.get("version") or "0.8.4"))
    return Sheeprl(**known(Sheeprl, params) | {"algo": algo, "version": version})


def _version(text: str) -> str:
    """The behaviour of a release: replay_ratio came with 0.5.5, today's schedule after 0.5."""
    if "226" in text or re.search(r"feb|2024-0?[1-4]\b", text.lower()):
        return "0.5.0"
    if re.search(r"jul|2024-0?7\b", text.lower()):
        return "0.5.7"
    numbers = [int(number) for number in re.findall(r"\d+", text)[:3]]
    if len(numbers) < 2 or numbers[:2] < [0, 5] or (numbers[:2] == [0, 5] and numbers[2:] < [5]):
        return "0.5.0"
    return "0.5.7" if numbers[:2] == [0, 5] else "0.8.4"


def _figures(
    settings: Sheeprl, plan: StepPlan, length: int | None, stubbed: bool, done: int = 0
) -> dict[str, Any]:
    made = settings.resolved()
    steps, total = gradient_steps(plan), plan.gradient_steps_after(plan.iterations)
    first = first_training(plan)
    ranks = plan.world_size
    played = plan.total_policy_steps
    figures = figures_of(plan) | {
        "policy_steps_per_iteration": plan.policy_steps_per_iteration,
        "train_env_instances": plan.num_envs * ranks,
        "eval_when": "once, after the last iteration, on rank 0",
        "gradient_steps_per_iteration_per_rank": steps,
        "gradient_steps_total_per_rank": total,
        "gradient_steps_total_all_ranks": total * ranks,
        "train_calls_total_per_rank": plan.iterations if plan.on_policy else total,
        "policy_steps_before_first_gradient_step": first and plan.policy_steps_after(first),
    }
    optimizers = 0 if stubbed else _OPTIMIZERS.get(str(made.algo))
    if optimizers is not None:
        figures["optimizer_step_calls_total_per_rank"] = optimizers * total
    if length is not None:
        figures |= _env_figures(made, plan, length)
    if plan.on_policy:
        return figures | _on_policy(made, plan, done)
    batch = [made.per_rank_batch_size, 1]
    if plan.sequence_length:
        batch = [plan.sequence_length, made.per_rank_batch_size]
    figures |= {
        "train_batch_leading_shape": batch if total else None,
        "effective_replay_ratio_over_all_policy_steps": (
            round(total * ranks / played, 6) if played else None
        ),
        "target_ema_updates": sum(
            due
            for k, due in enumerate(steps, 1)
            if k % target_period(made.target_network_frequency, made) == 0
        ),
    }
    if made.version != "0.5.0":
        figures["ratio_calls_arg_result"] = _ratio_calls(settings.ratio(), plan)
    return figures


def _env_figures(made: Sheeprl, plan: StepPlan, length: int) -> dict[str, Any]:
    """Env steps, and those of the test episode at the end.

    An episode is counted by the environment itself, so not if the time limit outside of it ends
    it; in a dry run the test is one step.
    """
    repeat, limit = plan.action_repeat, plan.max_episode_steps
    test = length if limit is None else min(length, limit * repeat)
    if made.dry_run:
        test = min(test, repeat)
    return {
        "env_steps_total": plan.env_steps_after(plan.iterations, length),
        "eval_env_steps": test if made.run_test else 0,
        "eval_episodes": int(made.run_test and test == length),
    }


def _on_policy(made: Sheeprl, plan: StepPlan, done: int) -> dict[str, Any]:
    sizes = plan.minibatch_sizes(1) if plan.iterations else []
    if made.algo == "a2c" and made.version in ("0.5.7", "0.5.0"):
        sizes = [size // plan.num_envs for size in sizes]
    anneals = made.anneal_lr and made.algo != "a2c"
    total = done + plan.iterations
    rate = made.lr or 0.0
    rates = [rate * (1 - k / total) if anneals else rate for k in range(done, total)]
    return {
        "minibatch_sizes_first_iteration": sizes,
        "lr_first_optimizer_step_per_iteration": rates if sizes else [],
    }


def _ratio_calls(ratio: SheeprlRatio, plan: StepPlan) -> list[list[float]]:
    """What the library's ratio is asked in each training iteration, and what it answers."""
    calls = []
    for _ in listed(plan)[plan.first_training_iteration - 1 :]:
        ratio.steps += plan.frames_per_batch * ratio.processes
        asked = ratio.steps / ratio.divisor
        calls.append([asked, ratio.ask(asked)])
    return calls


def _figures_of_rules(observed: Mapping[str, Any], plan: StepPlan) -> dict[str, Any]:
    """Figures of all iterations from one on, which are recorded as one."""
    figures: dict[str, Any] = {}
    for name in observed:
        found = re.fullmatch(r"gradient_steps_per_iteration_per_rank_from_(\d+)", str(name))
        if found and int(found[1]) <= plan.iterations:
            figures[name] = plan.gradient_steps(int(found[1]))
    return figures


def _warnings(settings: Sheeprl, plan: StepPlan) -> dict[str, bool]:
    """Which of sheeprl's warnings about steps a run gives, and a resumed one."""
    made = settings.resolved()
    pretrain = "The number of pretrain steps is greater than the number of current steps."
    due = {pretrain: False}
    if made.version == "0.5.7" and not plan.on_policy and plan.iterations and made.replay_ratio:
        ratio = made.ratio()
        first = (ratio.steps + plan.frames_per_batch * ratio.processes) / ratio.divisor
        trains = plan.first_training_iteration <= plan.iterations
        due[pretrain] = trains and first < ratio.pretrain
    if made.version == "0.8.4" and not plan.on_policy and not made.dry_run:
        each = made.policy_steps_per_iteration
        late = plan.first_training_iteration > max((made.learning_starts or 0) // each, 1)
        due["The training starts after"] = late
    resumed = made.version == "0.5.7" and (made.learning_starts or 0) > 0
    due["resumed_run|The `algo.learning_starts` parameter is greater than zero."] = resumed
    return due
