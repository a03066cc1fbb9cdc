"""How a collected batch is cut into minibatches, and what happens to the rows left over."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Literal, get_args

LastMinibatch = Literal["smaller", "merge", "drop", "carry"]
"""What becomes of the rows that do not fill a minibatch.

``smaller``: they make a last, smaller minibatch. ``merge``: they join the last full minibatch.
``drop``: they are not trained on in this epoch. ``carry``: they open the next epoch, and an epoch
is as many minibatches as are full (a sampler without replacement that is never reset).
"""

LAST_MINIBATCH: tuple[str, ...] = get_args(LastMinibatch)


def minibatches_per_epoch(rows: int, size: int, last: LastMinibatch) -> int:
    """Return how many minibatches of ``size`` one pass over ``rows`` makes."""
    if rows == 0:
        return 0
    if last == "smaller":
        return -(-rows // size)
    if last == "merge":
        return max(rows // size, 1)
    return rows // size


def epoch_sizes(rows: int, size: int, last: LastMinibatch) -> list[int]:
    """Return the minibatch sizes of one pass over ``rows``; for ``carry``, of a whole permutation.

    Examples:
        >>> epoch_sizes(64, 20, "smaller"), epoch_sizes(64, 20, "merge"), epoch_sizes(64, 20, "drop")
        ([20, 20, 20, 4], [20, 20, 24], [20, 20, 20])
    """
    if rows == 0:
        return []
    full, left = divmod(rows, size)
    if last == "merge":
        return [size] * (full - 1) + [size + left] if full else [rows]
    if last == "drop" or not left:
        return [size] * full
    return [size] * full + [left]


def iteration_sizes(
    rows: int, size: int, last: LastMinibatch, epochs: int, minibatches_before: int = 0
) -> list[int]:
    """Return the minibatch sizes of all epochs of one iteration, in order.

    Args:
        rows: transitions in the collected batch.
        size: transitions asked for in a minibatch.
        last: what becomes of the rows left over.
        epochs: passes over the batch.
        minibatches_before: minibatches already drawn in the run; only ``carry`` depends on it.
    """
    one_pass = epoch_sizes(rows, size, last)
    if last != "carry" or not one_pass:
        return one_pass * epochs
    wanted = epochs * minibatches_per_epoch(rows, size, last)
    return list(islice(_endless(one_pass, minibatches_before), wanted))


def _endless(one_pass: list[int], start: int) -> Iterator[int]:
    position = start % len(one_pass)
    while True:
        yield one_pass[position]
        position = (position + 1) % len(one_pass)
