"""Public names: the ``__all__`` of ``kit`` and of its packages. Recipes and docs use no others."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import re
from collections import Counter
from pathlib import Path

import pytest

import kit
from kit.lazy import imports_of

ROOT = Path(__file__).parents[1]
MODULES = [f"kit.{module.name}" for module in pkgutil.iter_modules(kit.__path__) if module.ispkg]
PACKAGES = {name: getattr(importlib.import_module(name), "__all__", []) for name in MODULES}
PUBLIC = [("kit", name) for name in kit.__all__]
PUBLIC += [(package, name) for package, names in PACKAGES.items() for name in names]


def test_packages_export_disjoint_names():
    counts = Counter(name for names in PACKAGES.values() for name in names)
    assert [name for name, count in counts.items() if count > 1] == []


def test_kit_exports_the_same_objects_as_its_packages():
    for package, names in PACKAGES.items():
        for name in {*names} & {*kit.__all__}:
            assert getattr(kit, name) is getattr(importlib.import_module(package), name), name


def test_public_names_have_docstrings():
    values = {f"{p}.{name}": getattr(importlib.import_module(p), name) for p, name in PUBLIC}
    documented = {n: v for n, v in values.items() if inspect.isclass(v) or inspect.isfunction(v)}
    assert [name for name, value in documented.items() if not value.__doc__] == []


def test_public_names_hide_no_module():
    for package, name in PUBLIC:
        folder = Path(importlib.import_module(package).__path__[0])
        assert not (folder / f"{name}.py").exists(), name
        assert not (folder / name).exists(), name


@pytest.mark.parametrize("package", ["kit", *MODULES])
def test_lazy_packages_import_the_names_they_export(package):
    module = importlib.import_module(package)
    if "lazy" in vars(module):
        assert imports_of(package).keys() - {"lazy"} == {*module.__all__} == {*dir(module)}


# ---------------------------------------------------------------------- imports
def python_sources() -> dict[str, str]:
    """Return the code of recipes, documentation pages and notebooks by where it is."""
    sources = {path.name: path.read_text() for path in (ROOT / "recipes").glob("*.py")}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        sources |= {f"{page.name}:{number}": block for number, block in enumerate(blocks)}
    for page in (ROOT / "docs").rglob("*.ipynb"):
        cells = json.loads(page.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        sources[page.name] = "\n".join(code)
    return sources


def test_recipes_and_docs_import_public_names_only():
    public, private = {*PUBLIC}, []
    for where, code in python_sources().items():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "kit":
                names = {(str(node.module), alias.name) for alias in node.names}
                private += [(where, *name) for name in names - public]
            elif isinstance(node, ast.Import):
                modules = {alias.name for alias in node.names if alias.name.startswith("kit.")}
                private += [(where, module) for module in modules - {*MODULES}]
    assert private == []
