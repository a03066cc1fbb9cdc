"""Rules that turn policy steps into gradient steps: the kit's own and those of other libraries."""

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

        Returns the gradient steps of one process that are due before the next collection.
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


class ReplayRatio(CountingRule):
    """How many gradient steps are due, given the policy steps played: an exact running floor.

    After ``s`` policy steps, ``floor(ratio * s)`` gradient steps have been due in total, whatever
    the sizes of the increments: nothing is lost, doubled or drifts, for any run length.

    Args:
        ratio: gradient steps per policy step: int, float, ``Fraction`` or a string such as
            ``"1/3"``. See :func:`as_fraction` for what a float means.

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
        self.remainder = 0  # of ratio.numerator * policy steps, modulo ratio.denominator

    def advance(self, policy_steps: int) -> int:
        """The gradient steps that another ``policy_steps`` make due."""
        due, self.remainder = divmod(
            self.remainder + self.ratio.numerator * policy_steps, self.ratio.denominator
        )
        return due

    def total(self, trainings: int, policy_steps: int, first: int) -> int:
        """The gradient steps of the first ``trainings`` iterations."""
        steps = first + (trainings - 1) * policy_steps
        return self.ratio.numerator * steps // self.ratio.denominator


def as_fraction(field: str, value: Any) -> Fraction:
    """The rational number that ``value`` means.

    A float means the simplest fraction that rounds to it: ``0.3`` is 3/10 and
    ``0.3333333333333333`` is 1/3. Strings such as ``"1/3"`` and ``"0.25"`` are exact.

    Args:
        field: name of the setting, for the error.
        value: an int, float, string or ``Fraction``, not negative.

    Raises:
        SettingError: if ``value`` is negative, not finite or not a number.
    """
    try:
        fraction = _as_fraction(value)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        fraction = None
    if fraction is None or fraction < 0:
        works = "use a number such as 0.5 or '1/3'"
        raise SettingError(field, value, "is not a finite number from 0", works)
    return fraction


@lru_cache(maxsize=1024, typed=True)  # True is no 1
def _as_fraction(value: Any) -> Fraction:
    if isinstance(value, bool):
        value = None  # no number
    if isinstance(value, str) and "e" not in value.lower():
        return Fraction(value.strip())
    if isinstance(value, (int, Fraction)):
        return Fraction(value)
    # "1e999999999" too: as an exact integer it would have a billion digits.
    number = float(value)
    simplest = Fraction(number).limit_denominator(_LARGEST_DENOMINATOR)
    return simplest if float(simplest) == number else Fraction(repr(number))


def needed(plan: Any, field: str) -> Any:
    """Return the value of a setting without which the plan's rule counts nothing.

    Raises:
        SettingError: if it is not given.
    """
    value = getattr(plan, field)
    if value is None:
        raise SettingError(field, None, f"is needed for counting={plan.counting}", [1])
    return value


def rule_numbers(plan: Any, argument: str, wanted: int, example: str) -> list[int]:
    """The ``wanted`` whole numbers, with commas between them, that a rule has after its colon.

    Raises:
        SettingError: if there are others; ``example`` is a rule that works.
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
rules when it is imported; their names begin with the dialect's.
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
    library = name.partition("-")[0]
    if name not in COUNTING_RULES and library in DIALECTS:
        dialect(library)
    if name not in COUNTING_RULES:
        known = f"known are {', '.join(nearest_first(name, [*COUNTING_RULES])[:6])}"
        raise SettingError("counting", counting, "is not a counting rule", ["exact"], known)
    factory = COUNTING_RULES[name]
    return lambda plan: factory(plan, argument)
