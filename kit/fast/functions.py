"""What functions use besides their arguments: what they enclose, are bound to, and globals."""

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
"""Types of plain values."""
_KNOWN = (type, ModuleType, Tensor, TensorDictBase)
"""What is not looked into."""
_LIBRARIES = frozenset({"torch", "tensordict", "torchrl", "kit"})
_PYTHONS = sys.stdlib_module_names
_contents = operator.attrgetter("cell_contents")


class Used:
    """The values that custom functions read: closure cells, globals, and attributes of objects.

    Attributes are looked up by the names in the code. For ``self.owner.ledger.policy_steps`` these
    are the attributes ``owner``, ``ledger`` and ``policy_steps`` of every object on the way, and
    the attributes that a property of such a name reads.

    Args:
        found: functions and the objects that they use; functions of libraries are ignored.

    Attributes:
        values: the values when this object was created.
        containers: dictionaries and lists that are attributes.
    """

    def __init__(self, found: Iterable[Any]) -> None:
        found = [*found]
        own = [f for f in found if isinstance(f, FunctionType) and _is_of_others(f)]
        named = [(one.__globals__, name) for one in own for name in _named(one.__code__)]
        known = [(place, name) for place, name in named if _may_change(place.get(name, type))]
        attributes = _attributes(found, {name for _, name in named})
        read = [place[name] for place, name in attributes]
        self.containers = [value for value in read if isinstance(value, (dict, list))]
        known += attributes
        self._entries = [place for place, _ in known], [name for _, name in known]
        self._cells = [cell for one in own for cell in one.__closure__ or () if _is_filled(cell)]
        self.values = [*self._now()]

    def _now(self) -> Iterator[Any]:
        return chain(map(operator.getitem, *self._entries), map(_contents, self._cells))

    def changed(self) -> bool:
        """Whether a name stands for another value now."""
        return not all(map(same, self._now(), self.values))


def _attributes(objects: Sequence[Any], names: set[str]) -> list[tuple[dict[str, Any], str]]:
    """Return dictionary and name of the attributes with these names of objects within objects.

    The objects' own attributes and attributes of modules are omitted. Of a property, the names in
    its code are followed.
    """
    found: list[tuple[dict[str, Any], str]] = []
    left = [(one, names) for one in objects]
    known, seen = {id(one) for one in objects}, set()
    while left:
        one, wanted = left.pop()
        if isinstance(one, (*_KNOWN, FunctionType)) or not hasattr(one, "__dict__"):
            continue
        for name in [name for name in wanted if (id(one), name) not in seen]:
            seen.add((id(one), name))
            getter = getattr(getattr(type(one), name, None), "fget", None)
            if isinstance(getter, FunctionType):
                left.append((one, {*_named(getter.__code__)}))
            elif name in vars(one):
                if id(one) not in known and not isinstance(one, nn.Module):
                    found.append((vars(one), name))
                left.append((vars(one)[name], names | wanted))
    return found


def reached(watched: Sequence[Any]) -> Any:
    """Return objects, and all that the functions among them, and in them, use."""
    found: dict[int, Any] = {}
    left = [*watched]
    while left:
        one = _unwrapped(left.pop())
        if id(one) not in found and not isinstance(one, _KNOWN):
            found[id(one)] = one
            left += _used_by(one)
    return found.values()


def _used_by(one: Any) -> list[Any]:
    """What a function uses; of an object, its functions and modules."""
    if isinstance(one, functools.partial):
        return [one.func, *one.args, one.keywords]
    if isinstance(one, MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, FunctionType):  # functions of other files are left alone
        of_file = one.__globals__
        return [v for v in Used([one]).values if getattr(v, "__globals__", of_file) is of_file]
    if isinstance(one, nn.Module):
        parts = [*modules_of(one)]
        classes = {kind for part in parts for kind in type(part).__mro__}
        places: list[Any] = [vars(place).values() for place in (*classes, *parts)]
        return [value for values in places for value in values if _is_of_others(value)]
    entries = getattr(one, "__dict__", one)
    values = entries.values() if isinstance(entries, dict) else entries
    several = isinstance(entries, (dict, list, tuple))
    return [v for v in values if isinstance(v, nn.Module) or _is_of_others(v)] if several else []


def modules_of(watched: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, its submodules, and modules that are attributes only.

    Losses of TorchRL keep their networks so, as their parameters are elsewhere. Lists hide a
    network that is not to be trained.
    """
    found: set[int] = set()
    left = [watched]
    while left:
        module = left.pop()
        if id(module) not in found:
            found.add(id(module))
            yield module
            attributes = (*module._modules.values(), *vars(module).values())
            left += [one for value in attributes for one in _either(value)]


def _either(value: Any) -> list[nn.Module]:
    """A module, or the modules in a container."""
    inside = value.values() if isinstance(value, dict) else value
    several = inside if isinstance(value, (dict, list, tuple)) else [value]
    return [one for one in several if isinstance(one, nn.Module)]


def _is_of_others(function: Any) -> bool:
    """Whether it is a Python function of no library, a method of one, or partial."""
    if isinstance(function, functools.partial):
        return True
    function = _unwrapped(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):
        return False
    known = "site-packages" in function.__code__.co_filename or _package(function) in _PYTHONS
    return is_foreign(function) and not known


def _unwrapped(function: Any) -> Any:
    """Return what a decorator has wrapped: TorchRL wraps the ``forward`` of every loss."""
    return inspect.unwrap(function) if isinstance(function, FunctionType) else function


def is_foreign(function: Any) -> bool:
    """Whether it may do more than compute tensors: PyTorch's, TorchRL's and ours do not."""
    return _package(function) not in _LIBRARIES


def _package(function: Any) -> str:
    return str(function.__module__).partition(".")[0]


def _named(code: CodeType) -> Iterator[str]:
    """Names that are no variables of a function."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _named(inner)


def _may_change(value: Any) -> bool:
    return not isinstance(value, (type, ModuleType))


def _is_filled(cell: Any) -> bool:
    try:
        return _may_change(cell.cell_contents)
    except ValueError:  # not yet
        return False


def same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal plain values of one type."""
    alike = type(one) is type(other) and isinstance(one, PLAIN)
    return one is other or (alike and bool(one == other))
