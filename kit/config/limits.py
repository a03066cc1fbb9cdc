"""Limits of a setting, declared with its type."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from kit.steps import SettingError, make_schedule
from kit.steps.errors import LARGEST

LARGEST_FLOAT, SMALLEST_FLOAT = 3.4e38, 1.2e-38
"""Bounds of float32: networks would see infinity or 0 in place of numbers beyond them."""


@dataclass(frozen=True)
class Limits:
    """Numbers between two bounds, for ``Annotated[float, Limits(...)]``; of a list, its length."""

    low: float
    """Smallest value."""
    high: float = LARGEST_FLOAT
    """Largest value."""
    open: bool = False
    """Whether ``low`` itself is excluded."""

    def check(self, field: str, value: float) -> None:
        """Refuse a number ``value`` of the setting ``field`` that is outside."""
        if not (isinstance(value, int) or math.isfinite(value)):
            raise SettingError(field, value, "is not a finite number", f"use a number {self}")
        if value > self.high:
            raise SettingError(field, value, f"is more than {_shown(self.high)}", [self.high])
        if self.open and value < self.low + SMALLEST_FLOAT:
            rounded = "" if value <= self.low else " in float32"
            why = f"is not above {self.low:g}{rounded}"
            raise SettingError(field, value, why, f"use a number {self}")
        if value < self.low:
            raise SettingError(field, value, f"is less than {_shown(self.low)}", [self.low])

    def __str__(self) -> str:
        if self.low <= -LARGEST_FLOAT:
            return "that is finite"
        first = f"{'above' if self.open else 'from'} {_shown(self.low)}"
        if self.high >= LARGEST:
            return first
        return f"{first}{' and up to' if self.open else ' to'} {_shown(self.high)}"


@dataclass(frozen=True)
class NamesSchedule:
    """Schedules down to 0 of :func:`~kit.steps.make_schedule`, for ``Annotated[str, ...]``."""

    def check(self, field: str, value: str) -> None:
        """Refuse a text that is no schedule."""
        make_schedule(value, 1.0, 0.0, 1_000, field)

    def __str__(self) -> str:
        return "that names a schedule"


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


Count = Annotated[int, Limits(1, LARGEST)]
"""At least one of something."""
Natural = Annotated[int, Limits(0, LARGEST)]
"""None or more of something."""
Seed = Annotated[int, Limits(0, 2**63 - 1)]
"""What random number generators start from."""
Finite = Annotated[float, Limits(-LARGEST_FLOAT)]
"""Any number."""
NotNegative = Annotated[float, Limits(0)]
"""A weight or coefficient."""
Positive = Annotated[float, Limits(0, open=True)]
"""A learning rate, a temperature, a bound."""
Share = Annotated[float, Limits(0, 1, open=True)]
"""A number in (0, 1]: a share of the run, a clipping range of the ratio, which is not negative."""
UnitInterval = Annotated[float, Limits(0, 1)]
"""A number in [0, 1]: a discount, a probability, an averaging coefficient."""
Decay = Annotated[float, Limits(0, 0.9999)]
"""What remains of an average after each step, less than all of it."""
LogStd = Annotated[float, Limits(-20, 10)]
"""Logarithm of a standard deviation."""
ScheduleName = Annotated[str, NamesSchedule()]
"""Constant, linear, cosine, or a text with shares of the run."""
Networks = Annotated[int, Limits(1, 1_000)]
"""Networks of an ensemble."""
Frames = Annotated[int, Limits(1, 1_000)]
"""Images that make one observation."""
Outputs = Annotated[int, Limits(1, 10_000)]
"""Numbers that a network estimates of each value: quantiles."""
Atoms = Annotated[int, Limits(2, 10_000)]
"""Numbers that make a distribution."""
Width = Annotated[int, Limits(1, 16_384)]
"""Units of a layer."""
HiddenSizes = Annotated[list[Width], Limits(0, 64)]
"""Widths of hidden layers; none: a linear network."""
