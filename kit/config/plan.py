"""Step plan creation from the settings of a recipe."""

from __future__ import annotations

import warnings
from typing import Any

from kit.config.settings import EnvConfig, OfflineConfig, OnPolicyConfig, ReplayConfig, RunConfig
from kit.steps import SettingError, StepPlan
from kit.steps.foreign import ForeignSteps, as_plan
from kit.steps.given import given_fields
from kit.steps.settings import OfflineSteps, OffPolicySteps, OnPolicySteps
from kit.steps.table import plural

AnyConfig = OnPolicyConfig | ReplayConfig | OfflineConfig


def make_plan(cfg: AnyConfig, algorithm: str, ranks: int | None = 1) -> StepPlan:
    """Create the step plan for a run.

    Args:
        cfg: recipe settings. Environment settings come from ``cfg.env``, unless another
            library's step settings contain them.
        algorithm: name of the algorithm. Step settings that the algorithm lacks are rejected.
        ranks: number of processes that train together. ``None``: one process that loads the policy
            of a run of any number of processes.

    Raises:
        SettingError: if the settings are invalid or contradict each other.
    """
    steps, env = cfg.steps, cfg.env
    if isinstance(steps, (OnPolicySteps, OffPolicySteps, OfflineSteps)):
        limits = {"action_repeat": env.action_repeat, "max_episode_steps": env.max_episode_steps}
        try:
            plan = steps.to_plan(num_envs=env.num_envs, world_size=ranks or 1, **limits)
        except SettingError as error:
            group = "steps" if hasattr(steps, error.field) else "env"
            name = f"{group}.{error.field}"
            hint = error.hint.replace("rounding=", "steps.rounding=")
            raise SettingError(name, error.value, error.why, error.works, hint) from None
    else:
        plan = as_plan(steps, algorithm, cfg.FAMILY)
        if ranks is None and plan.world_size > 1:
            plan = plan.replace(world_size=1, iterations=plan.iterations)
        _check_family(plan, cfg.FAMILY)
        _check_limits(plan, cfg)
        plan = plan.replace(
            action_repeat=max(plan.action_repeat, env.action_repeat),
            max_episode_steps=plan.max_episode_steps or env.max_episode_steps,
            normalization_steps=plan.normalization_steps if env.normalize_observation else 0,
        )
    if getattr(cfg, "gsde_at_warmup", False):
        plan = plan.replace(random_steps=0)
    _check_learning(plan, cfg)
    _check_stop(plan, cfg)
    return plan


def _check_family(plan: StepPlan, family: str) -> None:
    """Raise SettingError if the plan is for another algorithm family."""
    reason = f"This recipe is {family.replace('_', '-')}"
    if family == "on_policy" and plan.replay_ratio is not None:
        raise SettingError("replay_ratio", plan.replay_ratio, reason, "Use update_epochs")
    if family == "off_policy" and plan.update_epochs is not None:
        raise SettingError("update_epochs", plan.update_epochs, reason, "Use replay_ratio")
    if family == "offline" and not plan.offline:
        raise SettingError("steps_per_env", plan.steps_per_env, reason, "Use 0")


def _check_limits(plan: StepPlan, cfg: Any) -> None:
    """Reject environment settings that contradict another library's step settings."""
    for field in ("num_envs", "action_repeat", "max_episode_steps"):
        ours, theirs = getattr(cfg.env, field), getattr(plan, field)
        defaults = {getattr(env, field) for env in (EnvConfig(), type(cfg)().env)}
        # Libraries always set the number of environments, but may not have the other settings.
        is_unset = field != "num_envs" and theirs in defaults
        is_given = ours not in defaults or field in given_fields(cfg.env)
        if is_given and ours != theirs and not is_unset:
            reason = f"The step settings contain the value {theirs} instead"
            raise SettingError(f"env.{field}", ours, reason, "Remove one of the two")


def _check_learning(plan: StepPlan, cfg: Any) -> None:
    """Raise SettingError if the run ends before training starts, or warn if a library would run."""
    starts, total = plan.learning_starts, plan.total_policy_steps
    value = getattr(cfg.steps, "learning_starts", ...)  # `...` if the library has no such setting
    name = "learning_starts" if value is ... else "steps.learning_starts"
    advice = "Start training earlier, or run for more policy steps"
    if plan.trains and starts and total is not None and starts > total:
        reason = f"Training would start after {starts} policy steps, but the run has only {total}"
        if isinstance(cfg.steps, ForeignSteps):
            warnings.warn(f"{reason}, so it never trains", stacklevel=2)
            return
        raise SettingError(name, starts if value in (None, ...) else value, reason, advice)
    if plan.trains and plan.prefill_steps and plan.iterations == 0:
        reason = f"None of the {total} policy steps of the run would be left for training"
        field = "num_normalization_steps"
        field = f"steps.{field}" if hasattr(cfg.steps, field) else "prefill_steps"
        raise SettingError(field, plan.prefill_steps, reason, advice)
    if plan.trains and starts and plan.is_exact and starts == total and plan.iterations > 1:
        steps = plural(plan.gradient_steps_after(plan.iterations), "gradient step")
        text = f"{name}={starts} is the length of the run, so training takes {steps} at the end"
        warnings.warn(text, stacklevel=2)


def _check_stop(plan: StepPlan, cfg: RunConfig) -> None:
    """Reject ``stop_at_return`` if there is no evaluation before the end of the run."""
    evaluates = plan.evaluation_every or plan.evaluation_every_iterations
    if cfg.stop_at_return is not None and not evaluates:
        reason = "It has no effect, because the only evaluation is at the end of the run"
        advice = "Evaluate during the run as well, with steps.evaluation_every"
        raise SettingError("stop_at_return", cfg.stop_at_return, reason, advice)
