"""The one error that bad settings raise, and the checks that raise it."""

from __future__ import annotations

import math
import operator
import os
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

LARGEST = 10**18
"""Largest count that is accepted; a million steps a second would reach it in 30,000 years."""

Count = Annotated[int, 1]
"""A whole number from 1."""
Natural = Annotated[int, 0]
"""A whole number from 0."""


class SettingError(ValueError):
    """A setting that cannot work.

    Args:
        field: name of the setting.
        value: the given one.
        why: why it cannot work, as the end of a sentence that begins with the value.
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
        message = f"{self.field}={value} {' '.join(self.why.split())}"
        if isinstance(self.works, str):
            message += f"; {self.works}" if self.works else ""
        elif self.works:
            works = (none if value is None else show(value, text=True) for value in self.works)
            message += f"; what works: {' or '.join(dict.fromkeys(works))}"
        return f"{message}; {self.hint}." if self.hint else f"{message}."

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


def whole_number(field: str, value: Any, at_least: int = 0) -> int:
    """``value`` as an int.

    Args:
        field: name of the setting, for the error.
        value: an integer, or a float without a fraction (``1e6``).
        at_least: smallest value that works.

    Raises:
        SettingError: if ``value`` is no whole number, is too small, or is larger than
            :data:`LARGEST`.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(field, value, "is not a finite number", f"use a number from {at_least}")
    if isinstance(value, float) and not value.is_integer():
        floor = max(math.floor(value), at_least)
        raise SettingError(field, value, "is not a whole number", [floor, floor + 1])
    try:  # the integers of other libraries (numpy), too
        number = int(value) if isinstance(value, float) else operator.index(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool):
        raise SettingError(field, value, "is not a whole number", f"use an integer from {at_least}")
    if number < at_least:
        raise SettingError(field, value, f"is less than {at_least}", [at_least])
    if number > LARGEST:
        raise SettingError(field, value, "is larger than any run", [LARGEST])
    return number


def yes_or_no(field: str, value: Any) -> bool:
    """``value``, a bool; anything else is refused."""
    if isinstance(value, bool):
        return value
    raise SettingError(field, value, "is neither true nor false", [True, False])


def one_of(field: str, value: Any, choices: Sequence[str]) -> str:
    """``value``, one of ``choices``.

    Raises:
        SettingError: if it is not; the nearest spelling comes first.
    """
    if isinstance(value, str) and value in choices:
        return value
    raise SettingError(field, value, "is not a choice", nearest_first(value, choices))


def nearest_first(value: Any, choices: Sequence[str]) -> list[str]:
    """``choices`` with those spelled most like ``value`` first."""
    from difflib import get_close_matches  # only for an error: importing it takes milliseconds

    close = get_close_matches(str(value)[:100], choices, n=3, cutoff=0.6)
    return close + [choice for choice in choices if choice not in close]


def check_fields(values: Mapping[str, Any], cls: type, why: str, prefix: str = "") -> None:
    """Refuse names that are no field of the dataclass ``cls``; the nearest spelling comes first."""
    known = [f.name for f in fields(cls)]
    for name, value in values.items():
        if name not in known:
            raise SettingError(f"{prefix}{name}", value, why, nearest_first(name, known)[:3])


def real_number(
    field: str, value: Any, at_least: float | None = None, at_most: float | None = None
) -> float:
    """``value`` as a float.

    Args:
        field: name of the setting, for the error.
        value: an int or a float.
        at_least: smallest value that works, if there is one.
        at_most: largest value that works, if there is one.

    Raises:
        SettingError: if ``value`` is no finite number or out of range.
    """
    if isinstance(value, (bool, str)):
        raise SettingError(field, value, "is not a number", "use a number such as 0.5")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise SettingError(field, value, "is not a finite number", "use a number such as 0.5")
    if at_least is not None and number < at_least:
        raise SettingError(field, value, f"is less than {at_least:g}", [at_least])
    if at_most is not None and number > at_most:
        raise SettingError(field, value, f"is more than {at_most:g}", [at_most])
    return number


def check_types(settings: Any) -> None:
    """Check the annotated fields of a dataclass, and make integers of floats.

    These are ``Count``, ``Natural`` and other annotated integers, ``bool`` and ``Literal``, and
    then ``float``, also where it is one type of several. A field may be ``None`` if its type or
    its default is.

    Raises:
        SettingError: at the first field that cannot work.
    """
    for name, kind, others in _checked(settings.__class__):
        value = getattr(settings, name)
        if isinstance(value, others):
            continue
        if kind is bool:
            yes_or_no(name, value)
        elif kind is float:
            real_number(name, value)
        elif isinstance(kind, int):
            object.__setattr__(settings, name, whole_number(name, value, kind))
        else:
            one_of(name, value, kind)


@cache
def _checked(cls: type) -> list[tuple[str, Any, tuple[type, ...]]]:
    """Fields to check: ``bool``, ``float``, smallest number or choices; other types that work."""
    hints = get_type_hints(cls, include_extras=True)
    optional = {f.name for f in fields(cls) if f.default is None}
    found: list[tuple[str, Any, tuple[type, ...]]] = []
    numbers: list[tuple[str, Any, tuple[type, ...]]] = []
    for name, hint in hints.items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        none = (NoneType,) if NoneType in kinds or name in optional else ()
        kind, *others = [kind for kind in kinds if kind is not NoneType] or [None]
        if get_origin(kind) is Annotated:
            found.append((name, get_args(kind)[1], none))
        elif get_origin(kind) is Literal:
            found.append((name, get_args(kind), none))
        elif kind is bool and not others:
            found.append((name, bool, none))
        elif float in kinds:
            numbers.append((name, float, (*(k for k in kinds if k is not float), *none)))
    return found + numbers


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
