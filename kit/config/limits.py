"""The values that a setting can have, said where the setting is declared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from kit.steps import SettingError


@dataclass(frozen=True)
class Limits:
    """Finite numbers between two bounds, for ``Annotated[float, Limits(...)]``."""

    low: float
    """smallest value."""
    high: float = math.inf
    """largest value."""
    open: bool = False
    """whether ``low`` itself is left out."""

    def check(self, field: str, value: Any, default: Any) -> None:
        """Refuse a number that is outside.

        Args:
            field: name of the setting.
            value: a number.
            default: what works, where no nearest value does.

        Raises:
            SettingError: if it is.
        """
        works = f"use a number {self}" if default is None else [default]
        if not math.isfinite(value):
            raise SettingError(field, value, "is not a finite number", works)
        if value > self.high:
            raise SettingError(field, value, f"is more than {self.high:g}", [self.high])
        if self.open and value <= self.low:
            raise SettingError(field, value, f"is not above {self.low:g}", works)
        if value < self.low:
            raise SettingError(field, value, f"is less than {self.low:g}", [self.low])

    def __str__(self) -> str:
        if self.high < math.inf:
            return f"from {self.low:g} to {self.high:g}"
        return f"{'above' if self.open else 'from'} {self.low:g}"


Count = Annotated[int, Limits(1)]
"""At least one of something."""
NotNegative = Annotated[float, Limits(0)]
"""A weight, a coefficient."""
Positive = Annotated[float, Limits(0, open=True)]
"""A learning rate, a size."""
UnitInterval = Annotated[float, Limits(0, 1)]
"""A discount, a probability, a part of a whole."""
