"""Convert the state of Python environments to JSON values and back.

Supported values are numbers, strings, arrays and views, containers, enums, random generators,
spaces, functions with closures, MuJoCo models and data, and objects of classes from the
environment's own package. Aliases are preserved. Renderers, classes and modules are skipped. Any
other value raises StateCaptureError with the value's path.
"""

from __future__ import annotations

import base64
import enum
import functools
import logging
import random
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from kit.envs import mujoco_state

_CONSTANT = (
    gym.envs.registration.EnvSpec, type, types.ModuleType, np.ufunc, np.dtype, logging.Logger,
)  # fmt: skip
_DRAWS = frozenset({"pygame", "glfw", "OpenGL", "pyglet"})
"""Packages used only for rendering."""
_ARGUMENTS = frozenset({"_saved_kwargs", "_cached_spec", "_ezpickle_args", "_ezpickle_kwargs"})
"""Attributes in which Gymnasium stores a wrapper's constructor arguments."""
_ATOMS = (bool, int, float, str)
_CONTAINERS: dict[str, Any] = {
    kind.__name__: kind for kind in (list, set, deque, dict, OrderedDict, Counter)
}
_PUT_BACK = frozenset({"object", "function", "partial", "space", "mujoco", "shown"})
"""Kinds of encoded values that can only be restored into an existing object."""
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


class StateCaptureError(TypeError):
    """Raised if an attribute of an environment cannot be captured or restored."""


# ---------------------------------------------------------------------- encoding
class Encoder:
    """Converts values to plain values and replaces repeated objects with references.

    Args:
        found: layers of an environment. They are assigned the first reference numbers.
        classes: objects from the packages of these classes are encoded by attribute; ``None``:
            the classes of the layers.
    """

    def __init__(self, found: Any, classes: Iterable[type] | None = None) -> None:
        self.kept: list[Any] = list(found)  # keeps objects alive, so that ids stay unique
        self.places: list[str] = [""] * len(self.kept)
        self._numbers = {id(layer): number for number, layer in enumerate(found)}
        self._own = {package(kind) for kind in (map(type, found) if classes is None else classes)}

    def layer(self, layer: Any) -> dict[str, Any]:
        """Encode a wrapper or the base environment."""
        name = type(layer).__name__
        if hasattr(type(layer), "load_state_dict"):
            return {"own": self(layer.state_dict(), name)}
        if _has_slots(type(layer)):
            raise StateCaptureError(f"{name} stores its state in __slots__")
        return {"attributes": self.attributes(layer, name)}

    def attributes(self, owner: Any, where: str) -> dict[str, Any]:
        """Encode an object's attributes, except constants."""
        values = {name: value for name, value in vars(owner).items() if name not in _ARGUMENTS}
        return {
            name: self(value, f"{where}.{name}")
            for name, value in values.items()
            if not _is_constant(value)
        }

    def __call__(self, value: Any, where: str) -> Any:
        """Encode a value. Error messages contain ``where``, the path of the value."""
        if value is None or type(value) in _ATOMS:
            return value
        if id(value) in self._numbers:
            return {"same": self._numbers[id(value)]}
        if type(value) is tuple:
            return {"tuple": self._items(value, where)}
        if isinstance(value, enum.Enum):
            kind = type(value)
            return {"enum": value.name, "class": [kind.__module__, kind.__qualname__]}
        if isinstance(value, np.generic):
            return {"scalar": self._array(np.asarray(value), where)}
        number = self._numbers[id(value)] = len(self.kept)
        self.kept.append(value)
        self.places.append(where)
        for kind, write in self._WRITERS:
            if isinstance(value, kind):
                return {**write(self, value, where), "number": number}
        name = type(value).__name__
        if name in mujoco_state.KINDS:
            return {"mujoco": name, **mujoco_state.capture(value, self, where), "number": number}
        if package(type(value)) not in self._own or not _is_plain(type(value)):
            raise StateCaptureError(f"{where} is a {name}, which cannot be captured")
        return {"object": name, "attributes": self.attributes(value, where), "number": number}

    def _items(self, values: Any, where: str) -> list[Any]:
        return [self._item(value, f"{where}[{index}]") for index, value in enumerate(values)]

    def _item(self, value: Any, where: str) -> Any:
        """Encode a container item. Objects that must be restored in place are not supported."""
        encoded = self(value, where)
        if isinstance(encoded, dict) and encoded.keys() & _PUT_BACK:
            name = type(value).__name__
            raise StateCaptureError(f"{where} is a {name}, which cannot be captured")
        return encoded

    def _container(self, value: Any, where: str) -> dict[str, Any]:
        name = type(value).__name__
        if type(value) not in _CONTAINERS.values():
            raise StateCaptureError(f"{where} is a {name}, which cannot be captured")
        if isinstance(value, dict):
            named = [[self(k, where), self._item(v, f"{where}[{k!r}]")] for k, v in value.items()]
            return {name: named}
        length = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
        return {name: self._items(value, where), **length}

    def _array(self, value: np.ndarray[Any, Any], where: str) -> dict[str, Any]:
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if type(value) is not np.ndarray or value.dtype.hasobject:
            raise StateCaptureError(f"{where} is an array of Python objects or an array subclass")
        if type(owner.base).__name__ == "PyCapsule":  # MuJoCo's arrays are captured separately
            return {"shown": list(value.shape)}
        if not isinstance(owner.base, (bytes, types.NoneType)):
            raise StateCaptureError(f"{where} is a view of a {type(owner.base).__name__}")
        described = {"dtype": dtype_to_descr(value.dtype), "shape": list(value.shape)}
        if owner is not value and owner.flags.c_contiguous and owner.base is None:
            begin = value.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
            place = {"offset": begin, "strides": list(value.strides)}
            return {"view": self(owner, f"{where}.base"), **place, **described}
        return {"array": base64.b64encode(value.tobytes()).decode(), **described}

    def _generator(self, value: np.random.Generator, where: str) -> dict[str, Any]:
        seeds = getattr(value.bit_generator, "seed_seq", None)
        entropy = seeds.state if type(seeds) is np.random.SeedSequence else None
        return {"generator": self(value.bit_generator.state, where), "seeds": self(entropy, where)}

    def _random_state(self, value: np.random.RandomState, where: str) -> dict[str, Any]:
        return {"random_state": self(value.get_state(legacy=False), where)}

    def _python_random(self, value: random.Random, where: str) -> dict[str, Any]:
        return {"random": self(value.getstate(), where)}

    def _space(self, value: gym.Space[Any], where: str) -> dict[str, Any]:
        return {"space": [self(part._np_random, where) for part in _spaces_in(value)]}

    def _function(self, value: Any, where: str) -> dict[str, Any]:
        cells = [
            {} if _is_constant(content) else self(content, f"{where}'s {name}")
            for name, content in _enclosed(value)
        ]
        return {"function": value.__qualname__, "cells": cells,
                "attributes": self.attributes(value, where)}  # fmt: skip

    def _method(self, value: Any, where: str) -> dict[str, Any]:
        return {"function": value.__name__, "of": self(value.__self__, where)}

    def _partial(self, value: functools.partial[Any], where: str) -> dict[str, Any]:
        arguments = [*value.args, *value.keywords.values()]
        if not all(v is None or type(v) in _ATOMS or _is_constant(v) for v in arguments):
            raise StateCaptureError(f"{where} is a partial function with object arguments")
        return {"partial": None if _is_constant(value.func) else self(value.func, where)}

    _WRITERS: tuple[tuple[Any, Callable[..., dict[str, Any]]], ...] = (
        (np.ndarray, _array),
        ((list, set, deque, dict), _container),
        (np.random.Generator, _generator),
        (np.random.RandomState, _random_state),
        (random.Random, _python_random),
        (gym.Space, _space),
        (types.FunctionType, _function),
        ((types.MethodType, types.BuiltinFunctionType), _method),
        (functools.partial, _partial),
    )


def _is_constant(value: Any) -> bool:
    """Return whether a value has no state, such as a class, logger or global RNG."""
    owner = getattr(value, "__self__", value) if callable(value) else value
    if owner is np.random.mtrand._rand or owner is getattr(random.seed, "__self__", None):
        return True
    if isinstance(value, types.BuiltinFunctionType):
        return isinstance(owner, (types.NoneType, types.ModuleType))
    draws = package(type(value)) in _DRAWS or type(value).__name__ == "MujocoRenderer"
    return draws or isinstance(value, _CONSTANT)


def package(kind: type) -> str:
    """Return the package that defines a class; empty if the class has no ``__module__``."""
    return str(getattr(kind, "__module__", "")).partition(".")[0]


def _is_plain(kind: type) -> bool:
    """Return whether ``__dict__`` holds the complete state of the class's objects."""
    made_plainly = getattr(kind, "__new__", None) is object.__new__ and not _has_slots(kind)
    return made_plainly and all(base.__flags__ & _OF_PYTHON for base in kind.__mro__[:-1])


def _has_slots(kind: type) -> bool:
    return any(vars(base).get("__slots__") for base in kind.__mro__)


_OF_PYTHON = 1 << 9
"""Type flag of classes defined in Python code (``Py_TPFLAGS_HEAPTYPE``)."""


def _spaces_in(space: gym.Space[Any]) -> Iterator[gym.Space[Any]]:
    """Yield a space and all its nested spaces."""
    yield space
    inner = getattr(space, "spaces", ())
    named = (getattr(space, f"{name}_space", None) for name in ("feature", "node", "edge"))
    for part in (*(inner.values() if isinstance(inner, dict) else inner), *named):
        if isinstance(part, gym.Space):
            yield from _spaces_in(part)


def _refilled(kept: Any, made: Any) -> Any:
    """Copy ``made`` into ``kept`` and return ``kept``, or return ``made`` if this is impossible."""
    if kept is made or type(kept) is not type(made):
        return made
    if isinstance(made, np.ndarray) and made.base is None:
        if (kept.shape, kept.dtype) != (made.shape, made.dtype):
            return made
        kept[...] = made
    elif isinstance(made, np.random.Generator):
        if repr(kept.bit_generator.seed_seq) != repr(made.bit_generator.seed_seq):
            return made  # different seed sequences spawn different generators
        kept.bit_generator.state = made.bit_generator.state
    elif isinstance(made, tuple(_CONTAINERS.values())):
        kept.clear()
        (kept.extend if isinstance(made, (list, deque)) else kept.update)(made)
    else:
        return made
    return kept


def _does_the_same(function: Any, other: Any) -> bool:
    """Return whether two callables are the same method or instances of the same class."""
    if type(function) is not type(other):
        return False
    if isinstance(function, types.MethodType):
        same = function.__func__ is other.__func__
        return same and type(function.__self__) is type(other.__self__)
    if isinstance(function, types.BuiltinFunctionType):
        same = type(function.__self__) is type(other.__self__)
        return same and function.__name__ == other.__name__
    return not isinstance(function, types.FunctionType | functools.partial)


def _enclosed(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and content of each variable in a function's closure."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable has not been assigned yet
            yield name, None


# ---------------------------------------------------------------------- decoding
class Decoder:
    """Decodes the output of :class:`Encoder` into the objects of an identical environment.

    Decoding is safe for untrusted input: only plain values are created, no module is imported, and
    only enum classes are looked up by name. The environment keeps its own functions and callables.

    Args:
        found: layers of the environment.
        kept: objects to restore in place, keyed by reference number.
    """

    def __init__(self, found: Any, kept: Mapping[int, Any] | None = None) -> None:
        self._kept = kept or {}
        self._known: dict[int, Any] = {**dict(enumerate(found)), **self._kept}
        self._own = {package(type(layer)) for layer in found}

    def attributes(self, owner: Any, values: dict[str, Any]) -> None:
        """Restore an object's attributes, including attributes that only exist after a step.

        Raises:
            StateCaptureError: if an attribute would shadow a method or a property.
        """
        for name, value in values.items():
            hidden = None if name in vars(owner) else getattr(type(owner), name, None)
            code = callable(hidden) or hasattr(hidden, "__get__") or name.startswith("__")
            cached = isinstance(hidden, functools.cached_property)
            if (code and not cached) or name in _ARGUMENTS:
                raise StateCaptureError(f"{type(owner).__name__}.{name} is not a state attribute")
            vars(owner)[name] = self._in_place_of(vars(owner).get(name), value)

    def _in_place_of(self, present: Any, value: Any) -> Any:
        """Decode a replacement for ``present``. A callable must match the callable it replaces."""
        made = self(value, present)
        if callable(made) and made is not present:
            self._demand(_does_the_same(made, present), f"{type(made).__name__} to call", present)
        return made

    def __call__(self, value: Any, present: Any = None) -> Any:
        """Decode one value.

        Args:
            value: encoded value.
            present: value at the same path in a new environment.

        Raises:
            StateCaptureError: if the value is an object and ``present`` has a different type.
        """
        if value is None or type(value) in _ATOMS:
            return value
        if "same" in value:
            return self._known[value["same"]]
        if "tuple" in value:
            return tuple(map(self, value["tuple"]))
        if "enum" in value:
            return self._enum(value, present)
        if "scalar" in value:
            return self._array(value["scalar"])[()]
        for name, read in self._READERS.items():
            if name in value:
                made = read(self, value)
                break
        else:
            made = self._fill(value, present)
        number = value["number"]
        self._known[number] = made = _refilled(self._kept.get(number), made)
        return made

    def _container(self, value: dict[str, Any]) -> Any:
        name = next(name for name in _CONTAINERS if name in value)
        made = deque(maxlen=value["maxlen"]) if name == "deque" else _CONTAINERS[name]()
        self._known.setdefault(value["number"], made)  # items may contain references to ``made``
        if isinstance(made, dict):
            for key, item in value[name]:
                made[self(key)] = self(item)
        else:
            add = made.add if isinstance(made, set) else made.append
            for item in value[name]:
                add(self(item))
        return made

    def _array(self, value: dict[str, Any]) -> np.ndarray[Any, Any]:
        raw = np.frombuffer(base64.b64decode(value["array"]), descr_to_dtype(value["dtype"]))
        return raw.reshape(value["shape"]).copy()

    def _view(self, value: dict[str, Any]) -> np.ndarray[Any, Any]:
        dtype = descr_to_dtype(value["dtype"])
        if dtype.hasobject:  # NumPy would interpret the bytes as object addresses
            raise ValueError(f"arrays of Python objects cannot be restored: {dtype}")
        place = value["offset"], value["strides"]
        return np.ndarray(value["shape"], dtype, self(value["view"]), *place)

    def _generator(self, value: dict[str, Any]) -> np.random.Generator:
        state, seeds = self(value["generator"]), self(value["seeds"])
        if state["bit_generator"] not in _BIT_GENERATORS:
            raise ValueError(f"not a random generator: {state['bit_generator']!r}")
        kind = getattr(np.random, state["bit_generator"])
        made = np.random.Generator(kind(np.random.SeedSequence(**seeds) if seeds else 0))
        made.bit_generator.state = state
        return made

    def _random_state(self, value: dict[str, Any]) -> np.random.RandomState:
        made = np.random.RandomState()
        made.set_state(self(value["random_state"]))
        return made

    def _python_random(self, value: dict[str, Any]) -> random.Random:
        made = random.Random()
        made.setstate(self(value["random"]))
        return made

    _READERS: ClassVar[dict[str, Callable[..., Any]]] = {
        **dict.fromkeys(_CONTAINERS, _container),
        "array": _array,
        "view": _view,
        "generator": _generator,
        "random_state": _random_state,
        "random": _python_random,
    }

    def _fill(self, value: dict[str, Any], present: Any) -> Any:
        """Restore an object's state into ``present`` or into a copy of ``present``."""
        if "shown" in value:
            self._demand(isinstance(present, np.ndarray), "MuJoCo array", present)
            return present
        if "of" in value:
            owner = self(value["of"], getattr(present, "__self__", None))
            name = getattr(present, "__name__", None)
            same = type(owner) is type(getattr(present, "__self__", None))
            if name != value["function"] or not same:
                what = f"{type(present).__name__} {name or ''}".strip()
                raise StateCaptureError(f"expected a method {value['function']}, found a {what}")
            return getattr(owner, name)
        if "object" in value:
            kind = type(present)
            own = package(kind) in self._own and _is_plain(kind)
            self._demand(own and kind.__name__ == value["object"], value["object"], present)
            made = self._kept.get(value["number"])
            if type(made) is not type(present):
                made = object.__new__(type(present))  # copy, because ``present`` may be shared
                vars(made).update(vars(present))
            self._known[value["number"]] = made
            self.attributes(made, value["attributes"])
            return made
        self._known[value["number"]] = present
        if "mujoco" in value:
            self._demand(type(present).__name__ == value["mujoco"], value["mujoco"], present)
            mujoco_state.restore(present, value, self)
        elif "space" in value:
            self._demand(isinstance(present, gym.Space), "space", present)
            for part, saved in zip(_spaces_in(present), value["space"], strict=True):
                part._np_random = self(saved)
        elif "partial" in value:
            self._demand(isinstance(present, functools.partial), "partial function", present)
            self(value["partial"], present.func)
        else:
            of_python = isinstance(present, types.FunctionType)
            name = present.__qualname__ if of_python else None
            self._demand(name == value["function"], value["function"], present)
            self.attributes(present, value["attributes"])
            for cell, saved, before in zip(
                present.__closure__ or (), value["cells"], _enclosed(present)
            ):
                if saved != {}:
                    cell.cell_contents = self._in_place_of(before[1], saved)
        return present

    def _enum(self, value: dict[str, Any], present: Any) -> Any:
        """Return a member of the present value's enum class or of an already imported class."""
        module, name = value["class"]
        kind: Any = type(present)
        if (kind.__module__, kind.__qualname__) != (module, name):
            kind = sys.modules.get(module)
            for part in name.split("."):
                kind = vars(kind).get(part) if kind is not None else None
        self._demand(isinstance(kind, enum.EnumMeta), name, present)
        return kind[value["enum"]]

    def _demand(self, holds: bool, wanted: str, present: Any) -> None:
        if not holds:
            raise StateCaptureError(f"expected a {wanted}, found a {type(present).__name__}")
