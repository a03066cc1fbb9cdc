"""Type checks and conversions for dataclasses with settings, such as plans and recipes."""

from __future__ import annotations

import contextlib
import functools
import numbers
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Annotated, Any, Literal, NoReturn

from kit.steps.counting import as_fraction
from kit.steps.errors import (
    LARGEST,
    Limits,
    SettingError,
    as_integer,
    as_number,
    one_of,
    real_number,
    show,
    words,
    yes_or_no,
)

PositiveInt = Annotated[int, Limits(1, LARGEST)]
"""Integer >= 1."""
NonNegativeInt = Annotated[int, Limits(0, LARGEST)]
"""Integer >= 0."""

_CALLED = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "a mapping",
    type(None): "null",
    Any: "any value",
}


@functools.cache
def type_hints(cls: type) -> Mapping[str, Any]:
    """Return a dataclass's field types, keyed by name and including ``Annotated`` limits."""
    return typing.get_type_hints(cls, include_extras=True)


@functools.cache
def _typed(cls: type) -> list[tuple[str, Any, Any]]:
    """Return the name, type and default of each field whose type is not ``Any``."""
    hints = type_hints(cls)
    return [(f.name, hints[f.name], f.default) for f in fields(cls) if hints[f.name] is not Any]


def check_types(settings: Any, path: str = "") -> None:
    """Check the fields of a dataclass, and convert values such as ``1e6`` to the declared type.

    Default values are always accepted, even ``None`` where the type does not allow ``None``.

    Args:
        settings: dataclass instance, changed in place.
        path: prefix of field names in errors, such as ``"critic."``.

    Raises:
        SettingError: for the first field with an invalid type or value.
    """
    for name, hint, default in _typed(settings.__class__):
        value = getattr(settings, name)
        if value is not default:
            object.__setattr__(settings, name, convert(f"{path}{name}", value, hint))


def convert(path: str, value: Any, hint: Any) -> Any:
    """Convert a plain value to the type of a setting.

    If the type requires a conversion, whole floats are converted to integers, integers to floats,
    numbers to strings, and tuples to lists.

    Args:
        path: name of the setting, used in error messages.
        value: plain value.
        hint: type of the setting, such as ``PositiveInt | None``.

    Raises:
        SettingError: if the value cannot be converted.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bare, limits = arguments
        made = as_number(path, value) if bare is float else convert(path, value, bare)
        limits.check(path, made)
        return made
    if origin in (typing.Union, types.UnionType):
        return _one_of(path, value, hint)
    if origin is Literal:
        return one_of(path, value, arguments)
    if origin in (list, tuple):
        return origin(_listed(path, value, hint))
    if origin in (dict, Mapping):
        return _mapped(path, value, arguments[1])
    return _scalar(path, value, hint)


def _one_of(path: str, value: Any, hint: Any) -> Any:
    """Convert a value to the first type of a union that accepts the value."""
    if value is None and type(None) in typing.get_args(hint):
        return None
    options = [one for one in typing.get_args(hint) if one is not type(None)]
    if len(options) == 1:
        return convert(path, value, options[0])  # its error is more precise
    for option in options:
        with contextlib.suppress(SettingError):
            return convert(path, value, option)
    return _refuse(path, value, called(hint))


def _listed(path: str, value: Any, hint: Any) -> list[Any]:
    """Convert the entries of a list or a tuple."""
    if not isinstance(value, (list, tuple)):
        _refuse(path, value, called(hint))
    entries = _entries(hint) or [typing.get_args(hint)[0]] * len(value)
    if len(value) != len(entries):
        _refuse(path, value, called(hint))
    return [convert(path, item, entry) for item, entry in zip(value, entries)]


def _entries(hint: Any) -> list[Any]:
    """Return the entry types of a fixed-length tuple, or an empty list for other types."""
    arguments = typing.get_args(hint)
    fixed = typing.get_origin(hint) is tuple and Ellipsis not in arguments
    return [*arguments] if fixed else []


def _mapped(path: str, value: Any, hint: Any) -> dict[str, Any]:
    """Convert the values of a mapping to the type ``hint``."""
    if not (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)):
        _refuse(path, value, "a mapping such as {name: value}")
    return {name: convert(f"{path}.{name}", item, hint) for name, item in value.items()}


def _scalar(path: str, value: Any, hint: Any) -> Any:
    """Convert a number, string or bool, or check the class of an object."""
    if hint is int:
        return as_integer(path, value)
    if hint is float:
        return real_number(path, value)
    if hint is bool:
        return yes_or_no(path, value)
    if hint is Fraction:
        return as_fraction(path, value)
    if hint is str:
        return _text(path, value)
    if hint is Any or isinstance(value, hint):
        return value
    return _refuse(path, value, called(hint))


def _text(path: str, value: Any) -> str:
    """Convert a string or a number to a string."""
    if not isinstance(value, str):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            _refuse(path, value, called(str))
        value = show(value)
    return str(value)


def _refuse(path: str, value: Any, wanted: str) -> NoReturn:
    raise SettingError(path, value, f"is not {wanted}", f"give {wanted}")


def called(hint: Any) -> str:
    """Return a description of a type for messages, such as ``a whole number from 1``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"{called(arguments[0])} {arguments[1]}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(called, arguments))
    if origin is Literal:
        return " or ".join(words(arguments))
    if entries := _entries(hint):
        return f"a list of {' and '.join(map(called, entries))}"
    if origin in (list, tuple):
        return f"a list whose entries are each {called(arguments[0])}"
    return _CALLED.get(origin or hint, getattr(hint, "__name__", str(hint)))
