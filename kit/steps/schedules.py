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

from kit.steps.errors import SettingError, real_number, whole_number

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """The same value for ever."""

    value: float
    """the value."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", real_number("value", self.value))

    def __call__(self, count: int) -> float:
        """The value, whatever ``count``."""
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
        value = self.between(count / self.duration)
        return min(max(value, min(self.start, self.end)), max(self.start, self.end))

    def between(self, progress: float) -> float:
        """The value at ``progress``, strictly between 0 and 1."""
        raise NotImplementedError


@dataclass(frozen=True)
class Linear(_Ramp):
    """A straight line from ``start`` to ``end``."""

    def between(self, progress: float) -> float:
        """Interpolate linearly."""
        return self.start + (self.end - self.start) * progress


@dataclass(frozen=True)
class Cosine(_Ramp):
    """Half a cosine from ``start`` to ``end`` (Loshchilov and Hutter 2017, eq. 5, one period)."""

    def between(self, progress: float) -> float:
        """Interpolate along a half cosine."""
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

    def between(self, progress: float) -> float:
        """Interpolate the logarithm linearly."""
        return math.exp(math.log(self.start) + math.log(self.end / self.start) * progress)


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


SCHEDULES: dict[str, Callable[[float, float, int], Schedule]] = {
    "constant": lambda start, end, duration: Constant(start),
    "linear": Linear,
    "cosine": Cosine,
    "exponential": Exponential,
}


def make_schedule(kind: str, start: float, end: float, duration: int) -> Schedule:
    """The schedule called ``kind``.

    Args:
        kind: ``"constant"``, ``"linear"``, ``"cosine"`` or ``"exponential"``.
        start: value when the counter is 0.
        end: value from ``duration`` on; ignored by ``"constant"``.
        duration: length of the ramp, in units of the counter.

    Raises:
        SettingError: if ``kind`` is unknown, or the numbers do not make such a schedule.
    """
    if kind not in SCHEDULES:
        raise SettingError("schedule", kind, "is not a schedule", sorted(SCHEDULES))
    return SCHEDULES[kind](start, end, max(duration, 1))
