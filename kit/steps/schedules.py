"""Schedules of values such as learning rates, clip ranges and exploration noise.

A schedule is a function of one counter, for example policy steps, gradient steps or iterations.
Linear, cosine and exponential schedules equal ``start`` at count 0 and exactly ``end`` from count
``duration`` onwards.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kit.steps.errors import SettingError, nearest_first, real_number, show, whole_number

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """Constant schedule."""

    value: float
    """value of the schedule at every count."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", real_number("value", self.value))

    def __call__(self, count: int) -> float:
        """Return the value at ``count``."""
        return self.value


@dataclass(frozen=True)
class _Ramp:
    """Base class for schedules from ``start`` at count 0 to ``end`` at count ``duration``."""

    start: float
    """value when the counter is 0."""
    end: float
    """final value, used once the counter reaches ``duration``."""
    duration: int
    """length of the ramp, in units of the counter, at least 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", real_number("start", self.start))
        object.__setattr__(self, "end", real_number("end", self.end))
        whole_number("duration", self.duration, at_least=1)

    def __call__(self, count: int) -> float:
        """Return the value at ``count``."""
        if count <= 0:
            return self.start
        if count >= self.duration:
            return self.end
        value = self._between(count / self.duration)
        return min(max(value, min(self.start, self.end)), max(self.start, self.end))

    def _between(self, progress: float) -> float:
        """Return the value at ``progress``, which is strictly between 0 and 1."""
        raise NotImplementedError


@dataclass(frozen=True)
class Linear(_Ramp):
    """Linear schedule from ``start`` to ``end``."""

    def _between(self, progress: float) -> float:
        return self.start + (self.end - self.start) * progress


@dataclass(frozen=True)
class Cosine(_Ramp):
    """Cosine schedule from ``start`` to ``end`` (Loshchilov and Hutter 2017, eq. 5, one period)."""

    def _between(self, progress: float) -> float:
        return self.end + 0.5 * (self.start - self.end) * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Exponential(_Ramp):
    """Exponential schedule from ``start`` to ``end``, which must both be positive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, value in (("start", self.start), ("end", self.end)):
            if value <= 0:
                works = "use a positive value, or the linear schedule"
                raise SettingError(field, value, "must be positive (exponential schedule)", works)

    def _between(self, progress: float) -> float:
        return math.exp(math.log(self.start) + math.log(self.end / self.start) * progress)


@dataclass(frozen=True)
class Decay:
    """Exponential decay from ``start`` towards ``end``."""

    start: float
    """value when the counter is 0."""
    factor: float
    """factor by which the distance from ``end`` is multiplied per unit of the counter."""
    end: float = 0.0
    """limit that the value approaches."""
    begin: int = 0
    """count at which the decay starts."""
    every: Fraction = Fraction(1)
    """counts per multiplication; less than 1 for several multiplications per count."""

    def __post_init__(self) -> None:
        for field in ("start", "factor", "end"):
            object.__setattr__(self, field, real_number(field, getattr(self, field)))
        whole_number("begin", self.begin)
        if self.every <= 0:
            raise SettingError("every", self.every, "must be positive", [Fraction(1)])

    def __call__(self, count: int) -> float:
        """Return the value at ``count``."""
        return self.end + (self.start - self.end) * self.factor ** (
            max(count - self.begin, 0) // self.every
        )


@dataclass(frozen=True)
class Piecewise:
    """Piecewise constant schedule with the value ``values[i]`` before count ``boundaries[i]``."""

    boundaries: Sequence[int]
    """increasing counts at which the value changes."""
    values: Sequence[float]
    """values of the pieces; there is one more value than there are boundaries."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        object.__setattr__(self, "values", tuple(real_number("values", v) for v in self.values))
        if len(self.values) != len(self.boundaries) + 1:
            why = f"has {len(self.values)} values for {len(self.boundaries)} boundaries"
            works = f"use {len(self.boundaries) + 1} values"
            raise SettingError("values", self.values, why, works)
        if any(a >= b for a, b in zip(self.boundaries, self.boundaries[1:])):
            raise SettingError("boundaries", self.boundaries, "must increase", "sort them")

    def __call__(self, count: int) -> float:
        """Return the value at ``count``."""
        return self.values[bisect_right(self.boundaries, count)]


@dataclass(frozen=True)
class Warmup:
    """Schedule multiplied by a warm-up factor that rises linearly from 0 to 1."""

    schedule: Schedule
    """schedule to which the warm-up is applied."""
    duration: int
    """count at which the warm-up ends, at least 1."""

    def __post_init__(self) -> None:
        whole_number("duration", self.duration, at_least=1)

    def __call__(self, count: int) -> float:
        """Return the value at ``count``."""
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
    """Create a schedule from its name.

    Args:
        kind: one of

            - ``"constant"``, ``"linear"``, ``"cosine"`` or ``"exponential"``;
            - ``"warmup SHARE NAME"``: schedule ``NAME``, multiplied by a linear warm-up during a
              share of the duration, as in ``"warmup 0.1 cosine"``;
            - ``"piecewise SHARE FACTOR SHARE FACTOR ..."``: ``start``, multiplied by a factor (at
              least 0) after each share of the duration, as in ``"piecewise 0.5 0.1 0.75 0.01"``;
            - ``"exponential FACTOR [EVERY]"``: ``start``, multiplied by a factor (at least 0) once
              per ``EVERY`` counts, as in ``"exponential 0.99"`` or ``"exponential 0.99 1/3"``.
        start: value when the counter is 0.
        end: final value, used once the counter reaches ``duration``; ignored by ``"constant"``,
            ``"piecewise"`` and ``"exponential FACTOR"``.
        duration: length of the ramp, in units of the counter.
        field: name of the setting, used in the error message.

    Raises:
        SettingError: if ``kind`` is unknown or contains invalid numbers.
    """
    try:
        return _named(kind, start, end, max(duration, 1), field)
    except SettingError as error:
        if error.field == field:
            raise
        why = f"uses {error.field}={show(error.value)}, which {error.why}"
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
    if name == "exponential" and words:
        factor = real_number("factor", _number(words[0]), 0.0)
        return Decay(start, factor, every=_every(field, kind, words[1:]))
    if kind not in SCHEDULES:
        ramps = [name for name in sorted(SCHEDULES) if name != "exponential" or end > 0]
        works = [*ramps, *_OF_SHARES]
        raise SettingError(field, kind, "is not a schedule", nearest_first(kind, works))
    return SCHEDULES[kind](start, end, duration)


def _shares(field: str, kind: str, words: Sequence[str]) -> list[float]:
    """Parse shares of a run, which must be in (0, 1)."""
    shares = [_number(word) for word in words]
    if not shares or not all(0 < share < 1 for share in shares):
        why = "needs shares of the run between 0 and 1"
        raise SettingError(field, kind, why, _OF_SHARES)
    return shares


def _every(field: str, kind: str, words: Sequence[str]) -> Fraction:
    """Parse the optional number of counts per multiplication, such as ``5`` or ``1/3``."""
    try:
        (every,) = [Fraction(word) for word in words] or [Fraction(1)]
    except (ValueError, ZeroDivisionError):
        works = ["exponential 0.99", "exponential 0.99 5"]
        raise SettingError(field, kind, "needs a factor and a period", works) from None
    return every


def _number(word: str) -> float:
    """Parse a number. If ``word`` is not a number, return NaN, which is rejected later."""
    try:
        return float(word)
    except ValueError:
        return math.nan
