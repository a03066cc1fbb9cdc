"""Noticing that a module is no longer what it was."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import nn


class Watch:
    """Notices when a module is no longer what a trace of it has taken for granted.

    A change of a parameter in place goes unnoticed, as it should: programs read parameters where
    they live. Another value of a plain attribute (a coefficient kept as a float, training or
    evaluation mode) and another parameter or buffer object are noticed.

    Args:
        module: what was traced; anything else than an ``nn.Module`` never changes.
        groups: further dictionaries of settings, such as an optimiser's parameter groups.
    """

    def __init__(self, module: Any, groups: Sequence[dict[str, Any]] = ()) -> None:
        self.module = module
        self.groups = groups
        self._places: list[tuple[dict[str, Any], str]] = []
        self._held: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        self._tensors: list[Any] = []
        self.look_closely()

    def settings(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return every plain attribute: where it is, its name and its value."""
        return [(attributes, name, attributes.get(name)) for attributes, name in self._places]

    def changed(self) -> bool:
        """Whether a value or an object that was there at the last look is another one."""
        values = [attributes.get(name) for attributes, name in self._places]
        tensors = [attributes.get(name) for attributes, name in self._held]
        before, self._values = self._values, values
        held, self._tensors = self._tensors, tensors
        if any(map(operator.is_not, tensors, held)):
            return True
        try:
            return bool(values != before)
        except RuntimeError:  # a number became a tensor, which is not compared like one
            return True

    def look_closely(self) -> bool:
        """Whether anything is different from the last look, new attributes and modules included."""
        parts = self.module.modules() if isinstance(self.module, nn.Module) else ()
        places: list[tuple[dict[str, Any], str]] = []
        held: list[tuple[dict[str, Any], str]] = []
        for part in parts:
            attributes = part.__dict__
            for kind in ("_parameters", "_buffers"):
                held += [(attributes[kind], name) for name in attributes[kind]]
            places += [(attributes, n) for n, v in attributes.items() if type(v) in _SETTINGS]
        for group in self.groups:
            places += [(group, n) for n, v in group.items() if type(v) in (*_SETTINGS, tuple)]
        same = _same_places(places, self._places) and _same_places(held, self._held)
        self._places, self._held = places, held
        if same:
            return self.changed()
        self._values = [attributes.get(name) for attributes, name in places]
        self._tensors = [attributes.get(name) for attributes, name in held]
        return True


_SETTINGS = (bool, int, float, str)


def _same_places(ours: Sequence[Any], others: Sequence[Any]) -> bool:
    return [(id(a), n) for a, n in ours] == [(id(a), n) for a, n in others]
