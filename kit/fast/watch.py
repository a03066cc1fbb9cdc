"""Noticing that what a recording takes for granted is no longer what it was."""

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

from kit.fast.functions import PLAIN, Used, is_foreign, modules_of, reached, same

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (dict, list, deque)
_NO_SETTINGS = (type, ModuleType, nn.Module, Tensor, TensorDictBase)
_PARTS = ("_parameters", "_buffers", "_modules", *_HOOKS)
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Dictionaries that every module has as long as it lives; the entries of seven are watched."""
_OF_ALL = [
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
    """Notices changes of modules, optimisers and other objects that Python code depends on.

    Programs read parameters where they live, so a parameter changed in place is no change. Changes
    are:

    - another value of an attribute (a coefficient kept as a float, training or evaluation mode), or
      in an attribute that is a dictionary, a list, a deque or an object (without slots) of a
      dataclass or a custom class; an attribute of a module's custom class;
    - a submodule, or a module that is an attribute or in a list, tuple or dictionary that is one; a
      hook (of a module, a parameter, all modules or optimisers), a parameter or a buffer that was
      added, removed or replaced; whether a parameter requires gradients;
    - other settings or another state of an optimiser;
    - of custom functions, also those in modules: closure cells, globals, the object they are bound
      to, and attributes that their code names of these and of objects in them.

    Other changes go unnoticed: in an array, in a set, in a list in a list, behind a method of
    another object, in another file. :class:`~kit.fast.traced.Traced` finds them when it verifies a
    program again.

    Args:
        watched: modules, optimisers, functions and other objects with attributes.

    Attributes:
        what: name of the difference in the last call that found one.
    """

    what = ""

    def __init__(self, *watched: Any) -> None:
        self.watched = watched
        self._look()

    def changed(self) -> bool:
        """Whether anything is different from the last call; asked before every gradient step."""
        try:
            if (
                all(map(operator.is_, map(operator.getitem, *self._alone), self._tensors))
                and [*map(_trains, self._parameters)] == self._trained
                and [*map(_hooks, self._parameters)] == self._hooked
                and not any(self._empty)
                and [*map(operator.getitem, *self._own)] == self._values
                and [*map(len, self._modules)] == self._lengths
                and self._others == self._other_copies
                and self._classes == self._class_copies
                and not self._used.changed()
            ):
                return False
        except Exception:  # a name is gone, or there is another object that cannot be compared
            pass
        self.what = self._difference()
        self._look()
        return True

    def _difference(self) -> str:
        """The name of an entry that is not what it was; empty where it has none."""
        places, copies = self._places + self._classes, self._copies + self._class_copies
        for place, before in zip(places, copies):
            for name, value in place.items() if hasattr(place, "items") else ():
                if name not in before or not same(value, before[name]):
                    return str(name)
        return ""

    def has_hooks(self) -> bool:
        """Whether anything watched had hooks in the last look, besides those of PyTorch's."""
        of_modules = (place[name] for place in self._modules for name in _HOOKS)
        places = filter(None, chain(of_modules, _OF_ALL, *self._hooked))
        return any(is_foreign(hook) for place in places for hook in place.values())

    def values(self) -> list[Any]:
        """All that was watched in the last call."""
        copies = self._copies + self._class_copies
        lists = [one.values() if isinstance(one, dict) else one for one in copies]
        return [*chain(*lists, self._used.values)]

    def settings(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Every plain attribute: where it is, its name and its value."""
        places = [one for one in self._places if isinstance(one, dict)]
        entries = [(place, name, value) for place in places for name, value in place.items()]
        return [entry for entry in entries if isinstance(entry[2], PLAIN)]

    def _look(self) -> None:
        found = reached(self.watched)
        self._used = Used(found)
        watched = [*found, *self._used.containers]
        self._places = [place for one in watched for place in _places(one)] + _OF_ALL
        self._copies = [dict(one) if isinstance(one, dict) else [*one] for one in self._places]
        modules = [one for one in found if isinstance(one, nn.Module)]
        self._parameters = [parameter for one in modules for parameter in one.parameters()]
        # Most are empty, and most entries of a module's attributes are those that all modules have.
        self._empty = [place for place in self._places if not place]
        self._modules = [place for place in self._places if _is_module(place)]
        self._lengths = [*map(len, self._modules)]
        own = [(place, name) for place in self._modules for name in place.keys() - _OF_MODULES]
        self._own = [place for place, _ in own], [name for _, name in own]
        self._values = [place[name] for place, name in own]
        left = [place for place in self._places if place and not _is_module(place)]
        self._others, self._other_copies = left, [*map(copy.copy, left)]
        self._classes: list[Any] = [vars(kind) for kind in _own_classes(modules)]
        self._class_copies = [*map(dict, self._classes)]
        self._trained = [*map(_trains, self._parameters)]
        self._hooked = [*map(_hooks, self._parameters)]
        # Tensors of one number may be equal and yet be two.
        entries = [(place, name) for place in self._places for name in _names(place)]
        numbers = [(place, name) for place, name in entries if _is_number(place[name])]
        self._alone = [place for place, _ in numbers], [name for _, name in numbers]
        self._tensors = [place[name] for place, name in numbers]


def _places(watched: Any) -> Iterator[Any]:
    """Yield the dictionaries and lists whose entries are watched."""
    if isinstance(watched, _CONTAINERS):
        yield watched
    elif isinstance(watched, nn.Module):
        for module in modules_of(watched):
            if not isinstance(module, TensorDictParams):  # its attributes change at every call
                yield from _with_contents(vars(module))
            parts = (vars(module).get(part) for part in _PARTS)
            yield from (part for part in parts if isinstance(part, dict))  # not of TorchScript
        yield from filter(None, chain.from_iterable(map(_hooks, watched.parameters())))
    elif hasattr(watched, "__dict__"):
        yield from _with_contents(vars(watched))
    if isinstance(watched, Optimizer):
        yield from watched.state.values()
        for group in watched.param_groups:
            yield from _with_contents(group)


def _own_classes(modules: list[nn.Module]) -> set[type]:
    """The classes of modules, and of what they consist of, that are no library's."""
    parts = (type(part) for one in modules for part in modules_of(one))
    kinds = {kind for part in parts for kind in part.__mro__}
    return {kind for kind in kinds if is_foreign(kind) and kind is not object}


def _with_contents(attributes: Any) -> Iterator[Any]:
    """Yield a dictionary, and the dictionaries, lists and settings in it."""
    yield attributes
    for name, value in attributes.items():
        if name in _OF_MODULES:
            continue
        if isinstance(value, _CONTAINERS):
            yield value
        elif _has_settings(value):
            yield vars(value)


def _has_settings(value: Any) -> bool:
    """Whether it is an object of no library's class, or of a dataclass."""
    if not hasattr(value, "__dict__") or isinstance(value, _NO_SETTINGS):
        return False
    return is_foreign(type(value)) or hasattr(value, "__dataclass_fields__")


def _names(place: Any) -> Any:
    return place if isinstance(place, dict) else range(len(place))


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value) and value.numel() == 1


def _is_module(place: Any) -> bool:
    """Whether these are the attributes of a module."""
    return isinstance(place, dict) and "_forward_pre_hooks" in place
