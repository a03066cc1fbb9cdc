"""Types of settings: the one check of plans, recipes and dialects, which are all dataclasses."""

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
"""At least one of something."""
NonNegativeInt = Annotated[int, Limits(0, LARGEST)]
"""None or more of something."""

_CALLED = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a mapping",
    type(None): "null",
    Any: "any value",
}


@functools.cache
def type_hints(cls: type) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields by name, with their limits."""
    return typing.get_type_hints(cls, include_extras=True)


@functools.cache
def _typed(cls: type) -> list[tuple[str, Any, Any]]:
    """Name, type and default of each field with a type to check."""
    hints = type_hints(cls)
    return [(f.name, hints[f.name], f.default) for f in fields(cls) if hints[f.name] is not Any]


def check_types(settings: Any, path: str = "") -> None:
    """Check the fields of a dataclass, and convert values such as ``1e6`` to the declared type.

    The default of a field is accepted whatever its type, such as ``None``.

    Args:
        settings: the dataclass.
        path: begin of the names in errors, such as ``"critic."``.

    Raises:
        SettingError: at the first field of another type or out of its limits.
    """
    for name, hint, default in _typed(settings.__class__):
        value = getattr(settings, name)
        if value is not default:
            object.__setattr__(settings, name, convert(f"{path}{name}", value, hint))


def convert(path: str, value: Any, hint: Any) -> Any:
    """Return the value of a setting as its type has it.

    Whole floats become integers, integers floats, numbers texts, and tuples lists.

    Args:
        path: name of the setting, for errors.
        value: a plain value.
        hint: its type, such as ``Count | None``.

    Raises:
        SettingError: if the value does not fit.
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
    """Return a value as the first of several types that it fits."""
    if value is None and type(None) in typing.get_args(hint):
        return None
    options = [one for one in typing.get_args(hint) if one is not type(None)]
    if len(options) == 1:
        return convert(path, value, options[0])  # whose error is more precise
    for option in options:
        with contextlib.suppress(SettingError):
            return convert(path, value, option)
    return _refuse(path, value, called(hint))


def _listed(path: str, value: Any, hint: Any) -> list[Any]:
    """The entries of a list or a tuple."""
    if not isinstance(value, (list, tuple)):
        _refuse(path, value, called(hint))
    entries = _entries(hint) or [typing.get_args(hint)[0]] * len(value)
    if len(value) != len(entries):
        _refuse(path, value, called(hint))
    return [convert(path, item, entry) for item, entry in zip(value, entries)]


def _entries(hint: Any) -> list[Any]:
    """The types of the entries of a tuple of so many; none for a list of any length."""
    arguments = typing.get_args(hint)
    fixed = typing.get_origin(hint) is tuple and Ellipsis not in arguments
    return [*arguments] if fixed else []


def _mapped(path: str, value: Any, hint: Any) -> dict[str, Any]:
    """The entries of a mapping, each of the type ``hint``."""
    if not (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)):
        _refuse(path, value, "a mapping such as {name: value}")
    return {name: convert(f"{path}.{name}", item, hint) for name, item in value.items()}


def _scalar(path: str, value: Any, hint: Any) -> Any:
    """A number, a text, a truth value, or an object of a class."""
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
    """A text; a number becomes one without a loss."""
    if not isinstance(value, str):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            _refuse(path, value, called(str))
        value = show(value)
    return str(value)


def _refuse(path: str, value: Any, wanted: str) -> NoReturn:
    raise SettingError(path, value, f"is not {wanted}", f"give {wanted}")


def called(hint: Any) -> str:
    """Return the name of a type in messages and in the help: ``a whole number from 1``."""
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
        return f"a list, each {called(arguments[0])}"
    return _CALLED.get(origin or hint, getattr(hint, "__name__", str(hint)))
