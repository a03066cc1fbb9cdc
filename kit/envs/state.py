"""The state of an environment as plain values: captured, and put back bit for bit.

An environment that offers ``state_dict()`` and ``load_state_dict(state)`` is asked. A MuJoCo
environment gives its integration state and every derived array (some of them are read before they
are computed again). Any other one gives the attributes of each of its layers, if all of them are
plain: numbers, strings, arrays, containers of these, and random generators.
"""

from __future__ import annotations

import base64
from collections import deque
from typing import Any

import gymnasium as gym
import numpy as np

_CONSTANT = (gym.Space, gym.envs.registration.EnvSpec, type)
_NOT_STATE = frozenset(
    {
        # links between layers, and what a layer was made with
        "env", "metadata", "spec", "model", "_saved_kwargs", "_cached_spec", "_metadata",
        "_action_space", "_observation_space", "_ezpickle_args", "_ezpickle_kwargs",
        "_previous_data", "observation_structure",
        # what only draws
        "render_mode", "mujoco_renderer", "screen", "clock", "surf", "viewer", "isopen", "window",
    }
)  # fmt: skip


class CannotCapture(TypeError):
    """An attribute of an environment is nothing that plain values can describe."""


def layers(env: gym.Env[Any, Any]) -> list[gym.Env[Any, Any]]:
    """Return the wrappers of ``env`` from the outside in, and the environment itself last."""
    found = [env]
    while isinstance(found[-1], gym.Wrapper):
        found.append(found[-1].env)
    return found


def capture(env: gym.Env[Any, Any]) -> dict[str, Any]:
    """Return the state of all layers of ``env`` as values that JSON can hold.

    Raises:
        CannotCapture: if a layer holds something else; the message names layer and attribute.
    """
    return {"layers": [_capture_layer(layer) for layer in layers(env)]}


def restore(env: gym.Env[Any, Any], state: dict[str, Any]) -> None:
    """Put back what :func:`capture` returned, into an environment made in the same way."""
    for layer, values in zip(layers(env), state["layers"], strict=True):
        if "own" in values:
            layer.load_state_dict(_decode(values["own"]))
            continue
        if "mujoco" in values:
            _restore_mujoco(layer, values["mujoco"])
        for name, value in values["attributes"].items():
            layer.__dict__[name] = _decode(value, layer.__dict__.get(name))


def _capture_layer(layer: gym.Env[Any, Any]) -> dict[str, Any]:
    if not isinstance(layer, gym.Wrapper) and hasattr(layer, "load_state_dict"):
        return {"own": _encode(layer.state_dict(), type(layer).__name__)}
    attributes, captured = {}, {}
    for name, value in vars(layer).items():
        if name in _NOT_STATE or isinstance(value, _CONSTANT) or callable(value):
            continue
        if type(value).__name__ == "MjData":
            captured["mujoco"] = _capture_mujoco(layer, value)
            continue
        attributes[name] = _encode(value, f"{type(layer).__name__}.{name}")
    return {"attributes": attributes, **captured}


# ---------------------------------------------------------------------- MuJoCo
def _capture_mujoco(env: Any, data: Any) -> dict[str, Any]:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    full = np.empty(mujoco.mj_stateSize(env.model, kind))
    mujoco.mj_getState(env.model, data, full, kind)
    return {
        "integration": _encode(full, "state"),
        "derived": {name: _encode(array, name) for name, array in _derived(data).items()},
    }


def _restore_mujoco(env: Any, saved: dict[str, Any]) -> None:
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(env.model, env.data, _decode(saved["integration"]), kind)
    mujoco.mj_forward(env.model, env.data)
    # mj_forward brings all arrays to the present; before the kill some of them were one substep
    # behind, and environments read them so.
    for name, array in _derived(env.data).items():
        if name in saved["derived"]:  # one of another version of MuJoCo may not be
            array[...] = _decode(saved["derived"][name])
    mujoco.mj_setState(env.model, env.data, _decode(saved["integration"]), kind)


def _derived(data: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of fixed size.

    Those of contacts and constraints are in an arena, which every step refills, with as many
    entries as there are contacts.
    """
    found = {}
    begin = data.qpos.ctypes.data  # the first array of the buffer
    buffer = range(begin, begin + data.nbuffer)
    for name in sorted(dir(data)):
        if name.startswith("_"):
            continue
        try:
            value = getattr(data, name)
        except (AttributeError, RuntimeError, ValueError):
            continue
        if not isinstance(value, np.ndarray) or not value.size or not value.flags.writeable:
            continue
        if value.ctypes.data in buffer or name == "energy":
            found[name] = value
    return found


# ---------------------------------------------------------------------- plain values
def _encode(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.random.Generator):
        return {"generator": _encode(value.bit_generator.state, where)}
    if isinstance(value, np.random.RandomState):
        return {"random_state": _encode(value.get_state(legacy=False), where)}
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject:
            raise CannotCapture(f"{where} is an array of Python objects")
        raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind: raw, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, dict):
        return {"dict": [[_encode(k, where), _encode(v, where)] for k, v in value.items()]}
    if type(value) in (tuple, list, deque, set):
        items = [_encode(item, where) for item in value]
        length = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
        return {type(value).__name__: items, **length}
    raise CannotCapture(f"{where} is a {type(value).__name__}")


def _decode(value: Any, present: Any = None) -> Any:
    if not isinstance(value, dict):
        return value
    if "generator" in value:
        state = _decode(value["generator"])
        kind = getattr(np.random, state["bit_generator"])
        same = isinstance(present, np.random.Generator) and type(present.bit_generator) is kind
        generator = present if same else np.random.Generator(kind())
        generator.bit_generator.state = state
        return generator
    if "random_state" in value:
        random_state = np.random.RandomState()
        random_state.set_state(_decode(value["random_state"]))
        return random_state
    for name in ("array", "scalar"):
        if name in value:
            raw = np.frombuffer(base64.b64decode(value[name]), np.dtype(value["dtype"]))
            array = raw.reshape(value["shape"]).copy()
            return array if name == "array" else array[()]
    if "dict" in value:
        return {_decode(key): _decode(item) for key, item in value["dict"]}
    if "deque" in value:
        return deque([_decode(item) for item in value["deque"]], maxlen=value["maxlen"])
    for name, kind in (("tuple", tuple), ("list", list), ("set", set)):
        if name in value:
            return kind(_decode(item) for item in value[name])
    raise ValueError(f"not a captured value: {sorted(value)}")
