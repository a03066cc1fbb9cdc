"""Dataclasses that record which of their fields were set explicitly."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypeVar


@dataclass
class GivenFields:
    """Base class for dataclasses that record which of their fields were set explicitly.

    A field counts as explicitly set if it was passed to the constructor or ``dataclasses.replace``,
    or assigned later. Comparison, representation, ``vars``, pickling and copying are unaffected.

    Examples:
        >>> from dataclasses import replace
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
        # dataclasses.replace(old, **changes) passes the changes, then the other fields in order.
        # This pseudo-field is the first of the other fields, and its value is `old`.
        _replaced: InitVar[Any] = field(default=None, kw_only=True)

        def __new__(cls, *args: Any, **kwargs: Any) -> Self:
            """Record the argument names, or only those changed by ``dataclasses.replace``."""
            made, old = super().__new__(cls), kwargs.get("_replaced")
            positional = [f.name for f in fields(cls) if not f.kw_only]
            names = [*positional[: len(args)], *kwargs]
            if old is not None:
                names = [*given_fields(old), *names[: names.index("_replaced")]]
            made._record(names, is_complete=old is not None and old._is_complete)
            return made

        def __init_subclass__(cls, **options: Any) -> None:
            """Wrap ``__post_init__`` so that it does not receive the pseudo-field."""
            super().__init_subclass__(**options)
            if (post_init := vars(cls).get("__post_init__")) is not None:
                cls.__post_init__ = lambda self, *arguments: post_init(self, *arguments[1:])

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. After construction, also record it as explicitly set."""
        if name in vars(self):
            self._given |= {name}
        super().__setattr__(name, value)

    def _record(self, names: Iterable[str], *, is_complete: bool) -> None:
        self._given: frozenset[str] = frozenset(names)
        self._is_complete: bool = is_complete


if not TYPE_CHECKING:
    GivenFields._replaced = property(lambda self: self)
    del GivenFields.__annotations__["_replaced"]  # not a setting

Settings = TypeVar("Settings", bound=GivenFields)


def given_fields(settings: Any) -> frozenset[str]:
    """Return the names of explicitly set fields, or an empty set if none are recorded."""
    found: frozenset[str] = getattr(settings, "_given", frozenset())
    return found


def completed(settings: Settings, default: GivenFields, is_default: bool = False) -> Settings:
    """Return a copy of ``settings`` with a recipe's defaults for fields not set explicitly.

    If every field was passed, as for a saved run, only fields that differ from ``default`` count as
    explicitly set.

    Args:
        settings: group of settings.
        default: the recipe's default for this group. Fields redeclared by a subclass keep the
            subclass's default.
        is_default: whether ``settings`` is this default and has no explicitly set fields.
    """
    made, given = copy.copy(settings), given_fields(settings)
    shared = [f.name for f in fields(default) if f in fields(settings)]
    values = {name: getattr(default, name) for name in shared}
    if given.issuperset(f.name for f in fields(settings)):
        given = frozenset(n for n in given if getattr(settings, n) != values.get(n, ...))
    elif not settings._is_complete:
        vars(made).update({n: value for n, value in values.items() if n not in given})
    made._record(() if is_default else given, is_complete=True)
    return made
