"""The one error that bad settings raise, and the checks that raise it."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

LARGEST = 10**18
"""Largest count that is accepted; a million steps a second would reach it in 30,000 years."""
LARGEST_FLOAT, SMALLEST_FLOAT = 3.4e38, 1.2e-38
"""Bounds of float32: networks would see infinity or 0 in place of numbers beyond them."""


class SettingError(ValueError):
    """A setting that cannot work.

    Args:
        field: name of the setting.
        value: the given one.
        why: what is wrong: a sentence that starts with a capital letter, or a predicate whose
            subject is the value.
        works: values that would work, nearest first; or advice as text.
        hint: advice beyond the values.
    """

    def __init__(
        self, field: str, value: Any, why: str, works: Sequence[Any] | str = (), hint: str = ""
    ) -> None:
        self.field, self.value, self.why = field, value, why
        self.works, self.hint = works, hint
        super().__init__(self.message())

    def message(self, none: str = "None") -> str:
        """The message.

        Args:
            none: how ``None`` is written where the setting is: ``null`` on the command line.
        """
        value = none if self.value is None else show(self.value)
        is_sentence = self.why[:1].isupper()
        text = f"{self.field}={value}{':' * is_sentence} {' '.join(self.why.split())}"
        advice = self.works if isinstance(self.works, str) else ""
        if self.works and not advice:
            works = (none if value is None else show(value, text=True) for value in self.works)
            advice = "Try: " if is_sentence else "what works: "
            advice += " or ".join(dict.fromkeys(works))
        for part in filter(None, (advice, self.hint)):
            text += f"{'.' if part[0].isupper() else ';'} {part}"
        return f"{text}."

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.value, self.why, self.works, self.hint))


def show(value: Any, *, text: bool = False) -> str:
    """``value`` as a message shows it; never fails and is never long.

    Args:
        value: anything.
        text: whether a string is shown without quotation marks, if it can be read so.
    """
    if text and isinstance(value, str) and value.isprintable():
        return value
    try:
        shown = " ".join(repr(value).splitlines())
    except Exception:  # an integer of thousands of digits, or an object that cannot print itself
        return f"<{type(value).__name__}>"
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


@dataclass(frozen=True)
class Limits:
    """Numbers between two bounds, for ``Annotated[float, Limits(...)]``."""

    low: float = -LARGEST_FLOAT
    """Smallest value."""
    high: float = LARGEST_FLOAT
    """Largest value."""
    open: bool = False
    """Whether ``low`` itself is excluded."""

    def check(self, field: str, value: Any) -> None:
        """Refuse a number ``value`` of the setting ``field`` that is outside."""
        low, high = _shown(self.low), _shown(self.high)
        if value > self.high:
            raise SettingError(field, value, f"is more than {high}", [self.high])
        if value < self.low + (SMALLEST_FLOAT if self.open else 0):
            why = f"is not above {self.low:g}" if self.open else f"is less than {low}"
            works = f"use a number {self}" if self.open else [self.low]
            raise SettingError(field, value, why, works)

    def __str__(self) -> str:
        if self.low <= -LARGEST_FLOAT:
            return "that is finite"
        first = f"{'above' if self.open else 'from'} {_shown(self.low)}"
        if self.high >= LARGEST:
            return first
        return f"{first}{' and up to' if self.open else ' to'} {_shown(self.high)}"


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def as_integer(field: str, value: Any) -> int:
    """Return ``value`` as an int: an integer of any library, or a float such as ``1e6``.

    Raises:
        SettingError: if ``value`` is no whole number.
    """
    works: Any = "give a whole number"
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
        if isinstance(value, Real) and math.isfinite(number := float(value)):
            floor = math.floor(number)
            if floor == value:
                return floor
            works = [floor, floor + 1]
    raise SettingError(field, value, "is not a whole number", works)


def as_number(field: str, value: Any) -> float:
    """Return ``value``, a number of any library, as a float.

    Raises:
        SettingError: if ``value`` is no number, or too large for a float.
    """
    number = math.nan
    if not isinstance(value, (bool, str)):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if math.isnan(number):
        raise SettingError(field, value, "is not a number", "give a number")
    return number


def whole_number(field: str, value: Any, at_least: int = 0) -> int:
    """Return ``value`` as an int.

    Args:
        field: name of the setting, for the error.
        value: an integer, or a float without a fraction (``1e6``).
        at_least: smallest value that works.

    Raises:
        SettingError: if ``value`` is no whole number, is too small, or is larger than
            :data:`LARGEST`.
    """
    number = value if type(value) is int else as_integer(field, value)
    if not at_least <= number <= LARGEST:
        Limits(at_least, LARGEST).check(field, number)
    return number


def real_number(
    field: str, value: Any, at_least: float = -LARGEST_FLOAT, at_most: float = LARGEST_FLOAT
) -> float:
    """Return ``value`` as a finite float.

    Args:
        field: name of the setting, for the error.
        value: an int or a float.
        at_least: smallest value that works.
        at_most: largest value that works.

    Raises:
        SettingError: if ``value`` is no finite number or out of range.
    """
    number = as_number(field, value)
    Limits(at_least, at_most).check(field, value)
    return number


def yes_or_no(field: str, value: Any) -> bool:
    """``value``, a bool; anything else is refused."""
    if isinstance(value, bool):
        return value
    raise SettingError(field, value, "is neither true nor false", [True, False])


Choice = TypeVar("Choice")


def one_of(field: str, value: Any, choices: Sequence[Choice]) -> Choice:
    """Return ``value``, one of ``choices``; 1 is not ``True``.

    Raises:
        SettingError: if it is not; the nearest spelling comes first.
    """
    for choice in choices:
        if isinstance(value, type(choice)) and choice == value:
            return choice
    raise SettingError(field, value, "is not a choice", nearest_first(value, words(choices)))


def words(choices: Sequence[Any]) -> list[str]:
    """Return choices as they are written on the command line."""
    return [str(c).lower() if isinstance(c, bool) else str(c) for c in choices]


def nearest_first(value: Any, choices: Sequence[str]) -> list[str]:
    """``choices`` with those spelled most like ``value`` first."""
    close = close_to(value, choices)
    return close + [choice for choice in choices if choice not in close]


def close_to(value: Any, choices: Sequence[str]) -> list[str]:
    """Return up to three of ``choices`` that are spelled like ``value``, the closest first."""
    from difflib import get_close_matches  # only for an error: importing it takes milliseconds

    return get_close_matches(str(value)[:100], choices)


def check_fields(values: Mapping[str, Any], cls: type, why: str, prefix: str = "") -> None:
    """Refuse names that are no field of the dataclass ``cls``; the nearest spelling comes first."""
    known = [f.name for f in fields(cls)]
    for name, value in values.items():
        if name not in known:
            raise SettingError(f"{prefix}{name}", value, why, close_to(name, known) or known)


def place_of(error: BaseException) -> str:
    """Where in a file of the user's an error was raised: ``" (losses.py, line 12)"``, or nothing.

    The innermost such line: neither in the kit, nor in Python's or an installed package.
    """
    own = f"{Path(__file__).parents[1]}{os.sep}"
    installed = {"site-packages", "dist-packages"}
    library = sysconfig.get_paths()["stdlib"]
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        path = frame.f_code.co_filename
        if path.startswith((own, library, "<")) or installed & set(Path(path).parts):
            continue
        return f" ({Path(path).name}, line {line})"
    return ""
