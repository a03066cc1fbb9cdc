"""Capture the state of an environment as plain values, and restore it bit for bit.

An environment with ``state_dict()`` and ``load_state_dict(state)`` is captured with these methods.
Otherwise, the attributes of each layer are captured (:mod:`kit.envs.plain_values`). Objects that an
environment has held since its creation (:func:`held`) are restored in place because other code may
share them, for example a curriculum that a hook changes. State of classes and modules is shared by
all environments in a process and is not captured; :class:`Shared` detects changes to it.
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
"""Packages whose classes and modules store no environment state."""


def layers(env: gym.Env[Any, Any]) -> list[gym.Env[Any, Any]]:
    """Return the wrappers of ``env`` from outermost to innermost, then the base environment."""
    found = [env]
    while isinstance(found[-1], gym.Wrapper):
        found.append(found[-1].env)
    return found


_LEARNING = (gym.wrappers.NormalizeObservation, gym.wrappers.NormalizeReward)


def learning_layer(env: gym.Env[Any, Any]) -> str | None:
    """Return the class name of an active Gymnasium normalisation wrapper in ``env``, if any."""
    found = (layer for layer in layers(env) if isinstance(layer, _LEARNING))
    return next((type(one).__name__ for one in found if one.update_running_mean), None)


Held = Mapping[str, Any]
"""Mutable objects keyed by their path in an environment."""
_NOTHING: Held = {}


def held(env: gym.Env[Any, Any]) -> Held:
    """Return the mutable objects of a new environment. Other code may share these objects.

    Layers of Gymnasium and of this kit are skipped because they share no objects.
    """
    found = layers(env)
    encode = Encoder(found)
    for number, layer in enumerate(found):
        if package(type(layer)) in _SHARE_NOTHING:
            continue
        with contextlib.suppress(StateCaptureError):
            encode.attributes(layer, str(number))
    # Reversed, so that the first of several values with the same path is used.
    return dict(zip(reversed(encode.places), reversed(encode.kept)))


def capture(env: gym.Env[Any, Any], since_made: Held = _NOTHING) -> dict[str, Any]:
    """Return the state of all layers of ``env`` as JSON values.

    Args:
        env: the environment.
        since_made: result of :func:`held` when the environment was created.

    Raises:
        StateCaptureError: if a value is not supported; the message contains its path.
    """
    found = layers(env)
    encode = Encoder(found)
    written = [encode.layer(layer) for layer in found]
    places = {id(value): place for place, value in since_made.items()}
    still = [[n, places[id(v)]] for n, v in enumerate(encode.kept) if id(v) in places]
    return {"layers": written, "held": still}


def restore(env: gym.Env[Any, Any], state: dict[str, Any], since_made: Held = _NOTHING) -> None:
    """Restore a captured state into an environment created with the same arguments.

    Args:
        env: the environment.
        state: state returned by :func:`capture`.
        since_made: result of :func:`held` when the environment was created. These objects are
            restored in place if the captured environment still held them. Others are replaced.

    Raises:
        StateCaptureError: if an object in the environment and the saved object differ in type.
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
    """Detects changes to class attributes and module globals that environments share.

    Shared state is not captured with an environment. Classes of Gymnasium and this kit are not
    checked. Layers with ``load_state_dict`` are assumed to save shared state themselves. Spaces
    that are also instance attributes are not checked, because environments capture and seed them.

    Args:
        env: one of the environments, before its first reset.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        kinds = [type(layer) for layer in layers(env) if not hasattr(layer, "load_state_dict")]
        bases = {base: None for kind in kinds for base in kind.__mro__}
        self._classes = [base for base in bases if package(base) not in _SHARE_NOTHING]
        held_too = (value for layer in layers(env) for value in layer.__dict__.values())
        self._spaces = [value for value in held_too if isinstance(value, gym.Space)]
        self._before = dict(self._seen())

    def check(self) -> None:
        """Check that shared state has not changed.

        Raises:
            StateCaptureError: if shared state has changed.
        """
        for name, seen in dict(self._seen()).items():
            if self._before.get(name) != seen:
                raise StateCaptureError(f"{name} is shared by all environments and has changed")

    def _seen(self) -> Iterator[tuple[str, str]]:
        """Yield each shared variable's name and the ``repr`` of its encoded value."""
        for where, name, value in self._places():
            if any(value is space for space in self._spaces):
                continue
            with contextlib.suppress(StateCaptureError):
                yield f"{where}.{name}", repr(Encoder((), self._classes)(value, name))

    def _places(self) -> Iterator[tuple[str, str, Any]]:
        for kind in self._classes:
            methods = [_function(value) for value in vars(kind).values()]
            functions = [method for method in methods if isinstance(method, types.FunctionType)]
            # Functions that were pickled by value have separate globals in a worker process.
            namespaces = (function.__globals__ for function in functions)
            module = next(
                (found for found in namespaces if found["__name__"] == kind.__module__), {}
            )
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
    """Return the names of module globals that functions use, directly or indirectly."""
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
    """Seed Python's and NumPy's global random generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def capture_process() -> dict[str, Any]:
    """Return the states of Python's and NumPy's global random generators."""
    encode = Encoder(())
    states = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    return {name: encode(state, name) for name, state in states.items()}


def restore_process(state: dict[str, Any]) -> None:
    """Restore a state returned by :func:`capture_process`."""
    decode = Decoder(())
    random.setstate(decode(state["python"]))
    np.random.set_state(decode(state["numpy"]))
