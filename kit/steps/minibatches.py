"""The cut of a collected batch into minibatches, and the rows left over."""

from __future__ import annotations

from collections import Counter
from itertools import cycle, islice
from typing import Literal, NamedTuple

LastMinibatch = Literal["smaller", "merge", "drop", "carry"]
"""What becomes of the rows that do not fill a minibatch.

``smaller``: they make a last, smaller minibatch. ``merge``: they join the last full minibatch.
``drop``: they are not trained on in this epoch. ``carry``: they open the next epoch, and an epoch
is as many minibatches as are full (a sampler without replacement that is never reset).
"""


class Permutation(NamedTuple):
    """The minibatches of one pass over a batch, and of a sampler that repeats it without end."""

    minibatches: int
    """number of minibatches."""
    size: int
    """rows of each but the last."""
    last: int
    """rows of the last."""

    def sizes(self, drawn: int, wanted: int) -> list[int]:
        """Rows of each of the ``wanted`` minibatches after the first ``drawn``.

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
        """The number of :meth:`sizes` of each size."""
        if not self.minibatches:
            return Counter()
        lasts = (drawn + wanted) // self.minibatches - drawn // self.minibatches
        counts = Counter({self.size: wanted - lasts})
        counts[self.last] += lasts
        return counts

    def rows(self, drawn: int) -> int:
        """Rows in the first ``drawn`` minibatches."""
        return sum(size * times for size, times in self.counts(0, drawn).items())


def permutation(rows: int, size: int, last: LastMinibatch) -> Permutation:
    """The minibatches of ``size`` of one pass over ``rows``; all of them also for ``carry``."""
    if last == "drop":
        return Permutation(rows // size, size, size)
    minibatches = -(-rows // size) if last != "merge" else max(rows // size, min(rows, 1))
    return Permutation(minibatches, size, rows - (minibatches - 1) * size)


def epoch_sizes(rows: int, size: int, last: LastMinibatch) -> list[int]:
    """Rows of each minibatch of one pass over ``rows``; for ``carry``, of a whole permutation.

    Examples:
        >>> epoch_sizes(64, 20, "smaller")
        [20, 20, 20, 4]
        >>> epoch_sizes(64, 20, "merge"), epoch_sizes(64, 20, "drop")
        ([20, 20, 24], [20, 20, 20])
    """
    cut = permutation(rows, size, last)
    return cut.sizes(0, cut.minibatches)
