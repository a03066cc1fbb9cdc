"""A guard that raises where the host reads what a tensor holds: there a GPU would be waited for."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
TORCH = f"{Path(torch.__file__).parent}/"
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
NUMBERS = "kit/trainer/rng.py"
"""Puts the random numbers of the process back when a run ends: they are on the host."""
READING = {
    Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.item, Tensor.__array__, Tensor.__bool__,
    Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.is_nonzero,
}  # fmt: skip


class HostReadError(AssertionError):
    """The host read a tensor."""


class Reads:
    """What was read, and in which file."""

    def __init__(self, forbid: bool) -> None:
        self.forbid = forbid
        self.seen: list[str] = []
        self.places: list[str] = []

    def note(self, what: str) -> None:
        frames = traceback.extract_stack()
        if any(frame.name == "__exit__" and frame.filename.endswith(NUMBERS) for frame in frames):
            return
        ours = [f for f in frames if not f.filename.startswith((__file__, TORCH))]
        place = ours[-1]
        self.seen.append(what)
        self.places.append(place.filename)
        if self.forbid:
            raise HostReadError(
                f"{what} reads a tensor: {place.filename}:{place.lineno} {place.line}"
            )


class _Operations(TorchDispatchMode):
    """Operations whose result, or the shape of it, has to be known by the host."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function in INDEXING:
            by_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
            filled = len(args) > 2 and args[2].numel() == 1  # with one value: masked_fill
            if by_mask and not filled:
                self.reads.note(f"{function} by a mask")
        elif {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*function.tags}:
            self.reads.note(str(function))
        return function(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """Methods that read a tensor on the CPU without any operation."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        to_cpu = function is Tensor.to and "cpu" in (*args[1:], *(kwargs or {}).values())
        if function in READING or to_cpu:
            self.reads.note(f"Tensor.{function.__name__}")
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def host_reads(forbid: bool = True) -> Iterator[Reads]:
    """Raise :class:`HostReadError` at every read in this block, or only note them.

    A read is noted once by its method and once more by the operation it leads to, if any.
    """
    reads = Reads(forbid)
    with _Operations(reads), _Methods(reads):
        yield reads
