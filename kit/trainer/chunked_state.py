"""Large tensors of checkpoints, in pieces; those that did not change are not written again."""

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
"""Bytes from which on a tensor is written in pieces."""
PIECE = 2**23
"""Bytes of a piece, about; rows of a replay buffer are changed in turn, so few pieces change."""

IN_MEMORY = 1 / 4
"""Share of the memory of the machine up to which a tensor is read into memory."""

_MARK = "pieces of a tensor"
_ENTRIES = "entries of a TensorDict"


class StateFile(StateDictCheckpointAdapter):  # type: ignore[misc, unused-ignore]
    """TorchRL's adapter without its other formats, which unpickle anything; and incremental.

    A large tensor is in files of its own, each with some of its rows and named by its contents. A
    file that the checkpoint before has, too, undamaged, is a link to it.

    Args:
        before: the checkpoint before; ``None`` if there is none.
        name: of the part, for errors.
    """

    def __init__(self, before: Callable[[], Path | None], name: str = "part") -> None:
        super().__init__("torch")
        self._before, self._name = before, name

    def save(self, component: Any, path: Path, **kwargs: Any) -> Any:
        """Write the state of a part to its folder.

        Raises:
            SettingError: if there is something in it that could not be read back.
        """
        path.mkdir(parents=True, exist_ok=True)
        before = self._before()
        known = None if before is None else before / path.relative_to(path.parents[1])
        state = component.state_dict(*kwargs["args"], **kwargs["kwargs"])
        _refuse_unreadable(written := _encoded(state), self._name)
        torch.save(_apart(written, path, known), path / self.state_torch)
        return state

    def load(self, component: Any, path: Path, **kwargs: Any) -> Any:
        """Restore a part from its files; there is no other place to look for them.

        Raises:
            SettingError: if they are the weights of other networks.
        """
        saved = torch.load(path / self.state_torch, weights_only=True, map_location=_here)
        state = _together(saved, path)
        if isinstance(component, LossModule):
            _check_weights(component, state, path)
        component.load_state_dict(state, *kwargs["args"], **kwargs["kwargs"])


def check_state(part: Any, name: str) -> None:
    """Check that a checkpoint can hold the state of a part, by writing and reading it in memory.

    Raises:
        SettingError: if the part has a state that could not be read back.
    """
    if isinstance(part, nn.Module) and any(map(is_lazy, part.parameters())):
        return  # lazy layers have no shapes before their first call
    _refuse_unreadable(_encoded(part.state_dict()), name)


def _encoded(value: Any) -> Any:
    """The state with a dictionary in place of each TensorDict, which files cannot hold."""
    if isinstance(value, TensorDictBase):
        entries = {name: _encoded(inner) for name, inner in value.items()}
        return {_ENTRIES: entries, "batch_size": [*value.batch_size]}
    return _mapped(_encoded, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the entries of a dictionary, list or tuple."""
    if type(value) is dict:
        return {name: function(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(function(inner) for inner in value)
    return value


_ANY = "of any shape"


def _check_weights(loss: LossModule, state: dict[str, Any], path: Path) -> None:
    """Reject weights of other networks, which TensorDict broadcasts, ignores or leaves out.

    PyTorch rejects those of other parts of a loss.
    """
    parts = loss.named_modules()
    lenient = tuple(f"{name}." for name, part in parts if isinstance(part, TensorDictParams))
    own: dict[str, Any] = loss.state_dict(keep_vars=True)  # of lazy ones there are no others
    there, here = ({n: _described(v) for n, v in some.items()} for some in (state, own))
    for name in sorted(own.keys() | state.keys()):
        found, wanted = there.get(name, "none"), here.get(name, "none")
        if name.startswith(lenient) and wanted not in (found, _ANY):
            why = f"has other networks: {name} is {found} there and {wanted} here"
            works = "build the trainer as it was built when this was written"
            raise SettingError("checkpoint", str(path), why, works)


def _described(value: Any) -> str:
    """What of a state is the same whatever was learnt."""
    if not isinstance(value, Tensor):
        return "there"
    return _ANY if is_lazy(value) else f"of shape {[*value.shape]}"


def _here(storage: Any, location: str) -> Any:
    """Memory of a device that this machine does not have is read into that of the host."""
    device = torch.device(location)
    missing = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    return storage if missing else None


_CONTAINERS = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict)
_PLAIN = (bool, int, float, complex, str, bytes, NoneType)


def _refuse_unreadable(value: Any, where: str) -> None:
    """Refuse what PyTorch's restricted unpickler would not read: objects, arrays of NumPy."""
    if type(value) in _PLAIN or isinstance(value, Tensor):
        return
    if type(value) in _MAPPINGS:
        for name, inner in value.items():
            _refuse_unreadable(name, where)
            _refuse_unreadable(inner, f"{where}.{name}")
    elif type(value) in _CONTAINERS:
        for inner in value:
            _refuse_unreadable(inner, where)
    elif not _is_read_back(value):
        why = f"is a {type(value).__name__}, which no checkpoint gives back: it holds no code"
        works = "give tensors and plain values in state_dict(): value.item(), value.tolist()"
        raise SettingError(f"state of {where}", value, why, works)


def _is_read_back(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # whatever it is, it would be the same when the run is resumed
        return False
    return True


def _apart(value: Any, folder: Path, known: Path | None) -> Any:
    """The same state with a list of files in place of each large tensor, which are written."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return value
        if value.device.type in ("cpu", "cuda") and value.nbytes >= LARGE and value.ndim:
            return _written(value.detach(), folder, known)
        # Of a view PyTorch would write all of its memory, and a mapped file not at all.
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
            with contextlib.suppress(OSError):  # it has none, or the disk knows no links
                # Compared, or damage to it would get a valid checksum here.
                if np.array_equal(np.fromfile(known / name, np.uint8), data):
                    os.link(known / name, folder / name)
                    continue
        data.tofile(folder / name)
    return {_MARK: names, "like": tensor[:0].clone(), "rows": len(tensor)}


def _empty_like(like: Tensor, rows: int, folder: Path) -> Tensor:
    """Return a tensor with ``rows`` rows, on the disk if it is too large for the memory."""
    shape = rows, *like.shape[1:]
    if math.prod(shape) * like.itemsize > memory_of_machine()[0] * IN_MEMORY:
        return zeros_on_disk(shape, like.dtype, folder)
    return torch.empty(shape, dtype=like.dtype)


def _together(value: Any, folder: Path) -> Any:
    """The state with its large tensors."""
    if isinstance(value, dict) and _MARK in value:
        like: Tensor = value["like"]
        whole = _empty_like(like, value["rows"], folder)
        target, start = whole.reshape(-1).view(torch.uint8).numpy(), 0
        for name in value[_MARK]:
            with (folder / Path(name).name).open("rb") as file:  # in this folder alone
                start += file.readinto(target[start:].data)
        if start != len(target):
            why = f"has {start} of the {len(target)} bytes of a tensor"
            raise SettingError("checkpoint", str(folder), why, "use another checkpoint")
        return whole.to(like.device)
    if isinstance(value, dict) and _ENTRIES in value:
        return TensorDict(_together(value[_ENTRIES], folder), value["batch_size"])
    return _mapped(lambda inner: _together(inner, folder), value)
