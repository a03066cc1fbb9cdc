"""Detect changes to the objects that a traced graph depends on."""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Iterator
from itertools import chain
from types import ModuleType
from typing import Any

from tensordict import TensorDictBase, TensorDictParams
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from kit.fast.functions import (
    PLAIN,
    CapturedVariables,
    is_foreign,
    is_same,
    modules_of,
    reachable_objects,
)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (dict, list, deque)
_NO_SETTINGS = (type, ModuleType, nn.Module, Tensor, TensorDictBase)
_PARTS = ("_parameters", "_buffers", "_modules", *_HOOKS)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every ``nn.Module``. Only the contents of those in ``_PARTS`` are watched."""
_GLOBAL_HOOKS = [
    *(
        getattr(nn.modules.module, f"_global_{kind}_hooks")
        for kind in ("forward", "forward_pre", "backward", "backward_pre")
    ),
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
]
_trains = operator.attrgetter("requires_grad")
_hooks = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


class Watch:
    """Detects changes to modules, optimisers and other objects that Python code depends on.

    In-place changes to parameters are ignored, because traced graphs always read the current
    values. The following changes are detected:

    - new attribute values, such as a float coefficient or the training mode;
    - new values in attributes that are dictionaries, lists, deques, dataclasses or custom objects
      without slots, and new attribute values of a module's custom class;
    - submodules, parameters, buffers and hooks that were added, removed or replaced. This includes
      modules in list, tuple or dictionary attributes, and hooks on parameters, optimisers or all
      modules;
    - changes to ``requires_grad``;
    - changes to an optimiser's settings or state;
    - for custom functions and methods, changes to closure cells, globals, the bound object, and the
      attributes of these objects that the code names.

    Other changes are missed, such as those in arrays, sets, nested lists, methods of other objects
    or other files. :class:`~kit.fast.traced.Traced` detects them when it repeats its verification.

    Args:
        watched: Modules, optimisers, functions and other objects with attributes.

    Attributes:
        changed_name: Name of the changed entry that was detected most recently.
    """

    changed_name = ""

    def __init__(self, *watched: Any) -> None:
        self.watched = watched
        self._take_snapshot()

    def changed(self) -> bool:
        """Return whether anything has changed since the last call.

        This method is called before every gradient step.
        """
        try:
            if (
                all(map(operator.is_, map(operator.getitem, *self._scalars), self._tensors))
                and [*map(_trains, self._parameters)] == self._trained
                and [*map(_hooks, self._parameters)] == self._hooked
                and not any(self._empty)
                and [*map(operator.getitem, *self._custom)] == self._values
                and [*map(len, self._modules)] == self._lengths
                and self._others == self._other_copies
                and self._classes == self._class_copies
                and not self._captured.changed()
            ):
                return False
        except Exception:  # an entry is missing, or values cannot be compared
            pass
        self.changed_name = self._difference()
        self._take_snapshot()
        return True

    def _difference(self) -> str:
        """Return the name of a changed entry; empty if the entry has no name."""
        places, copies = self._places + self._classes, self._copies + self._class_copies
        for place, before in zip(places, copies):
            for name, value in place.items() if hasattr(place, "items") else ():
                if name not in before or not is_same(value, before[name]):
                    return str(name)
        return ""

    def has_hooks(self) -> bool:
        """Return whether watched objects had custom hooks at the last snapshot."""
        module_hooks = (place[name] for place in self._modules for name in _HOOKS)
        places = filter(None, chain(module_hooks, _GLOBAL_HOOKS, *self._hooked))
        return any(is_foreign(hook) for place in places for hook in place.values())

    def values(self) -> list[Any]:
        """Return all values in the last snapshot."""
        copies = self._copies + self._class_copies
        lists = [one.values() if isinstance(one, dict) else one for one in copies]
        return [*chain(*lists, self._captured.values)]

    def settings(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Return a (dictionary, name, value) tuple for each attribute with a plain value."""
        places = [one for one in self._places if isinstance(one, dict)]
        entries = [(place, name, value) for place in places for name, value in place.items()]
        return [entry for entry in entries if isinstance(entry[2], PLAIN)]

    def _take_snapshot(self) -> None:
        found = reachable_objects(self.watched)
        self._captured = CapturedVariables(found)
        watched = [*found, *self._captured.containers]
        self._places = [place for one in watched for place in _places(one)] + _GLOBAL_HOOKS
        self._copies = [dict(one) if isinstance(one, dict) else [*one] for one in self._places]
        modules = [one for one in found if isinstance(one, nn.Module)]
        self._parameters = [parameter for one in modules for parameter in one.parameters()]
        # It is faster to check empty containers and standard module attributes separately.
        self._empty = [place for place in self._places if not place]
        self._modules = [place for place in self._places if _is_module(place)]
        self._lengths = [*map(len, self._modules)]
        custom = [(p, name) for p in self._modules for name in p.keys() - _MODULE_ATTRIBUTES]
        self._custom = [place for place, _ in custom], [name for _, name in custom]
        self._values = [place[name] for place, name in custom]
        others = [place for place in self._places if place and not _is_module(place)]
        self._others, self._other_copies = others, [*map(copy.copy, others)]
        self._classes: list[Any] = [vars(kind) for kind in _custom_classes(modules)]
        self._class_copies = [*map(dict, self._classes)]
        self._trained = [*map(_trains, self._parameters)]
        self._hooked = [*map(_hooks, self._parameters)]
        # Scalar tensors are compared by identity, because different tensors may be equal.
        entries = [(place, name) for place in self._places for name in _names(place)]
        scalars = [(place, name) for place, name in entries if _is_scalar(place[name])]
        self._scalars = [place for place, _ in scalars], [name for _, name in scalars]
        self._tensors = [place[name] for place, name in scalars]


def _places(watched: Any) -> Iterator[Any]:
    """Yield the dictionaries and lists whose entries are watched."""
    if isinstance(watched, _CONTAINERS):
        yield watched
    elif isinstance(watched, nn.Module):
        for module in modules_of(watched):
            # The attributes of TensorDictParams change in every call.
            if not isinstance(module, TensorDictParams):
                yield from _with_contents(vars(module))
            parts = (vars(module).get(part) for part in _PARTS)
            yield from (
                part for part in parts if isinstance(part, dict)
            )  # TorchScript modules have other types
        yield from filter(None, chain.from_iterable(map(_hooks, watched.parameters())))
    elif hasattr(watched, "__dict__"):
        yield from _with_contents(vars(watched))
    if isinstance(watched, Optimizer):
        yield from watched.state.values()
        for group in watched.param_groups:
            yield from _with_contents(group)


def _custom_classes(modules: list[nn.Module]) -> set[type]:
    """Return the custom classes of modules and their submodules."""
    parts = (type(part) for one in modules for part in modules_of(one))
    kinds = {kind for part in parts for kind in part.__mro__}
    return {kind for kind in kinds if is_foreign(kind) and kind is not object}


def _with_contents(attributes: Any) -> Iterator[Any]:
    """Yield a dictionary, and the contents of its containers and custom objects."""
    yield attributes
    for name, value in attributes.items():
        if name in _MODULE_ATTRIBUTES:
            continue
        if isinstance(value, _CONTAINERS):
            yield value
        elif _has_settings(value):
            yield vars(value)


def _has_settings(value: Any) -> bool:
    """Return whether an object is an instance of a custom class or a dataclass."""
    if not hasattr(value, "__dict__") or isinstance(value, _NO_SETTINGS):
        return False
    return is_foreign(type(value)) or hasattr(value, "__dataclass_fields__")


def _names(place: Any) -> Any:
    return place if isinstance(place, dict) else range(len(place))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value) and value.numel() == 1


def _is_module(place: Any) -> bool:
    return isinstance(place, dict) and "_forward_pre_hooks" in place
