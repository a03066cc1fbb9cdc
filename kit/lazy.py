"""Names whose modules are imported on first access."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562), from its names by module."""

    def get(name: str) -> Any:
        for module, names in homes.items():
            if name in names:
                return getattr(importlib.import_module(f"{package}.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted(name for names in homes.values() for name in names)


def module_and_name(text: str) -> tuple[str, str]:
    """Split ``module:Name`` at its last colon; without a colon, the module is empty."""
    module, _, name = text.rpartition(":")
    return module, name
