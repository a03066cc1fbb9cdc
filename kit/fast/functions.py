"""Find the values that functions depend on, such as closures, globals and bound objects."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor, nn

PLAIN = (bool, int, float, str, tuple, NoneType, np.generic)
"""Types of plain values, which are compared by equality."""
_OPAQUE = (type, ModuleType, Tensor, TensorDictBase)
"""Types of objects that are not searched."""
_LIBRARIES = frozenset({"torch", "tensordict", "torchrl", "kit"})
_STDLIB = sys.stdlib_module_names
_contents = operator.attrgetter("cell_contents")


class CapturedVariables:
    """Closure cells, globals and object attributes that custom functions read.

    Attributes are found by the names that occur in the code. The code
    ``self.owner.ledger.policy_steps``, for example, includes the attributes ``owner``, ``ledger``
    and ``policy_steps`` of every object on this path. For a property, the attributes that its
    getter reads are included.

    Args:
        found: Functions and the objects that these functions use. Library functions are ignored.

    Attributes:
        values: Values of the variables when this object was created.
        containers: Dictionaries and lists among the attribute values.
    """

    def __init__(self, found: Iterable[Any]) -> None:
        found = [*found]
        custom = [f for f in found if isinstance(f, FunctionType) and _is_custom(f)]
        named = [(f.__globals__, name) for f in custom for name in _names_in(f.__code__)]
        entries = [(table, name) for table, name in named if _may_change(table.get(name, type))]
        attributes = _attributes(found, {name for _, name in named})
        read = [table[name] for table, name in attributes]
        self.containers = [value for value in read if isinstance(value, (dict, list))]
        entries += attributes
        self._entries = [table for table, _ in entries], [name for _, name in entries]
        self._cells = [cell for f in custom for cell in f.__closure__ or () if _is_filled(cell)]
        self.values = [*self._current()]

    def _current(self) -> Iterator[Any]:
        return chain(map(operator.getitem, *self._entries), map(_contents, self._cells))

    def changed(self) -> bool:
        """Return whether any variable has a new value since this object was created."""
        return not all(map(is_same, self._current(), self.values))


def _attributes(objects: Sequence[Any], names: set[str]) -> list[tuple[dict[str, Any], str]]:
    """Return a (dictionary, key) pair for each attribute with one of these names.

    Objects are searched recursively. Attributes of modules and of ``objects`` themselves are
    omitted. For a property, the search continues with the names in the getter's code.
    """
    found: list[tuple[dict[str, Any], str]] = []
    queue = [(item, names) for item in objects]
    roots, seen = {id(item) for item in objects}, set()
    while queue:
        item, wanted = queue.pop()
        if isinstance(item, (*_OPAQUE, FunctionType)) or not hasattr(item, "__dict__"):
            continue
        for name in [name for name in wanted if (id(item), name) not in seen]:
            seen.add((id(item), name))
            getter = getattr(getattr(type(item), name, None), "fget", None)
            if isinstance(getter, FunctionType):
                queue.append((item, {*_names_in(getter.__code__)}))
            elif name in vars(item):
                if id(item) not in roots and not isinstance(item, nn.Module):
                    found.append((vars(item), name))
                queue.append((vars(item)[name], names | wanted))
    return found


def reachable_objects(watched: Sequence[Any]) -> Any:
    """Return the watched objects and all objects that their functions use."""
    found: dict[int, Any] = {}
    queue = [*watched]
    while queue:
        item = _unwrap(queue.pop())
        if id(item) not in found and not isinstance(item, _OPAQUE):
            found[id(item)] = item
            queue += _used_by(item)
    return found.values()


def _used_by(one: Any) -> list[Any]:
    """Return the objects that a function uses, or an object's functions and modules."""
    if isinstance(one, functools.partial):
        return [one.func, *one.args, one.keywords]
    if isinstance(one, MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, FunctionType):  # skips functions from other files
        scope, captured = one.__globals__, CapturedVariables([one]).values
        return [v for v in captured if getattr(v, "__globals__", scope) is scope]
    if isinstance(one, nn.Module):
        parts = [*modules_of(one)]
        classes = {kind for part in parts for kind in type(part).__mro__}
        places: list[Any] = [vars(place).values() for place in (*classes, *parts)]
        return [value for values in places for value in values if _is_custom(value)]
    entries = getattr(one, "__dict__", one)
    values = entries.values() if isinstance(entries, dict) else entries
    several = isinstance(entries, (dict, list, tuple))
    return [v for v in values if isinstance(v, nn.Module) or _is_custom(v)] if several else []


def modules_of(watched: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, its submodules, and modules that are plain attributes.

    TorchRL's losses store their networks as plain attributes, because they register the parameters
    separately. A module in a list is not registered as a submodule either.
    """
    found: set[int] = set()
    queue = [watched]
    while queue:
        module = queue.pop()
        if id(module) not in found:
            found.add(id(module))
            yield module
            attributes = (*module._modules.values(), *vars(module).values())
            queue += [part for value in attributes for part in _modules_in(value)]


def _modules_in(value: Any) -> list[nn.Module]:
    items = value.values() if isinstance(value, dict) else value
    values = items if isinstance(value, (dict, list, tuple)) else [value]
    return [item for item in values if isinstance(item, nn.Module)]


def _is_custom(function: Any) -> bool:
    """Return whether a value is a partial, or a function or method that is not from a library."""
    if isinstance(function, functools.partial):
        return True
    function = _unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):
        return False
    installed = "site-packages" in function.__code__.co_filename or _package(function) in _STDLIB
    return is_foreign(function) and not installed


def _unwrap(function: Any) -> Any:
    """Return the function that decorators wrap, such as ``forward`` of TorchRL's losses."""
    return inspect.unwrap(function) if isinstance(function, FunctionType) else function


def is_foreign(function: Any) -> bool:
    """Return whether a function or class is defined outside PyTorch, TorchRL and kit."""
    return _package(function) not in _LIBRARIES


def _package(function: Any) -> str:
    return str(function.__module__).partition(".")[0]


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the global and attribute names in a code object and its nested functions."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _may_change(value: Any) -> bool:
    return not isinstance(value, (type, ModuleType))


def _is_filled(cell: Any) -> bool:
    try:
        return _may_change(cell.cell_contents)
    except ValueError:  # the cell is empty
        return False


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are the same object, or equal plain values of the same type."""
    alike = type(one) is type(other) and isinstance(one, PLAIN)
    return one is other or (alike and bool(one == other))
