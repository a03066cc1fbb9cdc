"""Lazy imports for packages: public names are imported on first access."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package with lazy imports (PEP 562).

    The package imports its names only in an ``if TYPE_CHECKING:`` block. This block is read by type
    checkers, and by kit when a name is first accessed.
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
    """Return the source modules of a package's imports from kit, keyed by imported name."""
    import ast  # imported here to keep `import kit` fast

    loader: Any = importlib.import_module(package).__loader__
    tree = ast.parse(loader.get_source(package))
    return {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kit.")
        for alias in node.names
    }


def module_and_name(text: str) -> tuple[str, str]:
    """Split ``module:Name`` at the last colon. Without a colon, the module is empty."""
    module, _, name = text.rpartition(":")
    return module, name
