"""Division of a collected batch into minibatches."""

from __future__ import annotations

from collections import Counter
from itertools import cycle, islice
from typing import Literal, NamedTuple

LastMinibatch = Literal["smaller", "merge", "drop", "carry"]
"""How to handle the leftover rows of a batch that do not fill a minibatch.

``smaller``: form a last, smaller minibatch. ``merge``: add them to the last full minibatch.
``drop``: omit them from this epoch. ``carry``: use them at the start of the next epoch, like
a sampler without replacement that is never reset.
"""


class Permutation(NamedTuple):
    """Minibatch sizes in one pass over a batch. The pass is repeated indefinitely."""

    minibatches: int
    """number of minibatches per pass."""
    size: int
    """number of rows in each minibatch except the last."""
    last: int
    """number of rows in the last minibatch."""

    def sizes(self, drawn: int, wanted: int) -> list[int]:
        """Return the sizes of ``wanted`` minibatches, skipping the first ``drawn`` minibatches.

        Examples:
            >>> permutation(40, 12, "carry").sizes(0, 6), permutation(40, 12, "carry").sizes(6, 6)
            ([12, 12, 12, 4, 12, 12], [12, 4, 12, 12, 12, 4])
        """
        if not self.minibatches:
            return []
        one = [self.size] * (self.minibatches - 1) + [self.last]
        start = drawn % self.minibatches
        return [*islice(cycle(one), start, start + wanted)]

    def counts(self, drawn: int, wanted: int) -> Counter[int]:
        """Return how often each size occurs in the list returned by :meth:`sizes`."""
        if not self.minibatches:
            return Counter()
        lasts = (drawn + wanted) // self.minibatches - drawn // self.minibatches
        counts = Counter({self.size: wanted - lasts})
        counts[self.last] += lasts
        return counts

    def rows(self, drawn: int) -> int:
        """Return the number of rows used after drawing ``drawn`` minibatches."""
        return sum(size * times for size, times in self.counts(0, drawn).items())


def permutation(rows: int, size: int, last: LastMinibatch) -> Permutation:
    """Return the division of ``rows`` rows into minibatches of ``size`` rows."""
    if last == "drop":
        return Permutation(rows // size, size, size)
    minibatches = -(-rows // size) if last != "merge" else max(rows // size, min(rows, 1))
    return Permutation(minibatches, size, rows - (minibatches - 1) * size)


def epoch_sizes(rows: int, size: int, last: LastMinibatch) -> list[int]:
    """Return the size of each minibatch in one pass over ``rows`` rows.

    Examples:
        >>> epoch_sizes(64, 20, "smaller")
        [20, 20, 20, 4]
        >>> epoch_sizes(64, 20, "merge"), epoch_sizes(64, 20, "drop")
        ([20, 20, 24], [20, 20, 20])
    """
    cut = permutation(rows, size, last)
    return cut.sizes(0, cut.minibatches)
