"""The plan that the settings of a recipe make."""

from __future__ import annotations

from kit.config import checks
from kit.config.settings import OfflineConfig, OnPolicyConfig, ReplayConfig
from kit.steps import SettingError, StepPlan
from kit.steps.foreign import as_plan
from kit.steps.settings import OfflineSteps, OffPolicySteps, OnPolicySteps

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
        checks.family(plan, cfg.FAMILY)
        checks.limits(plan, cfg)
        plan = plan.replace(
            action_repeat=max(plan.action_repeat, env.action_repeat),
            max_episode_steps=plan.max_episode_steps or env.max_episode_steps,
        )
    checks.learning(plan, cfg)
    checks.imagination(plan, cfg)
    checks.stop(plan, cfg)
    return plan
