"""Noticing that what a recording takes for granted is no longer what it was."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any

from tensordict import TensorDictParams
from torch import Tensor, nn
from torch.optim import Optimizer

_SETTINGS = (bool, int, float, str, tuple, NoneType)
_PARTS = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""Dictionaries that every module has as long as it lives; the entries of five are watched."""


class Watch:
    """Notices changes of modules, optimisers and other objects that Python code depends on.

    A parameter changed in place goes unnoticed, as it should: programs read parameters where they
    live. Noticed are: another value of a plain attribute (a coefficient kept as a float, training
    or evaluation mode), an attribute, a submodule, a function, a hook, a parameter or a buffer that
    was added, removed or replaced, other settings or another state of an optimiser.

    Args:
        watched: ``nn.Module``s, optimisers and other objects, of which plain attributes are
            watched; what has no attributes never changes.
    """

    def __init__(self, *watched: Any) -> None:
        self.watched = watched
        self._look()

    def changed(self) -> bool:
        """Whether anything is different from the last call."""
        try:
            if [*map(len, self._sizes)] == self._lengths and self._present() == self._identities:
                return False
        except KeyError:  # a name became another one
            pass
        before = (self._places, self._values, self._held, self._tensors)
        self._look()
        return not _same(before, (self._places, self._values, self._held, self._tensors))

    def settings(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Every plain attribute: where it is, its name and its value."""
        return [(attributes, name, attributes.get(name)) for attributes, name in self._places]

    def _look(self) -> None:
        self._sizes = [d for one in self.watched for d in _dictionaries(one)]
        self._lengths = [*map(len, self._sizes)]
        entries = [(d, n, v) for d in self._sizes for n, v in d.items() if n not in _OF_MODULES]
        self._places = [(d, n) for d, n, value in entries if type(value) in _SETTINGS]
        self._held = [(d, n) for d, n, v in entries if isinstance(v, (Tensor, dict)) or callable(v)]
        self._values = [_plain(place[name]) for place, name in self._places]
        self._tensors = [place[name] for place, name in self._held]
        self._getters = _by_place([*self._places, *self._held])
        self._identities = self._present()

    def _present(self) -> list[int]:
        """Identities of all that is watched; a new value that is equal is looked at closely."""
        return [*map(id, itertools.chain.from_iterable([get(d) for get, d in self._getters]))]


_Getters = list[tuple[Callable[[Any], tuple[Any, ...]], Any]]


def _by_place(entries: Sequence[tuple[Any, Any]]) -> _Getters:
    """Return what gets all entries of each dictionary in one call: this is done very often."""
    names: dict[int, list[Any]] = {}
    for place, name in entries:
        names.setdefault(id(place), []).append(name)
    places = {id(place): place for place, _ in entries}
    # One name alone would not be got as a tuple.
    return [(operator.itemgetter(*found, found[0]), places[n]) for n, found in names.items()]


def _plain(value: Any) -> Any:
    """Return a plain value; ``None`` for any other, so that one that is made late is no change."""
    return value if type(value) in _SETTINGS else None


def _dictionaries(watched: Any) -> Iterator[Any]:
    """Yield the dictionaries whose entries are watched."""
    if isinstance(watched, nn.Module):
        for module in watched.modules():
            attributes = module.__dict__
            if not isinstance(module, TensorDictParams):  # its attributes change at every call
                yield attributes
            yield from (attributes[part] for part in _PARTS)
    elif isinstance(watched, Optimizer):
        yield vars(watched)
        yield watched.state
        yield from (watched._optimizer_step_pre_hooks, watched._optimizer_step_post_hooks)
        for group in watched.param_groups:
            yield group
            # The state of one parameter stands for that of all: it is loaded or cleared as a whole.
            yield next((watched.state[p] for p in group["params"] if p in watched.state), {})
    elif hasattr(watched, "__dict__"):
        yield vars(watched)


def _same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    places, values, held, tensors = zip(before, now)
    try:
        return (
            all(_names(*both) for both in (places, held))
            and all(map(operator.is_, *tensors))
            and bool(values[0] == values[1])
        )
    except RuntimeError:
        return False


def _names(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return [(id(d), name) for d, name in before] == [(id(d), name) for d, name in now]
