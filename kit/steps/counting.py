"""Rules that turn policy steps into gradient steps: the kit's own and those of other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

from kit.steps.errors import SettingError, nearest_first


class CountingRule(Protocol):
    """Turns collections into gradient steps. One object follows one run.

    A rule may have a few things more. ``pretrains = True`` says that it does the pretraining
    itself. ``total(trainings, policy_steps)`` returns the gradient steps of the first ``trainings``
    training iterations of ``policy_steps`` each, or ``None`` where only following them tells.
    ``follow(times, policy_steps)`` yields what so many calls of ``advance`` return, but faster.
    ``asks_each_step = True`` says that it takes as long as there are policy steps.
    """

    def advance(self, policy_steps: int) -> int:
        """Take the policy steps one process collected in a training iteration.

        Returns:
            Gradient steps of one process that are due before the next collection.
        """

    def state_dict(self) -> dict[str, Any]:
        """The state of the rule: plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""


class Fixed:
    """The same number of gradient steps in every iteration.

    Args:
        gradient_steps: gradient steps of one iteration.
    """

    def __init__(self, gradient_steps: int) -> None:
        self.gradient_steps = gradient_steps

    def advance(self, policy_steps: int) -> int:
        """Return the gradient steps of one iteration, whatever it collected."""
        del policy_steps
        return self.gradient_steps

    def total(self, trainings: int, policy_steps: int) -> int:
        """Return the gradient steps of the first ``trainings`` iterations."""
        del policy_steps
        return trainings * self.gradient_steps

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the rule has no state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accept a state of :meth:`state_dict`."""
        del state_dict


RuleFactory = Callable[[Any, str], CountingRule]
"""Makes a rule from an ``UpdatePlan`` and the text after the colon of ``counting="name:argument"``.
"""

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
    if name not in COUNTING_RULES:
        module = name.split("-")[0]
        if module.isidentifier():
            try:
                importlib.import_module(f"kit.dialects.{module}")
            except ModuleNotFoundError as error:
                if error.name != f"kit.dialects.{module}":
                    raise
    if name not in COUNTING_RULES:
        rules = ", ".join(nearest_first(name, [*COUNTING_RULES])[:6])
        raise SettingError(
            "counting", counting, "is not a counting rule", ["exact"], f"known are {rules}"
        )
    factory = COUNTING_RULES[name]
    return lambda plan: factory(plan, argument)
