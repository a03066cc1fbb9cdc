"""Checks that make a plan consistent before anything is computed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from kit.steps.counting import counting_rule
from kit.steps.counts import PlannedCounts
from kit.steps.errors import SettingError, one_of, whole_number, yes_or_no
from kit.steps.minibatches import LAST_MINIBATCH
from kit.steps.ratio import as_fraction

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
    "minibatches_per_epoch",
    "minibatches_per_gradient_step",
    "train_on_newest",
    "sequence_length",
    "evaluation_every",
    "evaluation_every_iterations",
)
_ZERO_OR_NONE = ("steps_per_env", "update_epochs", "gradient_steps_per_iteration")
_YES_OR_NO = (
    "prefill_random",
    "prefill_is_iteration",
    "prefill_in_first_batch",
    "evaluation_before_update",
    "final_evaluation",
)
LARGEST_RATIO = 10**9
"""Gradient steps per policy step that are accepted at most."""


def complete(plan: PlannedCounts) -> None:
    """Check every field of ``plan`` and fill in those that follow from others.

    Raises:
        SettingError: at the first field that cannot work.
    """
    _numbers(plan)
    _collection(plan)
    _updates(plan)
    _offline(plan)
    _vector_steps(plan, "prefill_steps")
    _budget(plan)
    _before_learning(plan)
    _batch(plan)
    _minibatch(plan)
    _counting(plan)
    _evaluation(plan)


def _set(plan: PlannedCounts, field: str, value: Any) -> None:
    object.__setattr__(plan, field, value)


def _numbers(plan: PlannedCounts) -> None:
    for field in _AT_LEAST_ONE:
        _set(plan, field, whole_number(field, getattr(plan, field), 1))
    for field in _AT_LEAST_ZERO:
        _set(plan, field, whole_number(field, getattr(plan, field)))
    for fields, smallest in ((_ONE_OR_NONE, 1), (_ZERO_OR_NONE, 0)):
        for field in fields:
            value = getattr(plan, field)
            if value is not None:
                _set(plan, field, whole_number(field, value, smallest))
    for field in _YES_OR_NO:
        yes_or_no(field, getattr(plan, field))
    one_of("rounding", plan.rounding, ("error", "down", "up"))
    one_of("last_minibatch", plan.last_minibatch, LAST_MINIBATCH)
    if not isinstance(plan.asked, dict):
        raise SettingError("asked", plan.asked, "is no dict of settings", "leave it out")


def _collection(plan: PlannedCounts) -> None:
    if plan.collects_episodes:
        if plan.steps_per_env == 1:
            _set(plan, "steps_per_env", None)
        if plan.steps_per_env is not None:
            raise SettingError(
                "steps_per_env",
                plan.steps_per_env,
                "contradicts min_episodes and min_steps, which collect whole episodes",
                [None],
            )
    elif plan.steps_per_env is None:
        raise SettingError("steps_per_env", None, "leaves open what to collect", [1])
    elif plan.episode_length is not None:
        raise SettingError(
            "episode_length",
            plan.episode_length,
            "means nothing where an iteration collects a number of steps",
            [None],
            "or collect whole episodes with min_episodes or min_steps",
        )
    if plan.prefill_is_iteration and not plan.prefill_steps:
        raise SettingError(
            "prefill_is_iteration", True, "needs prefill_steps", [False], "or give prefill_steps"
        )


def _updates(plan: PlannedCounts) -> None:
    if plan.replay_ratio is not None:
        ratio = as_fraction("replay_ratio", plan.replay_ratio)
        if ratio > LARGEST_RATIO:
            raise SettingError(
                "replay_ratio",
                plan.replay_ratio,
                "is more gradient steps per policy step than any run makes",
                [LARGEST_RATIO],
            )
        _set(plan, "replay_ratio", ratio)
    rules = ("update_epochs", "replay_ratio", "gradient_steps_per_iteration")
    given = [rule for rule in rules if getattr(plan, rule) is not None]
    if len(given) > 1:
        raise SettingError(
            given[1],
            _plain(getattr(plan, given[1])),
            f"contradicts {given[0]}={_plain(getattr(plan, given[0]))}: both say how many gradient "
            "steps",
            [None],
            f"or leave out {given[0]}",
        )
    if not isinstance(plan.counting, str):
        raise SettingError("counting", plan.counting, "is not a counting rule", ["exact"])


def _offline(plan: PlannedCounts) -> None:
    """Refuse settings that count policy steps where ``steps_per_env=0`` collects none."""
    if not plan.offline:
        return
    for field in ("update_epochs", "replay_ratio"):
        if getattr(plan, field) is not None:
            raise SettingError(
                field,
                _plain(getattr(plan, field)),
                "counts collected policy steps, and steps_per_env=0 (offline) collects none",
                [None],
                "give gradient_steps_per_iteration",
            )
    for field in ("prefill_steps", "learning_starts", "random_steps", "exploration_steps"):
        if getattr(plan, field):
            raise SettingError(
                field,
                getattr(plan, field),
                "is never reached: steps_per_env=0 (offline) collects nothing",
                [0],
            )


def _counting(plan: PlannedCounts) -> None:
    """Refuse a counting rule that does not exist, or lacks what it needs."""
    if plan.counting != "exact":
        counting_rule(plan.counting)(plan)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Fraction) else value


def _budget(plan: PlannedCounts) -> None:
    """Derive iterations from the total, or the other way; refuse a total that does not divide."""
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


def _iterations(plan: PlannedCounts) -> int:
    each = plan.policy_steps_per_iteration
    before = 1 if plan.prefill_is_iteration else 0
    first = plan.policy_steps_after(before)
    if each == 0:
        raise SettingError("iterations", None, "is open where nothing is collected", [1])
    down, left = divmod(plan.total_policy_steps - first, each)
    if not left and down >= 0:
        return down + before
    if plan.rounding == "error":
        prefill = f" after {first} of prefill" if first else ""
        raise SettingError(
            "total_policy_steps",
            plan.total_policy_steps,
            f"is not a whole number of iterations of {each} policy steps{prefill}",
            sorted({first + n * each for n in (max(down, 1), max(down + 1, 1))}),
            "or rounding='down' or 'up'",
        )
    rounded = max(down, 0) if plan.rounding == "down" else max(down + 1, 0)
    _round(plan, "total_policy_steps", first + rounded * each)
    return rounded + before


def _round(plan: PlannedCounts, field: str, value: int) -> None:
    _set(plan, "asked", {**plan.asked, field: getattr(plan, field)})
    _set(plan, field, value)


def _before_learning(plan: PlannedCounts) -> None:
    _vector_steps(plan, "learning_starts")
    if plan.random_steps is None:
        off_policy = plan.replay_ratio is not None or plan.gradient_steps_per_iteration is not None
        _set(plan, "random_steps", plan.learning_starts if off_policy else 0)
    _set(plan, "random_steps", whole_number("random_steps", plan.random_steps))
    _vector_steps(plan, "random_steps")


def _vector_steps(plan: PlannedCounts, field: str) -> None:
    """Refuse or round a number of policy steps that all envs together cannot take."""
    unit = plan.world_size * (1 if plan.collects_episodes else plan.num_envs)
    value = getattr(plan, field)
    if value % unit == 0:
        return
    down, up = value // unit * unit, -(-value // unit) * unit
    if plan.rounding == "error":
        raise SettingError(
            field,
            value,
            f"is not a multiple of the {unit} policy steps that all envs take at once",
            [down, up],
        )
    _round(plan, field, down if plan.rounding == "down" else up)


def _batch(plan: PlannedCounts) -> None:
    """Refuse settings of an on-policy batch where there is none, or that contradict it."""
    if plan.update_epochs is None:
        for field in ("minibatches_per_epoch", "train_on_newest", "prefill_in_first_batch"):
            if getattr(plan, field):
                nothing = False if field == "prefill_in_first_batch" else None
                raise SettingError(
                    field,
                    getattr(plan, field),
                    "means nothing without update_epochs, passes over a collected batch",
                    [nothing],
                )
        return
    if plan.prefill_in_first_batch and not plan.prefill_steps:
        raise SettingError("prefill_in_first_batch", True, "needs prefill_steps", [False])
    if plan.train_on_newest and plan.train_on_newest % plan.num_envs:
        up = -(-plan.train_on_newest // plan.num_envs) * plan.num_envs
        raise SettingError(
            "train_on_newest",
            plan.train_on_newest,
            f"is not the same for each of the num_envs={plan.num_envs} envs",
            [up],
        )
    if plan.last_minibatch == "carry":
        _carry(plan)


def _carry(plan: PlannedCounts) -> None:
    """What is carried over needs batches of one size, and one minibatch per gradient step."""
    why = None
    if plan.minibatches_per_gradient_step != 1:
        why = "cannot be carried over between accumulated gradients"
    elif plan.prefill_is_iteration or plan.prefill_in_first_batch or not plan.is_exact:
        why = "cannot be carried over between batches of different sizes"
    if why:
        raise SettingError("last_minibatch", "carry", why, ["smaller", "merge", "drop"])


def _minibatch(plan: PlannedCounts) -> None:
    if plan.update_epochs is None or plan.collects_episodes or not plan.frames_per_batch:
        return
    if plan.sequence_length:
        _whole_sequences(plan)
    rows = max(plan.rows(1), plan.rows(2)) // (plan.sequence_length or 1)
    if plan.minibatch_size is not None and plan.minibatch_size > rows:
        sequences = f" / sequence_length={plan.sequence_length}" if plan.sequence_length else ""
        raise SettingError(
            "minibatch_size",
            plan.minibatch_size,
            f"is larger than the {rows} of one batch "
            f"(num_envs={plan.num_envs} x steps_per_env={plan.steps_per_env}{sequences})",
            [rows],
        )


def _whole_sequences(plan: PlannedCounts) -> None:
    steps, length = plan.steps_per_env, plan.sequence_length
    assert steps is not None
    assert length is not None
    if steps % length:
        below = range(min(length, steps), max(min(length, steps) - 10_000, 1), -1)
        factors = [next((n for n in below if steps % n == 0), 1)]
        raise SettingError(
            "sequence_length",
            length,
            f"does not divide the steps_per_env={steps} of a batch into whole sequences",
            factors,
        )


def _evaluation(plan: PlannedCounts) -> None:
    if plan.evaluation_every is not None and plan.evaluation_every_iterations is not None:
        raise SettingError(
            "evaluation_every_iterations",
            plan.evaluation_every_iterations,
            f"contradicts evaluation_every={plan.evaluation_every}: both say when to evaluate",
            [None],
            "or leave out evaluation_every",
        )
    if plan.evaluation_before_update and plan.evaluation_every_iterations is None:
        raise SettingError(
            "evaluation_before_update",
            True,
            "needs evaluation_every_iterations",
            [False],
            "or give evaluation_every_iterations",
        )
