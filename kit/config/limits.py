"""Limits of a setting, declared with its type."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from kit.steps import SettingError


@dataclass(frozen=True)
class Limits:
    """Finite numbers between two bounds, for ``Annotated[float, Limits(...)]``."""

    low: float
    """Smallest value."""
    high: float = math.inf
    """Largest value."""
    open: bool = False
    """Whether ``low`` itself is excluded."""

    def check(self, field: str, value: float) -> None:
        """Refuse a number ``value`` of the setting ``field`` that is outside.

        Raises:
            SettingError: if it is.
        """
        if not math.isfinite(value):
            raise SettingError(field, value, "is not a finite number", f"use a number {self}")
        if value > self.high:
            raise SettingError(field, value, f"is more than {self.high:g}", [self.high])
        if self.open and value <= self.low:
            raise SettingError(field, value, f"is not above {self.low:g}", f"use a number {self}")
        if value < self.low:
            raise SettingError(field, value, f"is less than {self.low:g}", [self.low])

    def __str__(self) -> str:
        if self.high < math.inf:
            return f"from {self.low:g} to {self.high:g}"
        return f"{'above' if self.open else 'from'} {self.low:g}"


Count = Annotated[int, Limits(1)]
"""At least one of something."""
Natural = Annotated[int, Limits(0)]
"""A number of something, or none."""
NotNegative = Annotated[float, Limits(0)]
"""A weight or coefficient."""
Positive = Annotated[float, Limits(0, open=True)]
"""A learning rate, a temperature, a bound."""
UnitInterval = Annotated[float, Limits(0, 1)]
"""A number in [0, 1]: a discount, a probability, an averaging coefficient."""
