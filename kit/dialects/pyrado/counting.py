"""The counts of pyrado: from its settings to a plan, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.dialects.base import ON_POLICY
from kit.dialects.pyrado.settings import EVALUATION_ROLLOUTS, GAE, PyradoSettings
from kit.steps.errors import SettingError
from kit.steps.plan import StepPlan


# ---------------------------------------------------------------------- to a plan
def to_plan(pyrado: PyradoSettings) -> dict[str, Any]:
    """The plan's settings."""
    if pyrado.min_rollouts is None and pyrado.min_steps is None:
        why = "leaves open what to collect"
        raise SettingError("min_steps", None, why, [1], "or give min_rollouts")
    made = {"iterations": pyrado.iterations, "episode_length": pyrado.rollout_length}
    return made | (_on_policy if pyrado.family == ON_POLICY else _value_based)(pyrado)


def _on_policy(pyrado: PyradoSettings) -> dict[str, Any]:
    size, length = pyrado.batch_size, pyrado.rollout_length
    if pyrado.recurrent and length is not None:
        size = -(-size // length) * length
    if not isinstance(pyrado.critic, GAE):
        raise SettingError("critic", pyrado.critic, "is no GAE", "use GAE(num_epoch=10)")
    particles = pyrado.algo == "svpg"
    return {
        "update_epochs": 1 if pyrado.algo in ("a2c", "svpg") else pyrado.num_epoch,
        "minibatch_size": size,
        "minibatches_per_gradient_step": None if particles else 1,
        "world_size": pyrado.num_particles if particles else 1,
    }


def _value_based(pyrado: PyradoSettings) -> dict[str, Any]:
    _check_memory(pyrado, pyrado.warm_up_steps)
    return {
        "prefill_steps": pyrado.warm_up_steps,
        "prefill_is_iteration": True,
        "random_steps": 0,
        "gradient_steps_per_iteration": pyrado.updates_per_iteration,
        "minibatch_size": pyrado.batch_size,
        "evaluation_every_iterations": pyrado.logger_print_intvl or pyrado.eval_intvl,
        "evaluation_before_update": True,
        "evaluation_episodes": EVALUATION_ROLLOUTS,
    }


def _check_memory(pyrado: PyradoSettings, warm_up: int) -> None:
    """It samples without replacement from all but two of the transitions it holds."""
    assert pyrado.memory_size is not None
    length, held = pyrado.rollout_length, pyrado.memory_size
    if length is not None:
        held = min(held, -(-warm_up // length) * length)
    if pyrado.updates_per_iteration and pyrado.iterations and pyrado.batch_size > held - 2:
        why = (
            f"is more than the memory can sample: it holds {held} transitions at its first update, "
            "and the last two are never sampled"
        )
        works = [held - 2] if held > 2 else "use a larger memory_size and num_init_memory_steps"
        raise SettingError("batch_size", pyrado.batch_size, why, works)


# ---------------------------------------------------------------------- from a plan
def settings_from(plan: StepPlan, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings nearest to ``plan``."""
    made: dict[str, Any] = {
        "max_iter": plan.iterations,
        "batch_size": plan.minibatch_size,
        "env_max_steps": plan.episode_length,
        "episode_length": plan.episode_length,
    }
    if plan.on_policy:
        accumulates = plan.minibatches_per_gradient_step is None
        algo = "svpg" if plan.world_size > 1 or accumulates else "ppo"
        made |= {"num_epoch": plan.update_epochs, "algo": settings.get("algo", algo)}
        return made | {"num_particles": plan.world_size}
    every = plan.evaluation_every_iterations
    return made | {
        "algo": settings.get("algo", "sac"),
        "memory_size": max(plan.prefill_steps, 10**6),
        "num_init_memory_steps": plan.prefill_steps,
        "num_updates_per_step": plan.gradient_steps_per_iteration or 0,
        "eval_intvl": every if every is not None else max(plan.iterations, 1),
    }
