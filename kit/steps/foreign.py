"""Interface of step settings in the format of another library."""

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
    """Base class of dialects: dataclasses with another library's settings."""

    NAME: ClassVar[str]
    """name of the dialect on the command line and in :data:`~kit.steps.registry.DIALECTS`."""

    @abstractmethod
    def to_plan(self, algo: str | None = None, *, strict: bool = False) -> StepPlan:
        """Return the plan of these settings; ``strict`` rejects settings without effect."""

    @abstractmethod
    def algorithm_for(self, algo: str | None, family: str | None) -> str | None:
        """Return the library's name for a recipe's algorithm, or the algorithm family."""

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
        steps: a plan, a dialect, or a mapping with the settings of a dialect and its name under
            the key ``dialect``.
        algo: algorithm that uses the plan; settings without effect on it are rejected.
        family: ``on_policy`` or ``off_policy``, for algorithms that the library does not have.

    Raises:
        SettingError: if the settings are inconsistent.
    """
    if isinstance(steps, StepPlan):
        return steps
    if isinstance(steps, Mapping):
        settings = dict(steps)
        steps = dialect(settings.pop("dialect", None)).from_settings(settings)
    assert isinstance(steps, ForeignSteps)
    meant = steps.algorithm_for(algo, family)
    return steps.to_plan(meant, strict=meant is not None)
