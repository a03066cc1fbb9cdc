"""Values that change with a counter: learning rates, clip ranges, exploration noise.

A schedule is a function of one counter (policy steps, gradient steps, iterations: whichever the
user feeds it). It starts at ``start`` when the counter is 0, is exactly ``end`` when the counter
reaches ``duration``, and stays there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kit.steps.errors import SettingError, nearest_first, real_number, show, whole_number

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same value for ever."""

    value: float
    """the value."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", real_number("value", self.value))

    def __call__(self, count: int) -> float:
        """The value at ``count``."""
        return self.value


@dataclass(frozen=True)
class _Ramp:
    """From ``start`` to ``end`` while the counter goes from 0 to ``duration``."""

    start: float
    """value when the counter is 0."""
    end: float
    """value when the counter reaches ``duration``, and from then on."""
    duration: int
    """length of the ramp, in units of the counter, at least 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", real_number("start", self.start))
        object.__setattr__(self, "end", real_number("end", self.end))
        whole_number("duration", self.duration, at_least=1)

    def __call__(self, count: int) -> float:
        """The value at ``count``."""
        if count <= 0:
            return self.start
        if count >= self.duration:
            return self.end
        value = self._between(count / self.duration)
        return min(max(value, min(self.start, self.end)), max(self.start, self.end))

    def _between(self, progress: float) -> float:
        """The value at ``progress``, strictly between 0 and 1."""
        raise NotImplementedError


@dataclass(frozen=True)
class Linear(_Ramp):
    """A straight line from ``start`` to ``end``."""

    def _between(self, progress: float) -> float:
        return self.start + (self.end - self.start) * progress


@dataclass(frozen=True)
class Cosine(_Ramp):
    """Half a cosine from ``start`` to ``end`` (Loshchilov and Hutter 2017, eq. 5, one period)."""

    def _between(self, progress: float) -> float:
        return self.end + 0.5 * (self.start - self.end) * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Exponential(_Ramp):
    """A constant factor per unit of the counter, from ``start`` to ``end``, both positive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, value in (("start", self.start), ("end", self.end)):
            if value <= 0:
                works = "use a positive value, or the linear schedule"
                raise SettingError(field, value, "cannot be reached by a constant factor", works)

    def _between(self, progress: float) -> float:
        return math.exp(math.log(self.start) + math.log(self.end / self.start) * progress)


@dataclass(frozen=True)
class Decay:
    """What lies above ``end`` has a constant factor per unit of the counter."""

    start: float
    """value when the counter is 0."""
    factor: float
    """distance from ``end`` at a count over that at the count before."""
    end: float = 0.0
    """value that is approached."""
    begin: int = 0
    """count until which the value stays at ``start``."""

    def __post_init__(self) -> None:
        for field in ("start", "factor", "end"):
            object.__setattr__(self, field, real_number(field, getattr(self, field)))
        whole_number("begin", self.begin)

    def __call__(self, count: int) -> float:
        """The value at ``count``."""
        return self.end + (self.start - self.end) * self.factor ** max(count - self.begin, 0)


@dataclass(frozen=True)
class Piecewise:
    """Constant pieces: ``values[i]`` from ``boundaries[i - 1]`` on, up to ``boundaries[i]``."""

    boundaries: Sequence[int]
    """counts at which the value changes, increasing."""
    values: Sequence[float]
    """one value more than there are boundaries."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        object.__setattr__(self, "values", tuple(real_number("values", v) for v in self.values))
        if len(self.values) != len(self.boundaries) + 1:
            why = f"has {len(self.values)} values for {len(self.boundaries)} boundaries"
            works = f"give {len(self.boundaries) + 1} values"
            raise SettingError("values", self.values, why, works)
        if any(a >= b for a, b in zip(self.boundaries, self.boundaries[1:])):
            raise SettingError("boundaries", self.boundaries, "does not increase", "sort it")

    def __call__(self, count: int) -> float:
        """The value at ``count``."""
        return self.values[bisect_right(self.boundaries, count)]


@dataclass(frozen=True)
class Warmup:
    """A schedule times a factor that rises from 0 to 1 at first."""

    schedule: Schedule
    """value by counter, without the factor."""
    duration: int
    """count at which the factor reaches 1, at least 1."""

    def __post_init__(self) -> None:
        whole_number("duration", self.duration, at_least=1)

    def __call__(self, count: int) -> float:
        """The value at ``count``."""
        return self.schedule(count) * min(max(count, 0) / self.duration, 1.0)


SCHEDULES: dict[str, Callable[[float, float, int], Schedule]] = {
    "constant": lambda start, end, duration: Constant(start),
    "linear": Linear,
    "cosine": Cosine,
    "exponential": Exponential,
}

_OF_SHARES = ("warmup 0.1 linear", "piecewise 0.5 0.1")


def make_schedule(
    kind: str, start: float, end: float, duration: int, field: str = "schedule"
) -> Schedule:
    """The schedule called ``kind``.

    Args:
        kind: ``"constant"``, ``"linear"``, ``"cosine"`` or ``"exponential"``; one of these after
            ``"warmup SHARE"``, in which it rises from 0 (``"warmup 0.1 cosine"``); or
            ``"piecewise SHARE FACTOR SHARE FACTOR ..."``, the start value times a factor from each
            share of the duration on (``"piecewise 0.5 0.1 0.75 0.01"``); no factor is negative.
        start: value when the counter is 0.
        end: value from ``duration`` on; ignored by ``"constant"`` and ``"piecewise"``.
        duration: length of the ramp, in units of the counter.
        field: name of the setting, for the error.

    Raises:
        SettingError: if ``kind`` is unknown, or the numbers do not make such a schedule.
    """
    try:
        return _named(kind, start, end, max(duration, 1), field)
    except SettingError as error:
        if error.field == field:
            raise
        why = f"makes {error.field}={show(error.value)}, which {error.why}"
        raise SettingError(field, kind, why, error.works) from None


def _named(kind: str, start: float, end: float, duration: int, field: str) -> Schedule:
    name, *words = kind.split() or [""]
    if name == "warmup":
        (share,) = _shares(field, kind, words[:1])
        inner = make_schedule(" ".join(words[1:]) or "constant", start, end, duration, field)
        return Warmup(inner, max(round(share * duration), 1))
    if name == "piecewise":
        shares = _shares(field, kind, words[::2])
        factors = [real_number("factor", _number(w), 0.0) for w in words[1::2]]
        boundaries = [round(share * duration) for share in shares]
        return Piecewise(boundaries, [start, *(start * factor for factor in factors)])
    if kind not in SCHEDULES:
        ramps = [name for name in sorted(SCHEDULES) if name != "exponential" or end > 0]
        works = [*ramps, *_OF_SHARES]
        raise SettingError(field, kind, "is not a schedule", nearest_first(kind, works))
    return SCHEDULES[kind](start, end, duration)


def _shares(field: str, kind: str, words: Sequence[str]) -> list[float]:
    """Shares of a run, in (0, 1)."""
    shares = [_number(word) for word in words]
    if not shares or not all(0 < share < 1 for share in shares):
        why = "has a share of the run that is not between 0 and 1"
        raise SettingError(field, kind, why, _OF_SHARES)
    return shares


def _number(word: str) -> float:
    """The number of a word; NaN, which is refused, if it is none."""
    try:
        return float(word)
    except ValueError:
        return math.nan
