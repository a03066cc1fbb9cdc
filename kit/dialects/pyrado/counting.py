"""How pyrado turns its settings into counts."""

from __future__ import annotations

from typing import Any

from kit.dialects.base import ON_POLICY
from kit.dialects.pyrado.settings import EVALUATION_ROLLOUTS, GAE, PyradoSettings
from kit.steps.errors import SettingError, whole_number, yes_or_no
from kit.steps.plan import StepPlan


def to_plan(pyrado: PyradoSettings) -> StepPlan:
    """The plan of resolved settings."""
    for name in ("recurrent", "learn_ent_coeff", "use_trained_policy_for_refill"):
        yes_or_no(name, getattr(pyrado, name))
    if pyrado.min_rollouts is None and pyrado.min_steps is None:
        raise SettingError(
            "min_steps", None, "leaves open what to collect", [1], "or give min_rollouts"
        )
    made: dict[str, Any] = {
        "iterations": pyrado.iterations,
        "min_steps": pyrado.min_steps,
        "min_episodes": pyrado.min_rollouts,
        "episode_length": pyrado.rollout_length,
        "action_repeat": pyrado.action_repeat,
        "max_episode_steps": pyrado.max_episode_steps,
        "final_evaluation": False,
    }
    on_policy = pyrado.family == ON_POLICY
    return StepPlan(**made | (_on_policy(pyrado) if on_policy else _value_based(pyrado)))


def _on_policy(pyrado: PyradoSettings) -> dict[str, Any]:
    assert pyrado.batch_size is not None
    size, length = pyrado.batch_size, pyrado.rollout_length
    if pyrado.recurrent and length is not None:
        size = -(-size // length) * length
    if not isinstance(pyrado.critic, GAE):
        raise SettingError("critic", pyrado.critic, "is no GAE", "use GAE(num_epoch=10)")
    whole_number("critic.num_epoch", pyrado.critic.num_epoch)
    whole_number("critic.batch_size", pyrado.critic.batch_size, 1)
    particles = pyrado.algo == "svpg"
    return {
        "update_epochs": 1 if pyrado.algo in ("a2c", "svpg") else pyrado.num_epoch,
        "minibatch_size": size,
        "minibatches_per_gradient_step": None if particles else 1,
        "world_size": pyrado.num_particles if particles else 1,
    }


def _value_based(pyrado: PyradoSettings) -> dict[str, Any]:
    warm_up = pyrado.warm_up_steps
    _check_memory(pyrado, warm_up)
    return {
        "prefill_steps": warm_up,
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
    assert pyrado.batch_size is not None
    length = pyrado.rollout_length
    held = pyrado.memory_size
    if length is not None:
        held = min(held, -(-warm_up // length) * length)
    if pyrado.updates_per_iteration and pyrado.iterations and pyrado.batch_size > held - 2:
        raise SettingError(
            "batch_size",
            pyrado.batch_size,
            f"is more than the memory can sample: it holds {held} transitions at its first "
            "update, and the last two are never sampled",
            [held - 2] if held > 2 else "use a larger memory_size and num_init_memory_steps",
        )
