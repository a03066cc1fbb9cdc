"""Comparison, flattening and parsing of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit.steps.errors import SettingError


def same_value(one: Any, other: Any) -> bool:
    """Return whether two setting values are equal. ``False`` and 0 are not equal."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one level with dotted names as keys."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping)
        found |= flat(value, f"{path}{name}.") if nested else {f"{path}{name}": value}
    return found


def wrapper_names(entries: Any, field: str = "env.wrappers") -> list[tuple[str, Mapping[str, Any]]]:
    """Return the name and the keyword arguments of each wrapper in a setting.

    Args:
        entries: names, or mappings of a name to keyword arguments; or one such entry.
        field: name of the setting in errors.

    Raises:
        SettingError: if an entry is neither of these.
    """
    named: list[tuple[str, Mapping[str, Any]]] = []
    for entry in entries if isinstance(entries, (list, tuple)) else [entries]:
        for name, kwargs in entry.items() if isinstance(entry, Mapping) else [(entry, {})]:
            if not isinstance(name, str) or not isinstance(kwargs, (Mapping, type(None))):
                reason = "Each wrapper is a name, or a mapping of a name to keyword arguments"
                raise SettingError(field, entry, reason, "For example, module:Class")
            named.append((name, kwargs or {}))
    return named
