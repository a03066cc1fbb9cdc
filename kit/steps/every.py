"""A cadence: something that happens once per so many steps of a counter."""

from __future__ import annotations

from kit.steps.errors import whole_number


class Every:
    """Says how many multiples of ``period`` a growing counter has crossed since the last call.

    Multiples are those of the counter itself (``period``, ``2 * period``, ...), not distances from
    the previous firing, so the cadence does not drift when the counter jumps, and a run that is
    resumed fires where the uninterrupted run would have fired. A jump over several multiples
    returns their number; ``if every(count)`` acts once for such a jump.

    Args:
        period: distance between two firings, in units of the counter. ``None`` never fires.
        start: value of the counter at which counting begins; multiples up to it are past.

    Raises:
        SettingError: if ``period`` is not a whole number of at least 1.

    Examples:
        >>> every = Every(10)
        >>> [every(count) for count in (4, 9, 10, 35, 39, 40)]
        [0, 0, 1, 2, 0, 1]
    """

    def __init__(self, period: int | None, start: int = 0) -> None:
        self.period = None if period is None else whole_number("period", period, at_least=1)
        self.last = whole_number("start", start)

    def __call__(self, count: int) -> int:
        """Move the counter to ``count`` and return how many multiples were crossed."""
        crossed = multiples_crossed(self.period, self.last, count)
        self.last = max(self.last, count)
        return crossed

    def state_dict(self) -> dict[str, int]:
        """Return the last value of the counter that was seen."""
        return {"last": self.last}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore a state of :meth:`state_dict`."""
        self.last = int(state_dict["last"])


def multiples_crossed(period: int | None, before: int, now: int) -> int:
    """Return how many multiples of ``period`` lie in ``(before, now]``; none for ``None``."""
    if period is None:
        return 0
    return max(now // period - before // period, 0)
