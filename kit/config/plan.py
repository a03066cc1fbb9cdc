"""The plan that the settings of a recipe make."""

from __future__ import annotations

import warnings
from typing import Any

from kit.config.settings import EnvConfig, OfflineConfig, OnPolicyConfig, ReplayConfig, RunConfig
from kit.steps import SettingError, StepPlan
from kit.steps.foreign import as_plan
from kit.steps.given import given_fields
from kit.steps.settings import OfflineSteps, OffPolicySteps, OnPolicySteps
from kit.steps.table import plural

AnyConfig = OnPolicyConfig | ReplayConfig | OfflineConfig


def make_plan(cfg: AnyConfig, algorithm: str) -> StepPlan:
    """The plan that the settings of a recipe make.

    Args:
        cfg: settings; the environment's are those of ``cfg.env`` unless another library's settings
            of steps say them.
        algorithm: that will run the plan; settings that mean nothing for it are refused.

    Raises:
        SettingError: if they make no plan, or contradict each other.
    """
    steps, env = cfg.steps, cfg.env
    if isinstance(steps, (OnPolicySteps, OffPolicySteps, OfflineSteps)):
        limits = {"action_repeat": env.action_repeat, "max_episode_steps": env.max_episode_steps}
        try:
            plan = steps.to_plan(num_envs=env.num_envs, **limits)
        except SettingError as error:
            group = "steps" if hasattr(steps, error.field) else "env"
            name = f"{group}.{error.field}"
            hint = error.hint.replace("rounding=", "steps.rounding=")
            raise SettingError(name, error.value, error.why, error.works, hint) from None
    else:
        plan = as_plan(steps, algorithm, cfg.FAMILY)
        _check_family(plan, cfg.FAMILY)
        _check_limits(plan, cfg)
        plan = plan.replace(
            action_repeat=max(plan.action_repeat, env.action_repeat),
            max_episode_steps=plan.max_episode_steps or env.max_episode_steps,
        )
    _check_learning(plan, cfg)
    _check_stop(plan, cfg)
    return plan


def _check_family(plan: StepPlan, family: str) -> None:
    """Refuse a plan of another family than the recipe's."""
    why = f"contradicts this recipe, which is {family.replace('_', '-')}"
    if family == "on_policy" and plan.replay_ratio is not None:
        raise SettingError("replay_ratio", plan.replay_ratio, why, "use update_epochs")
    if family == "off_policy" and plan.update_epochs is not None:
        raise SettingError("update_epochs", plan.update_epochs, why, "use replay_ratio")
    if family == "offline" and not plan.offline:
        raise SettingError("steps_per_env", plan.steps_per_env, why, "use 0")


def _check_limits(plan: StepPlan, cfg: Any) -> None:
    """Refuse settings of the environment that those of another library contradict."""
    for field in ("num_envs", "action_repeat", "max_episode_steps"):
        ours, theirs = getattr(cfg.env, field), getattr(plan, field)
        defaults = {getattr(env, field) for env in (EnvConfig(), type(cfg)().env)}
        # A library that repeats no actions has no word for it; the number of envs it always says.
        silent = field != "num_envs" and theirs in defaults
        told = ours not in defaults or field in given_fields(cfg.env)
        if told and ours != theirs and not silent:
            why = f"contradicts the {theirs} of steps"
            raise SettingError(f"env.{field}", ours, why, "leave one of them out")


def _check_learning(plan: StepPlan, cfg: Any) -> None:
    """Refuse a run that ends before it learns."""
    starts, total = plan.learning_starts, plan.total_policy_steps
    given = getattr(cfg.steps, "learning_starts", ...)  # the word of another library, if any
    name = "learning_starts" if given is ... else "steps.learning_starts"
    works = "train earlier, or longer"
    if plan.trains and starts and total is not None and starts > total:
        why = f"is beyond the {total} policy steps of the run, which would train nothing"
        raise SettingError(name, starts if given in (None, ...) else given, why, works)
    if plan.trains and plan.prefill_steps and plan.iterations == 0:
        why = f"are all {total} policy steps of the run, which would train nothing"
        word = "num_normalization_steps"
        word = f"steps.{word}" if hasattr(cfg.steps, word) else "prefill_steps"
        raise SettingError(word, plan.prefill_steps, why, works)
    if plan.trains and starts and plan.is_exact and starts == total and plan.iterations > 1:
        steps = plural(plan.gradient_steps_after(plan.iterations), "gradient step")
        text = f"{name}={starts} is the length of the run, which makes {steps}, all at its end"
        warnings.warn(text, stacklevel=2)


def _check_stop(plan: StepPlan, cfg: RunConfig) -> None:
    """Refuse a return to stop at where nothing is evaluated before the end of the run."""
    evaluates = plan.evaluation_every or plan.evaluation_every_iterations
    if cfg.stop_at_return is not None and not evaluates:
        why = "has no effect: nothing is evaluated before the end of the run"
        works = "use steps.evaluation_every, or another library's word for it"
        raise SettingError("stop_at_return", cfg.stop_at_return, why, works)
