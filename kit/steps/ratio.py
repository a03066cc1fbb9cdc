"""Gradient steps per policy step, as an exact rational number."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any

from kit.steps.counting import CountingRule
from kit.steps.errors import SettingError

_LARGEST_DENOMINATOR = 1_000_000


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
        return _as_fraction(value)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        pass
    if isinstance(value, (int, float)) and value < 0:
        raise SettingError(field, value, "is negative", [0])
    raise SettingError(field, value, "is not a finite number", "use a number such as 0.5 or '1/3'")


@lru_cache(maxsize=1024, typed=True)  # True is no 1
def _as_fraction(value: Any) -> Fraction:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str) and "e" not in value.lower():
        fraction = Fraction(value.strip())
    elif isinstance(value, (int, Fraction)):
        fraction = Fraction(value)
    else:
        # "1e999999999" too: as an exact integer it would have a billion digits.
        number = float(value)
        simplest = Fraction(number).limit_denominator(_LARGEST_DENOMINATOR)
        fraction = simplest if float(simplest) == number else Fraction(repr(number))
    if fraction < 0:
        raise ValueError
    return fraction


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
        if policy_steps < 0:
            raise SettingError("policy_steps", policy_steps, "is negative", [0])
        due, self.remainder = divmod(
            self.remainder + self.ratio.numerator * policy_steps, self.ratio.denominator
        )
        return due

    def total(self, trainings: int, policy_steps: int, first: int) -> int:
        """The gradient steps of the first ``trainings`` iterations."""
        steps = first + (trainings - 1) * policy_steps
        return self.ratio.numerator * steps // self.ratio.denominator

    def __repr__(self) -> str:
        return f"ReplayRatio({self.ratio})"
