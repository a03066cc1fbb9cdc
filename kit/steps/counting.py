"""Rules that compute the number of gradient steps from the number of policy steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from kit.steps.errors import SettingError, nearest_first
from kit.steps.registry import DIALECTS, dialect

_LARGEST_DENOMINATOR = 1_000_000


class CountingRule(ABC):
    """Base class for rules that compute gradient steps from policy steps.

    A rule has state, so each run needs a new instance.
    """

    STATE: ClassVar[tuple[str, ...]] = ()
    """names of the attributes saved in checkpoints."""
    pretrains: ClassVar[bool] = False
    """whether the rule's counts include the plan's pretraining steps."""
    asks_each_step: ClassVar[bool] = False
    """whether evaluating the rule takes time proportional to policy steps, not iterations."""

    @abstractmethod
    def advance(self, policy_steps: int) -> int:
        """Advance the rule by one iteration of ``policy_steps`` policy steps per process.

        Returns the number of gradient steps that each process takes before the next collection.
        """

    def total(self, trainings: int, policy_steps: int, first: int) -> int | None:
        """Return the number of gradient steps in the first ``trainings`` training iterations.

        Args:
            trainings: number of training iterations.
            policy_steps: policy steps per process in each training iteration after the first.
            first: policy steps per process in the first training iteration.

        Returns:
            The number of gradient steps, or ``None`` if there is no closed form.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rule as plain values."""
        return {name: getattr(self, name) for name in self.STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        for name in self.STATE:
            setattr(self, name, state_dict[name])


class KnownTotals(CountingRule):
    """Base class for rules whose totals depend only on the number of training iterations."""

    STATE = ("iteration",)
    iteration = 0
    """number of training iterations so far."""

    @abstractmethod
    def after(self, iterations: int) -> int:
        """Return the number of gradient steps in the first ``iterations`` training iterations."""

    def advance(self, policy_steps: int) -> int:
        """Advance by one training iteration and return its number of gradient steps."""
        self.iteration += 1
        return self.after(self.iteration) - self.after(self.iteration - 1)

    def total(self, trainings: int, policy_steps: int, first: int) -> int:
        """Return the number of gradient steps in the first ``trainings`` training iterations."""
        return self.after(trainings)


class Fixed(KnownTotals):
    """Rule with the same number of gradient steps in every iteration."""

    def __init__(self, gradient_steps: int) -> None:
        self.gradient_steps = gradient_steps

    def after(self, iterations: int) -> int:
        """Return the number of gradient steps in the first ``iterations`` training iterations."""
        return iterations * self.gradient_steps


class ReplayRatio(CountingRule):
    """Rule with an exact ratio of gradient steps to policy steps.

    After ``s`` policy steps, the total is exactly ``floor(ratio * s)`` gradient steps. The total
    does not depend on how the policy steps are split into batches.

    Args:
        ratio: gradient steps per policy step: int, float, ``Fraction`` or a string such as
            ``"1/3"``. :func:`as_fraction` documents the conversion of floats.

    Raises:
        SettingError: if ``ratio`` is negative or not a finite number.

    Examples:
        >>> ratio = ReplayRatio(0.3)
        >>> [ratio.advance(1) for _ in range(10)]
        [0, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    """

    STATE = ("remainder",)

    def __init__(self, ratio: Any) -> None:
        self.ratio = as_fraction("replay_ratio", ratio)
        self.remainder = 0  # ratio.numerator * policy steps, modulo ratio.denominator

    def advance(self, policy_steps: int) -> int:
        """Advance by ``policy_steps`` and return the number of gradient steps that become due."""
        due, self.remainder = divmod(
            self.remainder + self.ratio.numerator * policy_steps, self.ratio.denominator
        )
        return due

    def total(self, trainings: int, policy_steps: int, first: int) -> int:
        """Return the number of gradient steps in the first ``trainings`` training iterations."""
        steps = first + (trainings - 1) * policy_steps
        return self.ratio.numerator * steps // self.ratio.denominator


def as_fraction(field: str, value: Any) -> Fraction:
    """Convert a non-negative number or string to an exact fraction.

    A float is converted to the simplest fraction that rounds to it: ``0.3`` becomes 3/10 and
    ``0.3333333333333333`` becomes 1/3. Strings such as ``"1/3"`` and ``"0.25"`` are exact.

    Args:
        field: name of the setting, used in the error message.
        value: non-negative int, float, string or ``Fraction``.

    Raises:
        SettingError: if ``value`` is negative, not finite or not a number.
    """
    try:
        fraction = _as_fraction(value)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        fraction = None
    if fraction is None or fraction < 0:
        works = "use a number such as 0.5 or '1/3'"
        raise SettingError(field, value, "is not a finite number >= 0", works)
    return fraction


@lru_cache(maxsize=1024, typed=True)  # typed=True caches True and 1 separately
def _as_fraction(value: Any) -> Fraction:
    if isinstance(value, bool):
        value = None  # rejected below
    if isinstance(value, str) and "e" not in value.lower():
        return Fraction(value.strip())
    if isinstance(value, (int, Fraction)):
        return Fraction(value)
    # Strings with an exponent are parsed as floats: Fraction("1e999999999") has a billion digits.
    number = float(value)
    simplest = Fraction(number).limit_denominator(_LARGEST_DENOMINATOR)
    return simplest if float(simplest) == number else Fraction(repr(number))


def needed(plan: Any, field: str) -> Any:
    """Return a setting that the plan's counting rule requires.

    Raises:
        SettingError: if the setting is ``None``.
    """
    value = getattr(plan, field)
    if value is None:
        raise SettingError(field, None, f"must be set for counting={plan.counting}", [1])
    return value


def rule_numbers(plan: Any, argument: str, wanted: int, example: str) -> list[int]:
    """Parse ``wanted`` comma-separated integers after the colon in a counting rule's name.

    Raises:
        SettingError: if ``argument`` is invalid. The message shows the valid rule ``example``.
    """
    numbers = [text.removesuffix(".0") for text in argument.split(",")]
    if len(numbers) != wanted or not all(n.isdecimal() and len(n) < 19 for n in numbers):
        which = "a number" if wanted == 1 else f"{wanted} numbers"
        raise SettingError("counting", plan.counting, f"needs {which} after the colon", [example])
    return [int(number) for number in numbers]


RuleFactory = Callable[[Any, str], CountingRule]
"""Creates a rule from a plan and the text after the colon in ``counting="name:argument"``."""

COUNTING_RULES: dict[str, RuleFactory] = {}
"""Counting rules, keyed by name.

``exact`` is defined in ``kit.steps.schedule``. Importing a dialect registers its library's
rules under names that begin with the dialect's name.
"""


@lru_cache(maxsize=256)
def counting_rule(counting: str) -> Callable[[Any], CountingRule]:
    """Return a function that creates the rule ``counting`` for a plan.

    Args:
        counting: name of a rule, such as ``exact`` or ``sheeprl-0.5.7``. An argument may follow a
            colon, as in ``dreamer:24``.

    Raises:
        SettingError: if the rule does not exist.
    """
    name, _, argument = counting.partition(":")
    library = name.partition("-")[0]
    if name not in COUNTING_RULES and library in DIALECTS:
        dialect(library)
    if name not in COUNTING_RULES:
        known = f"known rules: {', '.join(nearest_first(name, [*COUNTING_RULES])[:6])}"
        raise SettingError("counting", counting, "is not a counting rule", ["exact"], known)
    factory = COUNTING_RULES[name]
    return lambda plan: factory(plan, argument)
