"""Plain values: how they compare, and nested ones as one level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values of a setting are the same; ``False`` and 0 are not."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested plain values as one level, keyed by dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping)
        found |= flat(value, f"{path}{name}.") if nested else {f"{path}{name}": value}
    return found
