"""Setting types with limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kit.steps import make_schedule
from kit.steps.errors import LARGEST_FLOAT, Limits


@dataclass(frozen=True)
class NamesSchedule:
    """``Annotated`` metadata for strings that :func:`~kit.steps.make_schedule` accepts."""

    def check(self, field: str, value: str) -> None:
        """Raise SettingError if ``value`` does not name a schedule."""
        make_schedule(value, 1.0, 0.0, 1_000, field)

    def __str__(self) -> str:
        return "that names a schedule"


Seed = Annotated[int, Limits(0, 2**63 - 1)]
"""Seed for random number generators."""
FiniteFloat = Annotated[float, Limits(-LARGEST_FLOAT)]
"""Finite number."""
NonNegativeFloat = Annotated[float, Limits(0)]
"""Non-negative number, such as a loss weight."""
PositiveFloat = Annotated[float, Limits(0, open=True)]
"""Positive number, such as a learning rate."""
PositiveFraction = Annotated[float, Limits(0, 1, open=True)]
"""Number in (0, 1], such as a fraction of the run."""
UnitInterval = Annotated[float, Limits(0, 1)]
"""Number in [0, 1], such as a discount factor or a probability."""
DecayRate = Annotated[float, Limits(0, 0.9999)]
"""Decay rate of a running average, at most 0.9999."""
LogStd = Annotated[float, Limits(-20, 10)]
"""Logarithm of a standard deviation."""
ScheduleName = Annotated[str, NamesSchedule()]
"""Schedule name for :func:`~kit.steps.make_schedule`, such as ``constant`` or ``linear``."""
NumNetworks = Annotated[int, Limits(1, 1_000)]
"""Number of networks in an ensemble."""
NumFrames = Annotated[int, Limits(1, 1_000)]
"""Number of frames stacked into one observation."""
NumQuantiles = Annotated[int, Limits(1, 10_000)]
"""Number of quantiles that a network predicts."""
NumAtoms = Annotated[int, Limits(2, 10_000)]
"""Number of atoms of a categorical distribution."""
LayerWidth = Annotated[int, Limits(1, 16_384)]
"""Number of units in a layer."""
HiddenSizes = list[LayerWidth]
"""Hidden layer sizes. An empty list creates a linear network."""
