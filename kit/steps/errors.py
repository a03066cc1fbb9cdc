"""The one error that bad settings raise, and the checks that raise it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SettingError(ValueError):
    """A setting that cannot work.

    Args:
        field: name of the setting.
        value: what was given.
        why: why it cannot work, as the end of a sentence that begins with the value.
        works: values that would work, nearest first.
    """

    def __init__(self, field: str, value: Any, why: str, works: Sequence[Any] | str = ()) -> None:
        self.field = field
        self.value = value
        self.why = why
        self.works = works
        message = f"{field}={value!r} {why}"
        if isinstance(works, str):
            message += f"; {works}" if works else ""
        elif works:
            message += f"; what works: {' or '.join(str(w) for w in works)}"
        super().__init__(message + ".")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.value, self.why, self.works))


def whole_number(field: str, value: Any, at_least: int = 0) -> int:
    """Return ``value`` as an int, or refuse it.

    Args:
        field: name of the setting, for the error.
        value: an integer, or a float without a fraction (``1e6``).
        at_least: smallest value that works.

    Raises:
        SettingError: if ``value`` is no whole number or is too small.
    """
    if type(value) is int:
        number = value
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        number = _index(field, value, at_least)
    elif value != value or value in (float("inf"), float("-inf")):
        raise SettingError(field, value, "is not a finite number", f"use a number from {at_least}")
    elif value != int(value):
        floor = max(int(value // 1), at_least)
        raise SettingError(field, value, "is not a whole number", [floor, floor + 1])
    else:
        number = int(value)
    if number < at_least:
        raise SettingError(field, value, f"is less than {at_least}", [at_least])
    return number


def _index(field: str, value: Any, at_least: int) -> int:
    """Accept the integer types of other libraries (numpy), and nothing else."""
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        return int(value.__index__())
    raise SettingError(field, value, "is not a whole number", f"use an integer from {at_least}")
