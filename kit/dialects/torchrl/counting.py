"""How TorchRL's trainer turns its settings into counts."""

from __future__ import annotations

from math import gcd
from typing import Any

from kit.dialects.torchrl.rules import RULE
from kit.dialects.torchrl.settings import RANDOM, WITHOUT, TorchRLSettings
from kit.steps.errors import SettingError, one_of, whole_number, yes_or_no
from kit.steps.plan import StepPlan

_CARRY = {"last_minibatch": "carry"}


def to_plan(trainer: TorchRLSettings) -> StepPlan:
    """The plan of resolved settings."""
    one_of("sampler", trainer.sampler, (RANDOM, WITHOUT))
    yes_or_no("iterate", trainer.iterate)
    yes_or_no("drop_last", trainer.drop_last)
    batch = trainer.collected
    iterations = -(-trainer.total_frames // (batch * trainer.frame_skip))
    if trainer.collector_total_frames not in (None, -1):
        own = whole_number("collector_total_frames", trainer.collector_total_frames)
        iterations = min(iterations, -(-own // batch))
    random, trains = _random_batches(trainer)
    return StepPlan(
        iterations=iterations,
        num_envs=trainer.num_envs,
        steps_per_env=batch // trainer.num_envs,
        action_repeat=trainer.frame_skip,
        max_episode_steps=trainer.max_episode_steps,
        random_steps=min(random, iterations) * batch,
        learning_starts=trains * batch if trains > 1 else 0,
        final_evaluation=False,
        **_updates(trainer, iterations, trains),
    )


def _random_batches(trainer: TorchRLSettings) -> tuple[int, int]:
    """Batches with random actions, and the first batch that is trained on."""
    if trainer.init_random_frames in (None, -1):
        return 0, 1
    asked = whole_number("init_random_frames", trainer.init_random_frames)
    trains = max(-(-asked // (trainer.collected * trainer.frame_skip)), 1)
    if trainer.version == "documented":
        return (trains if asked else 0), trains
    return -(-asked // trainer.collected), trains


def _updates(trainer: TorchRLSettings, iterations: int, first: int) -> dict[str, Any]:
    limit = trainer.optim_steps_per_batch
    if limit is None and trainer.version == "documented":
        limit = trainer.num_envs
    if trainer.sampler == RANDOM:
        if limit is None:
            raise SettingError(
                "optim_steps_per_batch", None, "never ends with a random sampler", [1]
            )
        return {
            "gradient_steps_per_iteration": limit * trainer.num_epochs,
            "minibatch_size": trainer.batch_size,
        }
    if limit is None and not trainer.iterate:
        raise SettingError("optim_steps_per_batch", None, "never ends without iterate", [1])
    assert trainer.buffer_size is not None
    if trainer.buffer_size > trainer.collected:
        return _growing(trainer, limit, iterations, first)
    return _without_replacement(trainer, limit)


def _growing(
    trainer: TorchRLSettings, limit: int | None, iterations: int, first: int
) -> dict[str, Any]:
    assert trainer.batch_size is not None
    assert trainer.buffer_size is not None
    held = [min(k * trainer.collected, trainer.buffer_size) for k in (first, first + 1, iterations)]
    return growing_updates(
        rows=held[:1] + held[1:] * (iterations > first),
        size=trainer.batch_size,
        buffer_size=trainer.buffer_size,
        epochs=trainer.num_epochs,
        limit=limit,
        iterate=bool(trainer.iterate),
        drop_last=trainer.drop_last,
    )


def _without_replacement(trainer: TorchRLSettings, limit: int | None) -> dict[str, Any]:
    assert trainer.batch_size is not None
    assert trainer.buffer_size is not None
    rows = min(trainer.collected, trainer.buffer_size)
    size = min(trainer.batch_size, rows)
    if trainer.drop_last and trainer.batch_size > rows:
        raise SettingError(
            "batch_size", trainer.batch_size, f"is more than the {rows} frames of a buffer", [rows]
        )
    made: dict[str, Any] = {
        "update_epochs": trainer.num_epochs,
        "minibatch_size": size,
        "minibatches_per_epoch": limit or None,
        "last_minibatch": "drop" if trainer.drop_last else "smaller",
        "train_on_newest": rows if rows < trainer.collected else None,
    }
    if limit == 0:
        return made | {"update_epochs": 0}
    available = rows // size if trainer.drop_last else -(-rows // size)
    if trainer.iterate and (limit is None or limit > available):
        return made | {"minibatches_per_epoch": None}
    if trainer.iterate:
        return made | {"counting": "torchrl"}
    return made | ({"counting": "torchrl:sample"} if trainer.drop_last else _CARRY)


def growing_updates(
    *,
    rows: list[int],
    size: int,
    buffer_size: int,
    epochs: int,
    limit: int | None,
    iterate: bool,
    drop_last: bool,
) -> dict[str, Any]:
    """The settings of a plan that samples a growing buffer without replacement.

    Args:
        rows: transitions in the buffer in the first two training iterations, and in the last.
        size: transitions in a minibatch.
        buffer_size: transitions that the buffer holds.
        epochs: epochs of one iteration.
        limit: minibatches of one epoch, at most; ``None``: as many as there are.
        iterate: whether an epoch ends with the permutation.
        drop_last: whether a smaller minibatch is dropped.

    Raises:
        SettingError: if the library fails, or makes minibatches of several sizes.
    """
    if drop_last and size > min(rows):
        raise SettingError(
            "batch_size", size, f"is more than the {min(rows)} frames of a buffer", [min(rows)]
        )
    if not drop_last and any(number % size for number in rows):
        raise SettingError(
            "batch_size",
            size,
            f"does not divide what a growing buffer holds ({', '.join(map(str, rows))}, ...): "
            "minibatches would be of several sizes, sampled from a buffer",
            [gcd(*rows)],
            "or drop_last=True",
        )
    most = buffer_size // size
    limit = most + 1 if limit is None else min(limit, most + 1)
    made: dict[str, Any] = {"minibatch_size": size, "gradient_steps_per_iteration": epochs * limit}
    if iterate and epochs and limit:
        made["gradient_steps_per_iteration"] = epochs * min(limit, most)
        made["counting"] = f"{RULE}:{buffer_size},{epochs},{limit}"
    return made
