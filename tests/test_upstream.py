"""docs/upstream.md lists the private names of other libraries that the kit uses, and they exist."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

import kit

ROOT = Path(kit.__file__).parents[1]
LIBRARIES = (
    "torch", "torchrl", "tensordict", "gymnasium", "numpy", "hydra", "omegaconf", "numba", "random",
    "sys",
)  # fmt: skip
MODULES = {"_C", "_ops"}
"""Private modules; the names in them are listed instead."""
NOT_PRIVATE = {"_asdict", "_fields", "_field_defaults", "_replace", "_COUNTERS"}
"""Methods of named tuples, and an attribute of the kit's collectors."""
GENERATED = {"_abc_impl", "_all_schedulable_buffers", "_backward_cls"}
"""Attributes that decorators and metaclasses add to each class."""


def is_private(name: str) -> bool:
    return name[:1] == "_" and name[-2:] != "__"


# ---------------------------------------------------------------------- names in the source
def is_own(value: ast.AST) -> bool:
    """Return whether it is the object itself, whose attributes a kit class may define."""
    if isinstance(value, ast.Call):
        value = value.func
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def defined(nodes: list[ast.AST]) -> set[str]:
    """Return the private names that a module or its classes define."""
    names = set()
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if is_own(node.value) else set()
    return names


def foreign(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the private names that a module imports or reads from objects of other classes."""
    local = defined(nodes)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(LIBRARIES):
            path = str(node.module).split(".")
            yield from (a.name for a in node.names if any(map(is_private, [*path, a.name])))
        elif isinstance(node, ast.Attribute):
            inside = isinstance(node.value, ast.Attribute) and node.value.attr in MODULES
            private = is_private(node.attr) and node.attr not in local | MODULES
            if inside or (private and not is_own(node.value)):
                yield node.attr
        elif isinstance(node, ast.Call) and node.args and not is_own(node.args[0]):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function in ("getattr", "hasattr", "setattr", "attrgetter"):
                texts = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
                yield from (t for t in texts if is_private(t) and t not in local)


def in_source() -> set[tuple[str, str]]:
    """Return the private names that the syntax trees of the kit show, with their files."""
    return {
        (name, path.relative_to(ROOT).as_posix())
        for path in ROOT.glob("kit/**/*.py")
        for name in foreign([*ast.walk(ast.parse(path.read_text()))])
        if name not in NOT_PRIVATE
    }


# ---------------------------------------------------------------------- names of base classes
def names_in(code: CodeType) -> set[str]:
    inner = [names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


@functools.cache
def names_of(cls: type) -> frozenset[str]:
    """Return the private names that a class, without its bases, defines or uses."""
    found = {*vars(cls), *vars(cls).get("__annotations__", ())}
    for value in vars(cls).values():
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
        found |= names_in(code) if code else set()
    mangled = f"_{cls.__name__.lstrip('_')}__"
    return frozenset(n for n in found if is_private(n) and not n.startswith(mangled)) - GENERATED


def inherited() -> Iterator[tuple[str, str]]:
    """Yield the private names that classes of the kit share with their foreign base classes."""
    for module in pkgutil.walk_packages(kit.__path__, "kit."):
        if module.name == "kit.buffers.numba_tree":
            pytest.importorskip("numba")
        loaded = importlib.import_module(module.name)
        for cls in vars(loaded).values():
            if isinstance(cls, type) and cls.__module__ == module.name:
                file = Path(str(loaded.__file__)).relative_to(ROOT).as_posix()
                for base in cls.__mro__[1:]:
                    if base.__module__.startswith(LIBRARIES):
                        yield from ((name, file) for name in names_of(cls) & names_of(base))


# ---------------------------------------------------------------------- the page
def rows() -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Yield names, files and tests of each row of the page."""
    text = (ROOT / "docs" / "upstream.md").read_text()
    for row in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE):
        names, files, _, tests = row.split(" | ")
        yield tuple(re.findall(r"`([^`]+)`", cell) for cell in (names, files, tests))


def listed() -> set[tuple[str, str]]:
    """Return the listed names, without their path, and their files."""
    return {
        (name.rpartition(".")[2], f"kit/{file}")
        for names, files, _ in rows()
        for name in names
        for file in files
    }


def found(path: str) -> bool:
    """Return whether a dotted name exists, as an attribute or in the code of its class."""
    parts = path.split(".")
    for number in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:number]))
        except ModuleNotFoundError:
            continue
        for part in parts[number:-1]:
            value = getattr(value, part)
        if hasattr(value, parts[-1]):
            return True
        return isinstance(value, type) and any(parts[-1] in names_of(c) for c in value.__mro__)
    return False


def test_upstream_page_lists_private_names_of_source():
    assert in_source() - listed() == set()


def test_upstream_page_lists_private_names_of_base_classes():
    # In a new process: TorchRL adds attributes to the classes of environments once they are used.
    code = "from tests.test_upstream import *; print(sorted({*inherited()} - listed()))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_upstream_page_lists_names_that_files_contain():
    for name, file in listed():
        assert re.search(rf"{name}\b", (ROOT / file).read_text()), f"{file} does not use {name}"


def test_upstream_page_lists_tests_that_exist():
    for names, _, tests in rows():
        assert tests, names
        for test in tests:
            assert (ROOT / "tests" / test).exists(), test


def test_upstream_names_exist_in_installed_libraries():
    assert [name for names, _, _ in rows() for name in names if not found(name)] == []


# ---------------------------------------------------------------------- the search itself
def test_search_finds_all_kinds_of_private_names():
    source = """
from torch._ops import OpOverload
from torch.optim.optimizer import _hooks
from kit.fast import _own
class Part(Base):
    def use(self, module):
        self._kept = torch._C.Graph()
        module._kept, module._buffers, self._inherited
        getattr(module, "_modules", None), getattr(module, "_kept")
"""
    found = set(foreign([*ast.walk(ast.parse(source))]))
    assert found == {"OpOverload", "_hooks", "Graph", "_buffers", "_modules"}
