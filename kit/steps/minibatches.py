"""The cut of a collected batch into minibatches, and the rows left over."""

from __future__ import annotations

from collections import Counter
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
        >>> epoch_sizes(64, 20, "smaller")
        [20, 20, 20, 4]
        >>> epoch_sizes(64, 20, "merge"), epoch_sizes(64, 20, "drop")
        ([20, 20, 24], [20, 20, 20])
    """
    if rows == 0:
        return []
    full, left = divmod(rows, size)
    if last == "merge":
        return [size] * (full - 1) + [size + left] if full else [rows]
    if last == "drop" or not left:
        return [size] * full
    return [size] * full + [left]


def epoch_rows(rows: int, size: int, last: LastMinibatch, limit: int | None) -> int:
    """Return how many of ``rows`` one pass of at most ``limit`` minibatches trains on."""
    available = minibatches_per_epoch(rows, size, last)
    if limit is not None and limit < available:
        return limit * size
    return rows // size * size if last == "drop" else rows


def carried_sizes(rows: int, size: int, last: LastMinibatch, drawn: int, wanted: int) -> list[int]:
    """Return the sizes of the next minibatches of a sampler that is never reset.

    Args:
        rows: transitions in the batch, the same in every iteration.
        size: transitions asked for in a minibatch.
        last: what becomes of the rows left over at the end of each permutation.
        drawn: minibatches already drawn in the run.
        wanted: minibatches to draw.

    Examples:
        >>> carried_sizes(40, 12, "carry", 0, 6), carried_sizes(40, 12, "carry", 6, 6)
        ([12, 12, 12, 4, 12, 12], [12, 4, 12, 12, 12, 4])
    """
    permutation = epoch_sizes(rows, size, last)
    if not permutation:
        return []
    start = drawn % len(permutation)
    endless = permutation * (-(-(start + wanted) // len(permutation)))
    return endless[start : start + wanted]


def carried_counts(
    rows: int, size: int, last: LastMinibatch, drawn: int, wanted: int
) -> Counter[int]:
    """Return how many of the :func:`carried_sizes` there are of each size."""
    permutation, smallest = _permutation(rows, size, last)
    if not permutation:
        return Counter()
    lasts = (drawn + wanted) // permutation - drawn // permutation
    counts = Counter({size: wanted - lasts})
    counts[smallest] += lasts
    return counts


def carried_total(rows: int, size: int, last: LastMinibatch, drawn: int) -> int:
    """Return the rows in the first ``drawn`` minibatches of a sampler that is never reset."""
    permutation, _ = _permutation(rows, size, last)
    if not permutation:
        return 0
    passes, rest = divmod(drawn, permutation)
    return passes * epoch_rows(rows, size, last, None) + rest * size


def _permutation(rows: int, size: int, last: LastMinibatch) -> tuple[int, int]:
    """Minibatches of a whole permutation, and the size of its last one."""
    minibatches = minibatches_per_epoch(rows, size, "smaller" if last == "carry" else last)
    return minibatches, epoch_rows(rows, size, last, None) - (minibatches - 1) * size
