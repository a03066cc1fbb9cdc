"""Interface for step settings in another library's format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kit.steps.given import GivenFields
from kit.steps.plan import StepPlan
from kit.steps.registry import dialect


@dataclass
class ForeignSteps(GivenFields, ABC):
    """Base class for dialects, which are dataclasses with another library's settings."""

    NAME: ClassVar[str]
    """name of the dialect on the command line and in :data:`~kit.steps.registry.DIALECTS`."""

    @abstractmethod
    def to_plan(self, algo: str | None = None) -> StepPlan:
        """Return the plan for these settings."""

    @abstractmethod
    def algorithm_for(self, algo: str | None, family: str | None) -> str | None:
        """Return the library's name for a recipe's algorithm or, if there is none, its family."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Create the dialect from a mapping of setting names to values."""


def as_plan(
    steps: StepPlan | ForeignSteps | Mapping[str, Any],
    algo: str | None = None,
    family: str | None = None,
) -> StepPlan:
    """Return the plan that ``steps`` describes.

    Args:
        steps: a plan, a dialect, or a mapping with a dialect's settings and, under the key
            ``dialect``, its name.
        algo: algorithm that uses the plan.
        family: ``on_policy`` or ``off_policy``; used if the library does not have the algorithm.

    Raises:
        SettingError: if the settings are inconsistent.
    """
    if isinstance(steps, StepPlan):
        return steps
    if isinstance(steps, Mapping):
        settings = dict(steps)
        steps = dialect(settings.pop("dialect", None)).from_settings(settings)
    assert isinstance(steps, ForeignSteps)
    return steps.to_plan(steps.algorithm_for(algo, family))
