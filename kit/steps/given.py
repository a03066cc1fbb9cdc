"""Groups of settings that record which of their fields were given."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypeVar


@dataclass
class GivenFields:
    """Base class of dataclasses that record which of their fields were given.

    A field is given if it is an argument of the constructor or of ``dataclasses.replace``, or if it
    is assigned later. Comparison, representation, ``vars``, pickling and copying do not change.

    Examples:
        >>> @dataclass
        ... class Network(GivenFields):
        ...     depth: int = 2
        ...     width: int = 64
        >>> sorted(given_fields(replace(Network(depth=2), width=64)))
        ['depth', 'width']
        >>> completed(Network(depth=3), Network(width=256))
        Network(depth=3, width=256)
    """

    __slots__ = ("_given", "_is_complete")

    if not TYPE_CHECKING:
        # dataclasses.replace(old, **changes) calls the constructor with the changes, then with the
        # other fields in order. This pseudo-field comes first among them, and its value is `old`.
        _replaced: InitVar[Any] = field(default=None, kw_only=True)

        def __new__(cls, *args: Any, **kwargs: Any) -> Self:
            made = super().__new__(cls)
            names = [f.name for f in fields(cls) if not f.kw_only][: len(args)] + [*kwargs]
            old = kwargs.get("_replaced")
            if old is not None:
                names = [*given_fields(old), *names[: names.index("_replaced")]]
            made._given = frozenset(names)
            made._is_complete = old is not None and old._is_complete
            return made

        def __init_subclass__(cls, **options: Any) -> None:
            """Call ``__post_init__`` without the pseudo-field."""
            super().__init_subclass__(**options)
            if (post_init := vars(cls).get("__post_init__")) is not None:
                cls.__post_init__ = lambda self, *arguments: post_init(self, *arguments[1:])

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):  # the constructor has set it before
            self._given |= {name}
        super().__setattr__(name, value)


if not TYPE_CHECKING:
    GivenFields._replaced = property(lambda self: self)

Settings = TypeVar("Settings", bound=GivenFields)


def given_fields(settings: Any) -> frozenset[str]:
    """Names of the fields of a dataclass that were given; none if it does not record them."""
    found: frozenset[str] = getattr(settings, "_given", frozenset())
    return found


def set_given_fields(settings: GivenFields, names: Iterable[str]) -> None:
    """Record ``names`` as the fields that were given."""
    settings._given = frozenset(names)


def completed(settings: Settings, default: GivenFields) -> Settings:
    """Return a copy of ``settings`` whose other fields have the values of ``default``.

    These are the fields that were not given. A field that a subclass of the default's class
    declares again has the default of the subclass. Settings with every field, such as those of a
    saved run, do not tell which of them were given: the fields that differ from ``default`` count.
    """
    made, given = copy.copy(settings), given_fields(settings)
    shared = [f.name for f in fields(default) if f in fields(settings)]
    values = {name: getattr(default, name) for name in shared}
    if given.issuperset(f.name for f in fields(settings)):
        given = frozenset(n for n in given if getattr(settings, n) != values.get(n, ...))
    elif not settings._is_complete:
        vars(made).update({n: value for n, value in values.items() if n not in given})
    made._given, made._is_complete = given, True
    return made
