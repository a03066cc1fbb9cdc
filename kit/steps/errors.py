"""The error raised for invalid settings, and the checks that raise it."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

LARGEST = 10**18
"""Largest accepted count."""
LARGEST_FLOAT, SMALLEST_FLOAT = 3.4e38, 1.2e-38
"""Bounds of float32; numbers beyond them overflow to infinity or underflow to 0."""


class SettingError(ValueError):
    """Raised for a setting that is invalid or conflicts with another setting.

    Args:
        field: name of the setting.
        value: invalid value.
        why: what is wrong: a sentence that starts with a capital letter, or a predicate whose
            subject is the value.
        works: valid values (nearest first), or advice as a string.
        hint: additional advice.
    """

    def __init__(
        self, field: str, value: Any, why: str, works: Sequence[Any] | str = (), hint: str = ""
    ) -> None:
        self.field, self.value, self.why = field, value, why
        self.works, self.hint = works, hint
        super().__init__(self.message())

    def message(self, none: str = "None") -> str:
        """Return the message.

        Args:
            none: how to spell ``None``, such as ``null`` on the command line.
        """
        value = none if self.value is None else show(self.value)
        is_sentence = self.why[:1].isupper()
        text = f"{self.field}={value}{':' * is_sentence} {' '.join(self.why.split())}"
        advice = self.works if isinstance(self.works, str) else ""
        if self.works and not advice:
            works = [none if value is None else show(value, text=True) for value in self.works]
            advice = f"Try: {listed([repr(w) if ' ' in w else w for w in works])}"
            if none in works:
                advice = f"Use {listed([f'{self.field}={w}' for w in works])}"
        for part in filter(None, (advice, self.hint)):
            text += f", {part}" if part.startswith("or ") else f". {_capitalized(part)}"
        return f"{text}."

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.value, self.why, self.works, self.hint))


def listed(words: Sequence[str]) -> str:
    """Join words as in ``a, b or c``, without repetitions."""
    *first, last = dict.fromkeys(words)
    return f"{', '.join(first)} or {last}" if first else last


def _capitalized(text: str) -> str:
    """Capitalize a sentence unless it begins with a setting or other code."""
    word = text.split(maxsplit=1)[0]
    return text if re.search(r"[^\w,-]|_", word) else text[:1].upper() + text[1:]


def show(value: Any, *, text: bool = False) -> str:
    """Return a short representation of ``value`` for messages; never raises an error.

    Args:
        value: any object.
        text: whether to omit the quotation marks of a printable string.
    """
    if text and isinstance(value, str) and value.isprintable():
        return value
    try:
        shown = " ".join(repr(value).splitlines())
    except Exception:  # very long integers, broken __repr__ methods
        return f"<{type(value).__name__}>"
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


@dataclass(frozen=True)
class Limits:
    """Bounds of a number, for ``Annotated[float, Limits(...)]``."""

    low: float = -LARGEST_FLOAT
    """Smallest value."""
    high: float = LARGEST_FLOAT
    """Largest value."""
    open: bool = False
    """Whether ``low`` itself is excluded."""

    def check(self, field: str, value: Any) -> None:
        """Raise SettingError if the ``value`` of setting ``field`` is out of bounds."""
        low = f"{'above' if self.open else 'at least'} {_shown(self.low)}"
        high = f"at most {_shown(self.high)}"
        has_both = self.low > -LARGEST and self.high < LARGEST
        if value > self.high or value < self.low + (SMALLEST_FLOAT if self.open else 0):
            rule = f"{low} and {high}" if has_both else high if value > self.high else low
            raise SettingError(field, value, f"The value must be {rule}")


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def as_integer(field: str, value: Any) -> int:
    """Convert an integer from any library, or a whole float such as ``1e6``, to an int.

    Raises:
        SettingError: if ``value`` is not a whole number.
    """
    works: Any = ()
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
    """Convert a number from any library to a float.

    Raises:
        SettingError: if ``value`` is not a number, or too large for a float.
    """
    number = math.nan
    if not isinstance(value, (bool, str)):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if math.isnan(number):
        raise SettingError(field, value, "is not a number")
    return number


def whole_number(field: str, value: Any, at_least: int = 0) -> int:
    """Convert ``value`` to an int and check its bounds.

    Args:
        field: name of the setting, used in the error message.
        value: an integer, or a whole float such as ``1e6``.
        at_least: smallest valid value.

    Raises:
        SettingError: if ``value`` is not a whole number, is too small, or is larger than
            :data:`LARGEST`.
    """
    number = value if type(value) is int else as_integer(field, value)
    if not at_least <= number <= LARGEST:
        Limits(at_least, LARGEST).check(field, number)
    return number


def real_number(
    field: str, value: Any, at_least: float = -LARGEST_FLOAT, at_most: float = LARGEST_FLOAT
) -> float:
    """Convert ``value`` to a finite float and check its bounds.

    Args:
        field: name of the setting, used in the error message.
        value: an int or a float.
        at_least: smallest valid value.
        at_most: largest valid value.

    Raises:
        SettingError: if ``value`` is not a finite number or is out of bounds.
    """
    number = as_number(field, value)
    Limits(at_least, at_most).check(field, value)
    return number


def yes_or_no(field: str, value: Any) -> bool:
    """Return ``value`` if it is a bool; otherwise raise SettingError."""
    if isinstance(value, bool):
        return value
    raise SettingError(field, value, "is neither true nor false", [True, False])


Choice = TypeVar("Choice")


def one_of(field: str, value: Any, choices: Sequence[Choice]) -> Choice:
    """Return ``value`` if it is one of ``choices``; 1 does not equal ``True``.

    Raises:
        SettingError: if ``value`` is not a choice. The message suggests the nearest spellings.
    """
    for choice in choices:
        if isinstance(value, type(choice)) and choice == value:
            return choice
    raise SettingError(field, value, "is not a valid choice", nearest_first(value, words(choices)))


def words(choices: Sequence[Any]) -> list[str]:
    """Return the choices as they are spelled on the command line."""
    return [str(c).lower() if isinstance(c, bool) else str(c) for c in choices]


def nearest_first(value: Any, choices: Sequence[str]) -> list[str]:
    """Return ``choices``, starting with those spelled similarly to ``value``."""
    close = close_to(value, choices)
    return close + [choice for choice in choices if choice not in close]


def close_to(value: Any, choices: Sequence[str]) -> list[str]:
    """Return up to three of ``choices`` with a spelling similar to ``value``, closest first."""
    from difflib import get_close_matches  # difflib is slow to import

    return get_close_matches(str(value)[:100], choices)


def check_fields(values: Mapping[str, Any], cls: type, why: str, prefix: str = "") -> None:
    """Raise SettingError for a name that is not a field of the dataclass ``cls``."""
    known = [f.name for f in fields(cls)]
    for name, value in values.items():
        if name not in known:
            raise SettingError(f"{prefix}{name}", value, why, close_to(name, known) or known)


def place_of(error: BaseException) -> str:
    """Return the innermost line of user code in a traceback, as in ``" (losses.py, line 12)"``.

    User code is neither in kit nor in the standard library nor in an installed package. Return an
    empty string if the traceback contains no user code.
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
