"""Observers change nothing that they are given: whether one has is looked for after each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from kit.hooks.base import Hook


def observes(function: Callable[..., Any]) -> bool:
    """Whether a function is a method of an observer."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    return isinstance(owner, Hook) and owner.kind == "observer"


class Given:
    """The TensorDicts that a hook is given, as they are before its call.

    Entries are compared as objects, and by the version of their tensor, which PyTorch counts up
    with each write: nothing is copied, or read from a device. What is written past PyTorch goes
    unnoticed: through ``numpy()``, ``data``, or a lazily stacked TensorDict.

    Args:
        arguments: of the call; what is no TensorDict is left out.
    """

    def __init__(self, arguments: Sequence[Any]) -> None:
        given = [one for one in arguments if isinstance(one, TensorDictBase)]
        entries = [_entries(one) for one in given]
        versions = [[_version(value) for value in own.values()] for own in entries]
        self._before = list(zip(given, entries, versions))

    def changed(self) -> str:
        """The name of an entry that was written to, replaced, added or removed; or nothing."""
        for given, entries, versions in self._before:
            now = _entries(given)
            if different := now.keys() ^ entries.keys():
                return str(min(different, key=str))
            for (key, value), version in zip(entries.items(), versions):
                if _version(value) != version or (now[key] is not value and _is_kept(given, key)):
                    return str(key)
        return ""


def _entries(given: TensorDictBase) -> dict[Any, Any]:
    return dict(given.items(include_nested=True, leaves_only=True))


def _version(value: Any) -> int:
    """How often a tensor was written to, as far as PyTorch counts it."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _is_kept(given: TensorDictBase, key: Any) -> bool:
    """Whether an entry is an object of its own, and not stacked anew when it is asked for."""
    return given.get(key) is given.get(key)
