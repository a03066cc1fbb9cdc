"""Checkpoint files that split large tensors into pieces and hard-link unchanged pieces."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase, TensorDictParams
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchrl.checkpoint import StateDictCheckpointAdapter
from torchrl.objectives import LossModule

from kit.buffers.disk import zeros_on_disk
from kit.config.memory import memory_of_machine
from kit.steps import SettingError

LARGE = 2**25
"""Minimum size, in bytes, of a tensor that is split into pieces."""
PIECE = 2**23
"""Approximate size of a piece in bytes. Between checkpoints, few replay buffer pieces change."""

IN_MEMORY = 1 / 4
"""Maximum size of a tensor that is loaded into memory, as a fraction of the memory limit."""

_MARK = "pieces of a tensor"
_ENTRIES = "entries of a TensorDict"


class StateFile(StateDictCheckpointAdapter):  # type: ignore[misc, unused-ignore]
    """TorchRL checkpoint adapter that uses only safe formats and stores large tensors in pieces.

    Each piece contains some rows of a large tensor, in a file named by a hash of its contents. A
    file that exists unchanged in the previous checkpoint is hard-linked instead of written.

    Args:
        before: function that returns the path of the previous checkpoint, or ``None``.
        name: name of the component, used in error messages.
    """

    def __init__(self, before: Callable[[], Path | None], name: str = "part") -> None:
        super().__init__("torch")
        self._before, self._name = before, name

    def save(self, component: Any, path: Path, **kwargs: Any) -> Any:
        """Write a component's state to the folder ``path``.

        Raises:
            SettingError: if the state contains objects that could not be loaded again.
        """
        path.mkdir(parents=True, exist_ok=True)
        before = self._before()
        known = None if before is None else before / path.relative_to(path.parents[1])
        state = component.state_dict(*kwargs["args"], **kwargs["kwargs"])
        _check_loadable(written := _encoded(state), self._name)
        torch.save(_apart(written, path, known), path / self.state_torch)
        return state

    def load(self, component: Any, path: Path, **kwargs: Any) -> Any:
        """Restore a component's state from the folder ``path``.

        Raises:
            SettingError: if the saved weights belong to different networks.
        """
        saved = torch.load(path / self.state_torch, weights_only=True, map_location=_here)
        state = _together(saved, path)
        if isinstance(component, LossModule):
            _check_weights(component, state, path)
        component.load_state_dict(state, *kwargs["args"], **kwargs["kwargs"])


def check_state(part: Any, name: str) -> None:
    """Check that a component's state can be saved and loaded.

    Raises:
        SettingError: if the state contains objects that could not be loaded again.
    """
    if isinstance(part, nn.Module) and any(map(is_lazy, part.parameters())):
        return  # lazy parameters have no shape before the first call
    _check_loadable(_encoded(part.state_dict()), name)


def _encoded(value: Any) -> Any:
    """Replace each TensorDict in a state with a dictionary that can be unpickled safely."""
    if isinstance(value, TensorDictBase):
        entries = {name: _encoded(inner) for name, inner in value.items()}
        return {_ENTRIES: entries, "batch_size": [*value.batch_size]}
    return _mapped(_encoded, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each entry of a dictionary, list or tuple."""
    if type(value) is dict:
        return {name: function(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(function(inner) for inner in value)
    return value


_ANY = "of any shape"


def _check_weights(loss: LossModule, state: dict[str, Any], path: Path) -> None:
    """Raise an error for weights of different networks, which TensorDict would load silently.

    In all other parts of a loss, PyTorch itself rejects mismatched weights.
    """
    parts = loss.named_modules()
    lenient = tuple(f"{name}." for name, part in parts if isinstance(part, TensorDictParams))
    expected: dict[str, Any] = loss.state_dict(keep_vars=True)  # includes lazy parameters
    saved, here = ({n: _described(v) for n, v in some.items()} for some in (state, expected))
    for name in sorted(expected.keys() | state.keys()):
        found, wanted = saved.get(name, "missing"), here.get(name, "missing")
        if name.startswith(lenient) and wanted not in (found, _ANY):
            reason = f"has different networks: {name} is {found}, but {wanted} in this trainer"
            hint = "build the trainer as in the run that wrote the checkpoint"
            raise SettingError("checkpoint", str(path), reason, hint)


def _described(value: Any) -> str:
    """Describe the shape of a state entry. Training does not change the shape."""
    if not isinstance(value, Tensor):
        return "present"
    return _ANY if is_lazy(value) else f"of shape {[*value.shape]}"


def _here(storage: Any, location: str) -> Any:
    """Load tensors into CPU memory if their GPU does not exist on this machine."""
    device = torch.device(location)
    missing = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    return storage if missing else None


_CONTAINERS = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict)
_PLAIN = (bool, int, float, complex, str, bytes, NoneType)


def _check_loadable(value: Any, where: str) -> None:
    """Raise an error for objects that PyTorch's restricted unpickler cannot load."""
    if type(value) in _PLAIN or isinstance(value, Tensor):
        return
    if type(value) in _MAPPINGS:
        for name, inner in value.items():
            _check_loadable(name, where)
            _check_loadable(inner, f"{where}.{name}")
    elif type(value) in _CONTAINERS:
        for inner in value:
            _check_loadable(inner, where)
    elif not _is_read_back(value):
        reason = f"is a {type(value).__name__}, which checkpoints cannot load without running code"
        hint = "return plain values from state_dict(), such as value.item() or value.tolist()"
        raise SettingError(f"state of {where}", value, reason, hint)


def _is_read_back(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # the same error would occur when the run is resumed
        return False
    return True


def _apart(value: Any, folder: Path, known: Path | None) -> Any:
    """Write large tensors to files, and replace these tensors in the state with file names."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return value
        if value.device.type in ("cpu", "cuda") and value.nbytes >= LARGE and value.ndim:
            return _written(value.detach(), folder, known)
        # PyTorch writes the whole storage of a view and cannot write memory-mapped tensors.
        mapped = isinstance(value, MemoryMappedTensor)
        value = value.as_subclass(Tensor) if mapped else value
        whole = value.nbytes == value.untyped_storage().nbytes() and not mapped
        return value if whole else value.clone()
    return _mapped(lambda inner: _apart(inner, folder, known), value)


def _written(tensor: Tensor, folder: Path, known: Path | None) -> dict[str, Any]:
    rows = max(PIECE * len(tensor) // tensor.nbytes, 1)
    names = []
    for part in torch.split(tensor, rows):
        data = part.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
        name = hashlib.blake2b(data.data, digest_size=16).hexdigest()
        names.append(name)
        if (folder / name).exists():
            continue
        if known is not None:
            with contextlib.suppress(OSError):  # the file is missing, or links are not supported
                # Compare contents, so that corrupt data never gets a valid checksum.
                if np.array_equal(np.fromfile(known / name, np.uint8), data):
                    os.link(known / name, folder / name)
                    continue
        data.tofile(folder / name)
    return {_MARK: names, "like": tensor[:0].clone(), "rows": len(tensor)}


def _empty_like(like: Tensor, rows: int, folder: Path) -> Tensor:
    """Create a tensor with ``rows`` rows, on disk if it is too large for memory."""
    shape = rows, *like.shape[1:]
    if math.prod(shape) * like.itemsize > memory_of_machine()[0] * IN_MEMORY:
        return zeros_on_disk(shape, like.dtype, folder)
    return torch.empty(shape, dtype=like.dtype)


def _together(value: Any, folder: Path) -> Any:
    """Return the state with its large tensors restored from their pieces."""
    if isinstance(value, dict) and _MARK in value:
        like: Tensor = value["like"]
        whole = _empty_like(like, value["rows"], folder)
        target, start = whole.reshape(-1).view(torch.uint8).numpy(), 0
        for name in value[_MARK]:
            with (folder / Path(name).name).open("rb") as file:  # Path.name prevents path traversal
                start += file.readinto(target[start:].data)
        if start != len(target):
            reason = f"has only {start} of the {len(target)} bytes of a tensor"
            raise SettingError("checkpoint", str(folder), reason, "use another checkpoint")
        return whole.to(like.device)
    if isinstance(value, dict) and _ENTRIES in value:
        return TensorDict(_together(value[_ENTRIES], folder), value["batch_size"])
    return _mapped(lambda inner: _together(inner, folder), value)
