"""Checks that make a plan consistent before anything is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.steps.errors import SettingError, whole_number
from kit.steps.minibatches import LAST_MINIBATCH
from kit.steps.ratio import as_fraction

if TYPE_CHECKING:
    from kit.steps.plan import StepPlan

_AT_LEAST_ONE = ("num_envs", "world_size", "action_repeat", "evaluation_episodes")
_AT_LEAST_ZERO = (
    "learning_starts",
    "prefill_steps",
    "exploration_steps",
    "pretrain_steps",
    "initial_evaluations",
)
_ONE_OR_NONE = (
    "max_episode_steps",
    "min_episodes",
    "min_steps",
    "episode_length",
    "minibatch_size",
    "minibatches_per_gradient_step",
    "sequence_length",
    "evaluation_every",
)
_ZERO_OR_NONE = ("steps_per_env", "update_epochs", "gradient_steps_per_iteration")


def complete(plan: StepPlan) -> None:
    """Check every field of ``plan`` and fill in those that follow from others.

    Raises:
        SettingError: at the first field that cannot work.
    """
    _numbers(plan)
    _collection(plan)
    _updates(plan)
    _budget(plan)
    _before_learning(plan)
    _minibatch(plan)


def _set(plan: StepPlan, field: str, value: Any) -> None:
    object.__setattr__(plan, field, value)


def _numbers(plan: StepPlan) -> None:
    for field in _AT_LEAST_ONE:
        _set(plan, field, whole_number(field, getattr(plan, field), 1))
    for field in _AT_LEAST_ZERO:
        _set(plan, field, whole_number(field, getattr(plan, field)))
    for fields, smallest in ((_ONE_OR_NONE, 1), (_ZERO_OR_NONE, 0)):
        for field in fields:
            if getattr(plan, field) is not None:
                _set(plan, field, whole_number(field, getattr(plan, field), smallest))
    if plan.rounding not in ("error", "down", "up"):
        raise SettingError("rounding", plan.rounding, "is not a rule", ["error", "down", "up"])
    if plan.last_minibatch not in LAST_MINIBATCH:
        raise SettingError(
            "last_minibatch", plan.last_minibatch, "is not a rule", list(LAST_MINIBATCH)
        )


def _collection(plan: StepPlan) -> None:
    if plan.collects_episodes:
        if plan.steps_per_env == 1:
            _set(plan, "steps_per_env", None)
        if plan.steps_per_env is not None:
            raise SettingError(
                "steps_per_env",
                plan.steps_per_env,
                "contradicts min_episodes and min_steps, which collect whole episodes",
                "leave one of them out",
            )
    elif plan.steps_per_env is None:
        raise SettingError("steps_per_env", None, "leaves open what to collect", [1])
    elif plan.episode_length is not None:
        raise SettingError(
            "episode_length",
            plan.episode_length,
            "means nothing where an iteration collects a number of steps",
            "leave it out, or collect whole episodes with min_episodes or min_steps",
        )
    if plan.prefill_is_iteration and not plan.prefill_steps:
        raise SettingError(
            "prefill_is_iteration", True, "needs prefill_steps", "give prefill_steps"
        )


def _updates(plan: StepPlan) -> None:
    if plan.replay_ratio is not None:
        _set(plan, "replay_ratio", as_fraction("replay_ratio", plan.replay_ratio))
    rules = ("update_epochs", "replay_ratio", "gradient_steps_per_iteration")
    given = [rule for rule in rules if getattr(plan, rule) is not None]
    if len(given) > 1:
        raise SettingError(
            given[1],
            getattr(plan, given[1]),
            f"contradicts {given[0]}={getattr(plan, given[0])}: both say how many gradient steps",
            f"leave one of them out: {' or '.join(given)}",
        )
    if plan.counting != "exact":
        from kit.steps.clock import counting_rule

        counting_rule(plan.counting)


def _budget(plan: StepPlan) -> None:
    """Derive iterations from the total or the total from iterations; refuse what does not divide."""
    if plan.iterations is not None:
        _set(plan, "iterations", whole_number("iterations", plan.iterations))
    if plan.total_policy_steps is not None:
        total = whole_number("total_policy_steps", plan.total_policy_steps)
        _set(plan, "total_policy_steps", total)
    if plan.total_policy_steps is None and plan.iterations is None:
        raise SettingError("total_policy_steps", None, "leaves the budget open", "give it")
    if not plan.is_exact:
        return
    if plan.iterations is None:
        _set(plan, "iterations", _iterations(plan))
    exact = plan.policy_steps_after(plan.iterations)
    if plan.total_policy_steps is None:
        _set(plan, "total_policy_steps", exact)
    elif plan.total_policy_steps != exact:
        raise SettingError(
            "total_policy_steps",
            plan.total_policy_steps,
            f"contradicts iterations={plan.iterations} of {plan.policy_steps_per_iteration} policy "
            "steps",
            [exact],
        )


def _iterations(plan: StepPlan) -> int:
    each = plan.policy_steps_per_iteration
    first = plan.policy_steps_after(1 if plan.prefill_is_iteration else 0)
    if each == 0:
        raise SettingError("iterations", None, "is open where nothing is collected", "give it")
    down, left = divmod(plan.total_policy_steps - first, each)
    before = 1 if plan.prefill_is_iteration else 0
    if not left and down >= 0:
        return down + before
    if plan.rounding == "error":
        options = [
            f"{first + n * each} ({n + before} iteration{'s' * (n + before != 1)})"
            for n in sorted({max(down, 0), max(down + 1, 0)})
        ]
        prefill = f" after {first} of prefill" if first else ""
        raise SettingError(
            "total_policy_steps",
            plan.total_policy_steps,
            f"is not a whole number of iterations of {each} policy steps{prefill}",
            " or ".join(["what works: " + options[0], *options[1:]])
            + ", or rounding='down' or 'up'",
        )
    rounded = max(down, 0) if plan.rounding == "down" else max(down + 1, 0)
    _round(plan, "total_policy_steps", first + rounded * each)
    return rounded + before


def _round(plan: StepPlan, field: str, value: int) -> None:
    _set(plan, "asked", {**plan.asked, field: getattr(plan, field)})
    _set(plan, field, value)


def _before_learning(plan: StepPlan) -> None:
    off_policy = plan.replay_ratio is not None or plan.gradient_steps_per_iteration is not None
    if plan.random_steps is None:
        _set(plan, "random_steps", plan.learning_starts if off_policy else 0)
    _set(plan, "random_steps", whole_number("random_steps", plan.random_steps))
    step = plan.num_envs * plan.world_size
    for field in ("random_steps", "learning_starts", "prefill_steps"):
        value = getattr(plan, field)
        unit = plan.world_size if plan.collects_episodes else step
        if value % unit == 0:
            continue
        down, up = value // unit * unit, -(-value // unit) * unit
        if plan.rounding == "error":
            raise SettingError(
                field,
                value,
                f"is not a multiple of the {unit} policy steps that all copies take at once",
                [down, up],
            )
        _round(plan, field, down if plan.rounding == "down" else up)


def _minibatch(plan: StepPlan) -> None:
    if plan.update_epochs is None:
        return
    if plan.minibatch_size is None or not plan.is_exact or plan.collects_episodes:
        return
    rows = plan.frames_per_batch
    if plan.minibatch_size > rows:
        raise SettingError(
            "minibatch_size",
            plan.minibatch_size,
            f"is larger than the {rows} policy steps of one batch "
            f"(num_envs={plan.num_envs} x steps_per_env={plan.steps_per_env})",
            [rows],
        )
