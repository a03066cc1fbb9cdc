"""The state of an environment as plain values: captured, and restored bit for bit.

An environment that offers ``state_dict()`` and ``load_state_dict(state)`` is asked. Any other one
gives the attributes of each of its layers, as :mod:`kit.envs.plain_values` describes them. What an
environment holds since it was made (:func:`held`) is restored in place, for others may hold it,
too: a curriculum that a hook changes. State of classes and modules, which all environments of a
process share, is not captured: :class:`Shared` notices that it changes.
"""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from kit.envs.plain_values import Decoder, Encoder, StateCaptureError, package

_SHARE_NOTHING = frozenset({"builtins", "typing", "abc", "gymnasium", "kit"})
"""packages whose classes and modules keep no state of environments"""


def layers(env: gym.Env[Any, Any]) -> list[gym.Env[Any, Any]]:
    """Return the wrappers of ``env`` from the outside in, and the environment itself last."""
    found = [env]
    while isinstance(found[-1], gym.Wrapper):
        found.append(found[-1].env)
    return found


_LEARNING = (gym.wrappers.NormalizeObservation, gym.wrappers.NormalizeReward)


def learning_layer(env: gym.Env[Any, Any]) -> str | None:
    """The name of Gymnasium's running normalisation in ``env``, if there is one that is on."""
    found = (layer for layer in layers(env) if isinstance(layer, _LEARNING))
    return next((type(one).__name__ for one in found if one.update_running_mean), None)


Held = Mapping[str, Any]
"""Values that can change, by their place in an environment."""
_NOTHING: Held = {}


def held(env: gym.Env[Any, Any]) -> Held:
    """What an environment that was just made holds, and may share with others.

    Layers of Gymnasium and of the kit share nothing.
    """
    found = layers(env)
    encode = Encoder(found)
    for number, layer in enumerate(found):
        if package(type(layer)) in _SHARE_NOTHING:
            continue
        with contextlib.suppress(StateCaptureError):
            encode.attributes(layer, str(number))
    return dict(zip(reversed(encode.places), reversed(encode.kept)))  # of equal places the first


def capture(env: gym.Env[Any, Any], since_made: Held = _NOTHING) -> dict[str, Any]:
    """Return the state of all layers of ``env`` as values that JSON can hold.

    Args:
        env: the environment.
        since_made: what it held when it was made.

    Raises:
        StateCaptureError: if a layer holds something else; the message names it by its path.
    """
    found = layers(env)
    encode = Encoder(found)
    written = [encode.layer(layer) for layer in found]
    places = {id(value): place for place, value in since_made.items()}
    still = [[n, places[id(v)]] for n, v in enumerate(encode.kept) if id(v) in places]
    return {"layers": written, "held": still}


def restore(env: gym.Env[Any, Any], state: dict[str, Any], since_made: Held = _NOTHING) -> None:
    """Restore a state of :func:`capture`, into an environment made in the same way.

    Args:
        env: the environment.
        state: captured.
        since_made: what it held when it was made. What the other one still held is restored in
            place; all else is replaced, for others may use it.

    Raises:
        StateCaptureError: if the environment has nothing of that kind where an object was.
    """
    found = layers(env)
    still = state.get("held", ())
    decode = Decoder(found, {n: since_made[place] for n, place in still if place in since_made})
    for layer, values in zip(found, state["layers"], strict=True):
        if "own" in values:
            layer.load_state_dict(decode(values["own"]))
        else:
            decode.attributes(layer, values["attributes"])


class Shared:
    """What environments share: attributes of their classes, and globals that their methods name.

    It is no part of the state of one environment. Those of Gymnasium and of the kit keep none
    there; layers that offer ``load_state_dict`` are trusted to have it in their state. Spaces that
    an environment holds as its own, too, are part of its state, and seeded with it.

    Args:
        env: one of them, before it is reset.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        own = [type(layer) for layer in layers(env) if not hasattr(layer, "load_state_dict")]
        bases = {base: None for kind in own for base in kind.__mro__}
        self._classes = [base for base in bases if package(base) not in _SHARE_NOTHING]
        held_too = (value for layer in layers(env) for value in layer.__dict__.values())
        self._spaces = [value for value in held_too if isinstance(value, gym.Space)]
        self._before = dict(self._seen())

    def check(self) -> None:
        """Look whether it has changed.

        Raises:
            StateCaptureError: if it has.
        """
        for name, seen in dict(self._seen()).items():
            if self._before.get(name) != seen:
                raise StateCaptureError(
                    f"{name} changes, which all environments of a process share"
                )

    def _seen(self) -> Iterator[tuple[str, str]]:
        """Names and what they hold, as far as it can be described."""
        for where, name, value in self._places():
            if any(value is space for space in self._spaces):
                continue
            with contextlib.suppress(StateCaptureError):
                yield f"{where}.{name}", repr(Encoder((), self._classes)(value, name))

    def _places(self) -> Iterator[tuple[str, str, Any]]:
        for kind in self._classes:
            methods = [_function(value) for value in vars(kind).values()]
            functions = [method for method in methods if isinstance(method, types.FunctionType)]
            # Those that were sent to a process by value have globals of their own there.
            own = (function.__globals__ for function in functions)
            module = next((found for found in own if found["__name__"] == kind.__module__), {})
            for name, value in vars(kind).items():
                if not name.startswith("__"):
                    yield kind.__name__, name, value
            for function in functions:
                defaults = [function.__defaults__, function.__kwdefaults__]
                yield kind.__name__, f"{function.__name__}'s defaults", defaults
            for name in _globals_named(functions, module):
                yield kind.__module__, name, module[name]


def _function(method: Any) -> Any:
    return getattr(method, "fget", getattr(method, "__func__", method))


def _globals_named(functions: list[Any], module: dict[str, Any]) -> set[str]:
    """Names of a module that functions use, themselves or through other functions of it."""
    found: set[str] = set()
    while functions:
        function = _function(functions.pop())
        codes = [code] if (code := getattr(function, "__code__", None)) else []
        while codes:
            code = codes.pop()
            codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
            new = {name for name in code.co_names if name in module} - found
            found |= new
            functions += [module[name] for name in new]
    return found


def seed_process(seed: int) -> None:
    """Seed the random generators of this process, Python's and NumPy's."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def capture_process() -> dict[str, Any]:
    """The states of the random generators of this process, Python's and NumPy's."""
    encode = Encoder(())
    states = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    return {name: encode(state, name) for name, state in states.items()}


def restore_process(state: dict[str, Any]) -> None:
    """Restore a state of :func:`capture_process`."""
    decode = Decoder(())
    random.setstate(decode(state["python"]))
    np.random.set_state(decode(state["numpy"]))
