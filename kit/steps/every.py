"""Periodic events that are triggered at multiples of a period."""

from __future__ import annotations

from kit.steps.errors import whole_number


class Every:
    """Counts the multiples of ``period`` that a growing counter has crossed since the last call.

    Events occur at fixed counter values (``period``, ``2 * period``, ...). Therefore, they do not
    drift if the counter jumps, and a resumed run triggers the same events as an uninterrupted run.
    If the counter jumps over several multiples, the call returns their number.

    Args:
        period: distance between events, in units of the counter; ``None``: no events.
        start: initial value of the counter; earlier multiples are ignored.

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
        """Set the counter to ``count`` and return the number of crossed multiples."""
        crossed = multiples_crossed(self.period, self.last, count)
        self.last = max(self.last, count)
        return crossed

    def state_dict(self) -> dict[str, int]:
        """Return the last value of the counter."""
        return {"last": self.last}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self.last = int(state_dict["last"])


def multiples_crossed(period: int | None, before: int, now: int) -> int:
    """Return the number of multiples of ``period`` in ``(before, now]``, or 0 without a period."""
    if period is None:
        return 0
    return max(now // period - before // period, 0)
