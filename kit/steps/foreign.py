"""Settings of steps in the words of another library, as the kit uses them."""

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
    """Base class of dialects: a dataclass with another library's settings, which makes a plan."""

    NAME: ClassVar[str]
    """name of the dialect on the command line and in :data:`~kit.steps.registry.DIALECTS`."""

    @abstractmethod
    def to_plan(self, algo: str | None = None, *, strict: bool = False) -> StepPlan:
        """Return the plan of these settings; ``strict``: refuse settings without effect."""

    @abstractmethod
    def algorithm_for(self, algo: str | None, family: str | None) -> str | None:
        """Return the library's algorithm for a recipe, or the algorithm family."""

    @classmethod
    @abstractmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Make the dialect from settings by name."""


def as_plan(
    steps: StepPlan | ForeignSteps | Mapping[str, Any],
    algo: str | None = None,
    family: str | None = None,
) -> StepPlan:
    """Return the plan that ``steps`` describes.

    Args:
        steps: a plan, a dialect, or settings of a dialect by name with its name under ``dialect``.
        algo: algorithm that will run it; settings without effect for it are refused.
        family: ``on_policy`` or ``off_policy``, for an algorithm that the library does not have.

    Raises:
        SettingError: if the settings make no plan.
    """
    if isinstance(steps, StepPlan):
        return steps
    if isinstance(steps, Mapping):
        settings = dict(steps)
        steps = dialect(settings.pop("dialect", None)).from_settings(settings)
    assert isinstance(steps, ForeignSteps)
    meant = steps.algorithm_for(algo, family)
    return steps.to_plan(meant, strict=meant is not None)
