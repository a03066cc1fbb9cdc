"""Rules that turn policy steps into gradient steps: the kit's own and those of other libraries."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

from kit.steps.errors import SettingError, nearest_first


class CountingRule(ABC):
    """Turns collections into gradient steps. One object follows one run."""

    STATE: ClassVar[tuple[str, ...]] = ()
    """attributes that a checkpoint needs: plain values."""
    pretrains: ClassVar[bool] = False
    """whether the rule counts the pretraining of a plan."""
    asks_each_step: ClassVar[bool] = False
    """whether it takes as long as there are policy steps, not iterations."""

    @abstractmethod
    def advance(self, policy_steps: int) -> int:
        """Take the policy steps one process collected in a training iteration.

        Returns:
            Gradient steps of one process that are due before the next collection.
        """

    def total(self, trainings: int, policy_steps: int, first: int) -> int | None:
        """The gradient steps of the first training iterations of a new run.

        Args:
            trainings: training iterations.
            policy_steps: of one process in each of them but the first.
            first: policy steps of one process in the first.

        Returns:
            ``None`` where it is known only by following the run.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """The state of the rule: plain values."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        for name in self.STATE:
            setattr(self, name, state_dict[name])


class KnownTotals(CountingRule):
    """A rule of totals that follow from the number of training iterations alone."""

    STATE = ("iteration",)
    iteration = 0
    """training iterations so far."""

    @abstractmethod
    def after(self, iterations: int) -> int:
        """The gradient steps of the first training ``iterations``."""

    def advance(self, policy_steps: int) -> int:
        """Take one training iteration."""
        self.iteration += 1
        return self.after(self.iteration) - self.after(self.iteration - 1)

    def total(self, trainings: int, policy_steps: int, first: int) -> int:
        """The gradient steps of the first ``trainings`` iterations."""
        return self.after(trainings)


class Fixed(KnownTotals):
    """The same number of gradient steps in every iteration."""

    def __init__(self, gradient_steps: int) -> None:
        self.gradient_steps = gradient_steps

    def after(self, iterations: int) -> int:
        """The gradient steps of the first training ``iterations``."""
        return iterations * self.gradient_steps


def rule_numbers(plan: Any, argument: str, wanted: int, example: str) -> list[int]:
    """The whole numbers that a rule has after its colon.

    Args:
        plan: of the run, for the error.
        argument: text after the colon, with commas between the numbers.
        wanted: how many there must be.
        example: of a rule that works.

    Raises:
        SettingError: if there are others.
    """
    numbers = [text.removesuffix(".0") for text in argument.split(",")]
    if len(numbers) != wanted or not all(n.isdecimal() and len(n) < 19 for n in numbers):
        which = "a number" if wanted == 1 else f"{wanted} numbers"
        raise SettingError("counting", plan.counting, f"needs {which} after the colon", [example])
    return [int(number) for number in numbers]


RuleFactory = Callable[[Any, str], CountingRule]
"""Makes a rule from a plan and the text after the colon of ``counting="name:argument"``."""

COUNTING_RULES: dict[str, RuleFactory] = {}
"""Rules by name. ``exact`` is the kit's own (``kit.steps.schedule``); a dialect adds its library's
rules when it is imported, their names begin with its module's name.
"""


@lru_cache(maxsize=256)
def counting_rule(counting: str) -> Callable[[Any], CountingRule]:
    """The maker of the rule called ``counting``, from the dialect that it belongs to.

    Args:
        counting: ``exact``, ``sheeprl-0.5.7``, or with an argument ``dreamer:24``.

    Raises:
        SettingError: if there is no such rule.
    """
    name, _, argument = counting.partition(":")
    module = f"kit.dialects.{name.split('-')[0]}"
    if name not in COUNTING_RULES and name.split("-")[0].isidentifier():
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
    if name not in COUNTING_RULES:
        known = f"known are {', '.join(nearest_first(name, [*COUNTING_RULES])[:6])}"
        raise SettingError("counting", counting, "is not a counting rule", ["exact"], known)
    factory = COUNTING_RULES[name]
    return lambda plan: factory(plan, argument)
