"""What every recipe does before it wires its parts."""

from __future__ import annotations

from typing import Any

from kit.config.settings import EnvConfig
from kit.dialects import as_plan
from kit.envs import VectorEnv
from kit.steps import SettingError, StepPlan
from kit.steps.settings import OffPolicySteps, OnPolicySteps


def make_plan(steps: Any, env: EnvConfig, algo: str, family: str) -> StepPlan:
    """Return the plan that a recipe's settings make.

    Args:
        steps: the kit's settings, those of another library, or a plan.
        env: settings of the environments; the kit's settings leave ``num_envs``,
            ``action_repeat`` and ``max_episode_steps`` to them.
        algo: algorithm that will run the plan; settings that mean nothing for it are refused.
        family: its family, ``on_policy`` or ``off_policy``, for libraries that do not have it.

    Raises:
        SettingError: if the settings make no plan, or contradict the environment's.
    """
    if isinstance(steps, (OnPolicySteps, OffPolicySteps)):
        try:
            return steps.to_plan(
                num_envs=env.num_envs,
                action_repeat=env.action_repeat,
                max_episode_steps=env.max_episode_steps,
            )
        except SettingError as error:
            group = "steps" if hasattr(steps, error.field) else "env"
            name = f"{group}.{error.field}"
            raise SettingError(name, error.value, error.why, error.works, error.hint) from None
    plan = as_plan(steps, algo, family)
    for field in ("action_repeat", "max_episode_steps"):
        theirs, ours = getattr(plan, field), getattr(env, field)
        default = EnvConfig.__dataclass_fields__[field].default
        if ours != default and theirs not in (ours, default):
            raise SettingError(
                f"env.{field}", ours, f"contradicts the {theirs} of steps", "leave one of them out"
            )
    return plan.replace(
        action_repeat=max(plan.action_repeat, env.action_repeat),
        max_episode_steps=plan.max_episode_steps or env.max_episode_steps,
    )


def check_continuous(env: VectorEnv, algo: str) -> None:
    """Refuse an environment whose actions are not one array of real numbers.

    Args:
        env: the environment.
        algo: algorithm that needs them.

    Raises:
        SettingError: if they are not.
    """
    leaves = env.action_leaves
    if len(leaves) == 1 and leaves[0].dtype.kind == "f":
        return
    kinds = ", ".join(str(leaf.dtype if leaf.space is None else leaf.space) for leaf in leaves)
    raise SettingError(
        "env.id",
        env.name,
        f"has actions that are not continuous ({kinds}), and {algo} chooses only such",
        "use an environment with a Box of actions, or another recipe, such as ppo",
    )


def adapted_env(env: EnvConfig, plan: StepPlan) -> dict[str, Any]:
    """Return the arguments of ``make_env``: the settings, with what the plan decides."""
    return {
        "id": env.id,
        "num_envs": plan.num_envs,
        "vectorization": env.vectorization,
        "action_repeat": plan.action_repeat,
        "max_episode_steps": plan.max_episode_steps,
        "normalize_observation": env.normalize_observation,
        "normalize_reward": env.normalize_reward,
        **env.kwargs,
    }


def collector_name(wanted: str | None, plan: StepPlan) -> str:
    """Return the collector to use: the wanted one, or the one that fits the plan."""
    return wanted or ("episode" if plan.collects_episodes else "vector")


def whole_run(plan: StepPlan) -> dict[str, Any]:
    """Return the counter that measures a whole run and its value at the end.

    Policy steps, or iterations where whole episodes of unknown length are collected. The keys are
    the arguments of a schedule (``duration``) and of the hook that follows it (``counter``).
    """
    if plan.total_policy_steps is not None and plan.is_exact:
        return {"counter": "policy_steps", "duration": plan.total_policy_steps}
    if plan.iterations is not None:
        return {"counter": "iterations", "duration": plan.iterations}
    return {"counter": "policy_steps", "duration": plan.total_policy_steps}


def sampled_transitions(plan: StepPlan) -> int | None:
    """Return the transitions of one sample of a replay buffer; ``None``: all that it holds."""
    if plan.minibatch_size is None:
        return None
    return plan.minibatch_size * (plan.sequence_length or 1)
