"""Packages that import their public names on first access."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package with lazy imports (PEP 562).

    The package imports its names below ``if TYPE_CHECKING:`` only. That block is the single list of
    imports: type checkers read it, and so does the first access to a name.
    """
    modules: dict[str, str] = {}

    def get(name: str) -> Any:
        if not modules:
            modules.update(imports_of(package))
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)

    return get, lambda: sorted(importlib.import_module(package).__all__)


def imports_of(package: str) -> dict[str, str]:
    """Map each name that the source of ``package`` imports from a kit module to that module."""
    import ast  # here, because `import kit` loads nothing that it does not need

    loader: Any = importlib.import_module(package).__loader__
    tree = ast.parse(loader.get_source(package))
    return {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kit.")
        for alias in node.names
    }


def module_and_name(text: str) -> tuple[str, str]:
    """Split ``module:Name`` at its last colon; without a colon, the module is empty."""
    module, _, name = text.rpartition(":")
    return module, name
