"""Comparison and flattening of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
