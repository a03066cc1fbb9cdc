"""Capture and restore MuJoCo models and data as arrays, for :mod:`kit.envs.state`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
KINDS = ("MjModel", "MjData")


def capture(value: Any, encode: Callable[[Any, str], Any], where: str) -> dict[str, Any]:
    """Return the arrays and options of an MjModel, or the state of an MjData and its model."""
    if type(value).__name__ == "MjModel":
        return {
            "arrays": {name: encode(array.copy(), where) for name, array in _arrays(value)},
            "vectors": {name: encode(array.copy(), where) for name, array in _arrays(value.opt)},
            "options": {n: v for n, v in _public(value.opt) if type(v) in (int, float)},
        }
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(value.model, kind))
    mujoco.mj_getState(value.model, value, state, kind)
    return {
        "model": encode(value.model, f"{where}.model"),
        "integration": encode(state, where),
        "derived": {name: encode(array.copy(), where) for name, array in _derived(value)},
    }


def restore(present: Any, saved: dict[str, Any], decode: Callable[..., Any]) -> None:
    """Restore a captured state in place. Arrays missing in this MuJoCo version are skipped."""
    if type(present).__name__ == "MjModel":
        _write(_arrays(present), saved["arrays"], decode)
        _write(_arrays(present.opt), saved["vectors"], decode)
        for name, value in saved["options"].items():
            setattr(present.opt, name, value)
        return
    import mujoco

    kind, state = mujoco.mjtState.mjSTATE_INTEGRATION, decode(saved["integration"])
    decode(saved["model"], present.model)
    mujoco.mj_setState(present.model, present, state, kind)
    mujoco.mj_forward(present.model, present)
    # mj_forward recomputes all derived arrays, but in a real run some arrays lag one substep
    # behind. Environments read the lagging arrays, so restore them.
    _write(_derived(present), saved["derived"], decode)
    mujoco.mj_setState(present.model, present, state, kind)


def _write(
    arrays: Iterator[tuple[str, Array]], saved: dict[str, Any], decode: Callable[..., Any]
) -> None:
    for name, array in arrays:
        if name in saved:
            array[...] = decode(saved[name])


def _arrays(owner: Any) -> Iterator[tuple[str, Array]]:
    """Yield the arrays of a model or its options, except textures, which only affect rendering."""
    for name, value in _public(owner):
        if isinstance(value, np.ndarray) and value.size and name != "tex_data":
            yield name, value


def _derived(data: Any) -> Iterator[tuple[str, Array]]:
    """Yield an MjData's fixed-size arrays, which exclude contacts and constraints."""
    begin = data.qpos.ctypes.data  # qpos is the first array in MjData's buffer
    buffer = range(begin, begin + data.nbuffer)
    for name, value in _public(data):
        if not isinstance(value, np.ndarray) or not value.size or not value.flags.writeable:
            continue
        if value.ctypes.data in buffer or name == "energy":
            yield name, value


def _public(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of an object's public attributes, skipping unreadable ones."""
    for name in dir(owner):
        if not name.startswith("_"):
            try:
                yield name, getattr(owner, name)
            except (AttributeError, RuntimeError, ValueError):
                continue
