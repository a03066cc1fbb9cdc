"""Consistency checks for plans."""

from __future__ import annotations

from fractions import Fraction
from math import gcd
from typing import Any

from kit.steps.counting import counting_rule
from kit.steps.counts import PlannedCounts
from kit.steps.errors import SettingError, whole_number
from kit.steps.schema import check_types


def complete(plan: PlannedCounts, frames_per_batch: int | None = None) -> None:
    """Check every field of ``plan`` and fill in derived fields.

    Raises:
        SettingError: for the first invalid field.
    """
    check_types(plan)
    _collection(plan, frames_per_batch)
    _updates(plan)
    if plan.offline:
        _offline(plan)
    _prefill(plan)
    _budget(plan)
    _before_learning(plan)
    if plan.update_epochs is None:
        _no_batch(plan)
    else:
        _batch(plan)
    _minibatch(plan)
    if plan.counting != "exact":
        counting_rule(plan.counting)(plan)
    _evaluation(plan)


def _set(plan: PlannedCounts, field: str, value: Any) -> None:
    object.__setattr__(plan, field, value)
    for derived in _DERIVED & vars(plan).keys():
        del vars(plan)[derived]


_DERIVED = frozenset({"collects_episodes", "offline", "is_exact", "frames_per_batch", "on_policy"})
"""Cached properties that are deleted when a field changes."""


def _error(
    plan: PlannedCounts, field: str, why: str, works: Any = (), hint: str = ""
) -> SettingError:
    value = getattr(plan, field)
    given = str(value) if isinstance(value, Fraction) else value
    return SettingError(field, given, why, works, hint)


def _collection(plan: PlannedCounts, frames: int | None) -> None:
    if plan.collects_episodes and plan.steps_per_env == 1:
        _set(plan, "steps_per_env", None)
    if plan.collects_episodes:
        for field, value in ("steps_per_env", plan.steps_per_env), ("frames_per_batch", frames):
            if value is not None:
                why = "conflicts with min_episodes and min_steps, which collect whole episodes"
                raise SettingError(field, value, why, [None])
    elif frames is not None:
        _set(plan, "steps_per_env", _steps_of_each(plan, frames))
    elif plan.steps_per_env is None:
        raise _error(plan, "steps_per_env", "leaves the batch size undefined", [1])


def _steps_of_each(plan: PlannedCounts, frames: int) -> int:
    """Return the number of policy steps per environment in a batch of ``frames`` policy steps."""
    frames, envs = whole_number("frames_per_batch", frames, at_least=1), plan.num_envs
    if plan.steps_per_env is not None and frames != envs * plan.steps_per_env:
        why = f"conflicts with steps_per_env={plan.steps_per_env} and num_envs={envs}"
        works = [envs * plan.steps_per_env] if plan.steps_per_env else []
        raise SettingError("frames_per_batch", frames, why, works, "or omit one of the two")
    if frames % envs:
        near = frames // envs * envs
        why = f"is not divisible by num_envs={envs}"
        works = [n for n in (near, near + envs) if n]
        raise SettingError("frames_per_batch", frames, why, works)
    _set(plan, "asked", {**plan.asked, "frames_per_batch": frames})
    return frames // envs


def _updates(plan: PlannedCounts) -> None:
    rules = ("update_epochs", "replay_ratio", "gradient_steps_per_iteration")
    given = [rule for rule in rules if getattr(plan, rule) is not None]
    if len(given) > 1:
        first = f"{given[0]}={getattr(plan, given[0])}"
        why = f"conflicts with {first}, because both set the number of gradient steps"
        raise _error(plan, given[1], why, [None], f"or omit {given[0]}")


def _offline(plan: PlannedCounts) -> None:
    """Reject settings that need policy steps if ``steps_per_env=0`` (offline)."""
    rules, steps = ("update_epochs", "replay_ratio"), ("prefill_steps", "learning_starts")
    for field in (*rules, *steps, "random_steps", "exploration_steps"):
        value = getattr(plan, field)
        if value is not None and (value or field in rules):
            why = "needs policy steps, but steps_per_env=0 (offline) collects none"
            works = "use gradient_steps_per_iteration" if field in rules else [0]
            raise _error(plan, field, why, works)


def _prefill(plan: PlannedCounts) -> None:
    _vector_steps(plan, "prefill_steps")
    if plan.prefill_is_iteration and not plan.prefill_steps:
        hint = "or set prefill_steps"
        raise _error(plan, "prefill_is_iteration", "needs prefill_steps", [False], hint)


def _budget(plan: PlannedCounts) -> None:
    """Derive iterations from total policy steps or vice versa; reject a contradiction."""
    if plan.total_policy_steps is None and plan.iterations is None:
        raise _error(
            plan,
            "total_policy_steps",
            "leaves the length of the run undefined",
            "set total_policy_steps or iterations",
        )
    if not plan.is_exact:
        return
    if plan.iterations is None:
        _set(plan, "iterations", _iterations(plan))
    exact = plan.policy_steps_after(plan.iterations)
    if plan.total_policy_steps is None:
        _set(plan, "total_policy_steps", exact)
    elif plan.total_policy_steps != exact:
        each = plan.policy_steps_per_iteration
        why = f"conflicts with iterations={plan.iterations} with {each} policy steps each"
        raise _error(plan, "total_policy_steps", why, [exact])


def _iterations(plan: PlannedCounts) -> int:
    each = plan.policy_steps_per_iteration
    before = 1 if plan.prefill_is_iteration else 0
    first = plan.policy_steps_after(before)
    if before and plan.total_policy_steps == 0:
        return 0
    if each == 0:
        raise _error(plan, "iterations", "must be set if nothing is collected", [1])
    down, left = divmod(plan.total_policy_steps - first, each)
    if not left and down >= 0:
        return down + before
    if plan.rounding == "error":
        prefill = f" after a prefill of {first}" if first else ""
        why = f"is not a multiple of the {each} policy steps per iteration{prefill}"
        works = sorted({first + n * each for n in (max(down, 1), max(down + 1, 1))})
        raise _error(plan, "total_policy_steps", why, works, "or rounding=up or down")
    rounded = max(down, 0) if plan.rounding == "down" else max(down + 1, 0)
    _round(plan, "total_policy_steps", first + rounded * each)
    return rounded + before


def _round(plan: PlannedCounts, field: str, value: int) -> None:
    _set(plan, "asked", {**plan.asked, field: getattr(plan, field)})
    _set(plan, field, value)


def _before_learning(plan: PlannedCounts) -> None:
    _vector_steps(plan, "learning_starts")
    if plan.random_steps is None:
        off_policy = plan.trains and not plan.on_policy
        _set(plan, "random_steps", plan.learning_starts if off_policy else 0)
    _vector_steps(plan, "random_steps")
    _vector_steps(plan, "exploration_steps")


def _vector_steps(plan: PlannedCounts, field: str) -> None:
    """Reject or round a number of policy steps that is not divisible by the number of envs."""
    unit = plan.world_size * (1 if plan.collects_episodes else plan.num_envs)
    value = getattr(plan, field)
    if value % unit == 0:
        return
    down, up = value // unit * unit, -(-value // unit) * unit
    if plan.rounding == "error":
        why = f"is not a multiple of {unit}, the number of policy steps when all envs step once"
        raise _error(plan, field, why, [down, up])
    _round(plan, field, down if plan.rounding == "down" else up)


def _no_batch(plan: PlannedCounts) -> None:
    """Reject settings for on-policy batches if the update is not on-policy."""
    for field in ("minibatches_per_epoch", "train_on_newest", "prefill_in_first_batch"):
        if getattr(plan, field):
            why = "has no effect without update_epochs"
            raise _error(plan, field, why, [False if field == "prefill_in_first_batch" else None])


def _batch(plan: PlannedCounts) -> None:
    """Reject settings that contradict on-policy batches."""
    if plan.pretrain_steps:
        why = "has no effect with update_epochs, which trains on collected batches only"
        raise _error(plan, "pretrain_steps", why, [0])
    if plan.prefill_in_first_batch and plan.first_training_iteration > 1:
        why = "is after the first batch, but prefill_in_first_batch trains in the first iteration"
        raise _error(plan, "learning_starts", why, [plan.policy_steps_after(1)])
    if plan.train_on_newest and plan.train_on_newest % plan.num_envs:
        why = f"is not divisible by num_envs={plan.num_envs}"
        up = -(-plan.train_on_newest // plan.num_envs) * plan.num_envs
        raise _error(plan, "train_on_newest", why, [up])
    if plan.last_minibatch != "carry":
        return
    of_one_size = not plan.prefill_is_iteration and not plan.prefill_in_first_batch
    if plan.minibatches_per_gradient_step != 1 or not of_one_size or not plan.is_exact:
        several = plan.minibatches_per_gradient_step != 1
        between = "accumulated gradients" if several else "batches of different sizes"
        why = f"cannot be combined with {between}"
        raise _error(plan, "last_minibatch", why, ["smaller", "merge", "drop"])


def _minibatch(plan: PlannedCounts) -> None:
    if plan.update_epochs is None or plan.collects_episodes or not plan.frames_per_batch:
        return
    first = plan.first_training_iteration
    batches = plan.rows(first), plan.rows(first + 1)
    length = plan.sequence_length or 1
    _sequences(plan, batches, length)
    rows = max(batches) // length
    if plan.minibatch_size is not None and plan.minibatch_size > rows:
        steps = plan.frames_per_batch // plan.num_envs
        sequences = f" / sequence_length={length}" if plan.sequence_length else ""
        why = (
            f"is larger than a batch of {rows} "
            f"(num_envs={plan.num_envs} x steps_per_env={steps}{sequences})"
        )
        raise _error(plan, "minibatch_size", why, [rows])


def _sequences(plan: PlannedCounts, batches: tuple[int, int], length: int) -> None:
    """Reject sequence lengths that would make sequences span two environments."""
    steps = sorted({rows // plan.num_envs for rows in batches})
    if not any(number % length for number in steps):
        return
    most = min(length, gcd(*steps))
    factor = next((n for n in range(most, max(most - 10_000, 1), -1) if gcd(*steps) % n == 0), 1)
    found = " or ".join(map(str, steps))
    why = f"does not divide the {found} policy steps per env in a batch"
    raise _error(plan, "sequence_length", why, [factor])


def _evaluation(plan: PlannedCounts) -> None:
    if plan.evaluation_every is not None and plan.evaluation_every_iterations is not None:
        why = (
            f"conflicts with evaluation_every={plan.evaluation_every}, because both set the period"
        )
        hint = "or omit evaluation_every"
        raise _error(plan, "evaluation_every_iterations", why, [None], hint)
