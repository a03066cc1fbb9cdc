"""Limits of a setting, declared with its type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kit.steps import make_schedule
from kit.steps.errors import LARGEST_FLOAT, Limits


@dataclass(frozen=True)
class NamesSchedule:
    """Schedules down to 0 of :func:`~kit.steps.make_schedule`, for ``Annotated[str, ...]``."""

    def check(self, field: str, value: str) -> None:
        """Refuse a text that is no schedule."""
        make_schedule(value, 1.0, 0.0, 1_000, field)

    def __str__(self) -> str:
        return "that names a schedule"


Seed = Annotated[int, Limits(0, 2**63 - 1)]
"""What random number generators start from."""
FiniteFloat = Annotated[float, Limits(-LARGEST_FLOAT)]
"""Any number."""
NonNegativeFloat = Annotated[float, Limits(0)]
"""A weight or coefficient."""
PositiveFloat = Annotated[float, Limits(0, open=True)]
"""A learning rate, a temperature, a bound."""
PositiveFraction = Annotated[float, Limits(0, 1, open=True)]
"""A number in (0, 1]: a share of the run, a clipping range of the ratio, which is not negative."""
UnitInterval = Annotated[float, Limits(0, 1)]
"""A number in [0, 1]: a discount, a probability, an averaging coefficient."""
DecayRate = Annotated[float, Limits(0, 0.9999)]
"""What remains of an average after each step, less than all of it."""
LogStd = Annotated[float, Limits(-20, 10)]
"""Logarithm of a standard deviation."""
ScheduleName = Annotated[str, NamesSchedule()]
"""Constant, linear, cosine, or a text with shares of the run."""
NumNetworks = Annotated[int, Limits(1, 1_000)]
"""Networks of an ensemble."""
NumFrames = Annotated[int, Limits(1, 1_000)]
"""Images that make one observation."""
NumQuantiles = Annotated[int, Limits(1, 10_000)]
"""Numbers that a network estimates of each value: quantiles."""
NumAtoms = Annotated[int, Limits(2, 10_000)]
"""Numbers that make a distribution."""
LayerWidth = Annotated[int, Limits(1, 16_384)]
"""Units of a layer."""
HiddenSizes = list[LayerWidth]
"""Widths of hidden layers; none: a linear network."""
