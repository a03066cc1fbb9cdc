"""Trees in which one of many values is found by its share of their sum."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import ExtensionFileLoader
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.steps.errors import SettingError

_FAN_OUT = 32
"""Children of a node."""
_WIDEST_ROOT = 1_024
"""Children of the root: up to here one cumulative sum is cheaper than another level."""
_BELOW_ONE = 1 - 2**-53
"""The largest float64 below 1."""
_BLOCK = 1_024
"""Values whose smallest is kept."""
_SMALLEST = float(np.nextafter(0.0, 1.0))
"""The smallest positive float64."""


class PriorityTree:
    """Non-negative values, of which one can be found by its share of their sum.

    A tree with the values as leaves; a node holds the sum of its children, recomputed from them
    whenever one changes, so that rounding errors do not add up. Everything is done for a batch at a
    time, in operations whose number grows with the logarithm of the size, on any device and without
    reading a tensor on the host.

    Places, shares and values are arrays of the tree's own kind, which here are tensors; see
    :meth:`array`.

    Args:
        size: number of values, all zero at first.
        device: where they are.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.size, self.device = size, torch.device(device)
        self.sums: list[Tensor] = []
        nodes = size + 1  # a place more, that writes of masked values can go to
        while not self.sums or nodes > _WIDEST_ROOT:
            nodes = -(-nodes // _FAN_OUT)
            whole = torch.zeros(nodes * _FAN_OUT, dtype=torch.float64, device=device)
            self.sums.append(whole)
        self._rows = [sums.view(-1, _FAN_OUT) for sums in self.sums]
        self._lowest = torch.full_like(self._rows[0][:, 0], torch.inf)  # positive value of each row

    @property
    def values(self) -> Tensor:
        """All values, ``[size]``."""
        return self.sums[0][: self.size]

    def array(self, tensor: Tensor) -> Any:
        """A tensor on the tree's device as an array of the tree's kind, in the same memory."""
        return tensor

    def tensor(self, array: Any, dtype: torch.dtype | None = None) -> Tensor:
        """An array of the tree's kind as a tensor, of its own type or another."""
        return array if dtype is None else array.to(dtype)  # type: ignore[no-any-return]

    def higher(self, one: Tensor | None, other: Any) -> Tensor:
        """The higher of two numbers, the second of the tree's kind."""
        return other if one is None else one.maximum(other)  # type: ignore[no-any-return]

    def min(self) -> Tensor | float:
        """The smallest positive value; infinite if there is none."""
        return self._lowest.min()

    def __getitem__(self, places: Any) -> Any:
        return self.sums[0][places]

    def __setitem__(self, places: Any, values: Any) -> None:
        self.sums[0][places] = values.to(self.sums[0].dtype)
        siblings = self._rows[0].index_select(0, row := places // _FAN_OUT)
        self._lowest[row] = torch.where(siblings > 0, siblings, torch.inf).amin(-1)
        for rows, above in zip(self._rows, self.sums[1:]):
            places = places // _FAN_OUT
            above[places] = rows.index_select(0, places).sum(-1)

    def find(self, share: Any) -> Any:
        """Places whose part of the sum contains the given shares of it.

        Args:
            share: float64 in [0, 1), ``[batch]``.

        Returns:
            Places ``[batch]``, none of value zero, and their values.

        Raises:
            SettingError: if the sum is not positive and finite (on a GPU it is not asked).
        """
        reached = self.sums[-1].cumsum(0)
        if reached.is_cpu:  # a GPU is not asked
            _check_sum(float(reached[-1]))
        wanted = share * reached[-1]
        place = torch.searchsorted(reached, wanted, right=True).clamp_(max=len(reached) - 1)
        rest = wanted - (reached - self.sums[-1])[place]
        for rows in self._rows[-2::-1]:
            children = rows.index_select(0, place)
            reached = children.cumsum(-1)
            # Below the sum: rounding cannot lead beyond the last positive child.
            target = torch.minimum(rest, reached[:, -1] * _BELOW_ONE).unsqueeze(1)
            child = torch.searchsorted(reached, target, right=True)
            rest = (target - (reached - children).gather(1, child)).squeeze(1)
            place = place * _FAN_OUT + child.squeeze(1)
        return place, self[place]


class CompiledPriorityTree(PriorityTree):
    """A tree in host memory, whose arrays are NumPy's: Numba's where it is, else TorchRL's of C++.

    Places are not checked: neither looks at limits.

    The smallest value is that of the smallest block. Of each block of values a lower bound is kept,
    which is made exact again only where it is the lowest of all.

    Args:
        size: number of values, all zero at first.
        make_tree: makes the tree of sums, with the methods of TorchRL's ``SumSegmentTreeFp64``.

    Raises:
        ImportError: if there is no Numba and TorchRL's compiled trees cannot be loaded.
    """

    def __init__(self, size: int, make_tree: Callable[[int], Any] | None = None) -> None:
        self.size, self.device = size, torch.device("cpu")
        self._tree = (make_tree or compiled_sum_tree)(size)
        blocks = -(-size // _BLOCK)
        self._bounds, self._is_bound = np.full(blocks, np.inf), np.zeros(blocks, dtype=bool)

    @property
    def values(self) -> Tensor:
        """All values, ``[size]``."""
        return torch.from_numpy(self[np.arange(self.size)])

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """A tensor in host memory as an array of NumPy."""
        return tensor.numpy()

    def tensor(self, array: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        """An array of NumPy as a tensor, of its own type or another."""
        if dtype is torch.float32:  # NumPy takes a third of PyTorch's time
            return torch.from_numpy(array.astype(np.float32))
        found = torch.from_numpy(array)
        return found if dtype is None else found.to(dtype)

    def higher(self, one: Tensor | None, other: np.floating[Any]) -> Tensor:
        """The higher of two numbers, the second of NumPy; not a number if one of them is not."""
        if one is not None and not other > float(one) and other == other:
            return one
        return torch.tensor(float(other), dtype=torch.float32)

    def min(self) -> float:
        """The smallest positive value; infinite if there is none."""
        while self._is_bound[block := int(self._bounds.argmin())]:
            first = block * _BLOCK
            values = self[np.arange(first, min(first + _BLOCK, self.size))]
            self._bounds[block] = values.min(where=values > 0, initial=np.inf)
            self._is_bound[block] = False
        return float(self._bounds[block])

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        # Tensors, which TorchRL's sampler gives where alpha changes, are not for C++ compiled for
        # another release of PyTorch: it would read them where they are not.
        values: NDArray[np.float64] = self._tree.at(np.asarray(places))
        return values

    def __setitem__(self, places: NDArray[np.int64], values: NDArray[np.floating[Any]]) -> None:
        # C++ takes numbers as they lie in memory.
        places = np.ascontiguousarray(places)
        values = np.ascontiguousarray(values, dtype=np.float64)
        self._tree.update(places, values)
        block = places // _BLOCK
        np.minimum.at(self._bounds, block, values)  # below a block's smallest where one is zero
        self._is_bound[block] = True

    def find(self, share: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Places ``[batch]`` whose part of the sum contains the given shares of it, and values."""
        total = self._tree.query(0, self.size)
        _check_sum(total)
        wanted = share * total
        place: NDArray[np.int64] = self._tree.scan_lower_bound(wanted)
        while not (found := self[place]).all():
            # A share of nothing, which belongs to the first positive value, or rounding led beyond
            # the last one of a branch.
            lower = np.maximum(np.nextafter(wanted, 0.0), _SMALLEST)
            wanted = np.where(found > 0, wanted, lower)
            place = self._tree.scan_lower_bound(wanted)
        return place, found

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "values": self.values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["size"])  # type: ignore[misc]
        self[np.arange(self.size)] = state["values"].numpy()


def _check_sum(total: float) -> None:
    if not 0 < total < np.inf:
        works = "give finite errors, a smaller exponent, or eps above 0 where all errors are 0"
        raise SettingError("priorities", total, "is their sum, by which none can be drawn", works)


def make_priority_tree(size: int, device: torch.device) -> PriorityTree:
    """The fastest tree for a device: on the host a compiled one, where there is one."""
    if device.type == "cpu":
        with contextlib.suppress(ImportError):
            return CompiledPriorityTree(size)
    return PriorityTree(size, device)


def compiled_sum_tree(size: int) -> Any:
    """Numba's tree of sums, a fifth faster in a run than TorchRL's, or that of TorchRL."""
    with contextlib.suppress(ImportError):  # Numba is also none where it does not know this NumPy
        from kit.buffers.numba_tree import NumbaSumTree

        return NumbaSumTree(size)
    return torchrl_sum_tree(size)


def torchrl_sum_tree(size: int) -> Any:
    """TorchRL's tree of sums in host memory."""
    return _compiled_trees().SumSegmentTreeFp64(size)


@cache
def _compiled_trees() -> Any:
    """TorchRL's extension.

    It is compiled for one release of PyTorch, and with another one not all of the functions that it
    calls exist. None of them is called by trees of NumPy arrays, so functions are looked up when
    they are called. TorchRL itself would give tensors to it, so it is not registered as its module.
    """
    try:
        return importlib.import_module("torchrl._torchrl")
    except ImportError:
        spec = importlib.util.find_spec("torchrl._torchrl")
        if spec is None or not isinstance(spec.loader, ExtensionFileLoader) or os.name != "posix":
            raise
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.setdlopenflags(flags)
    return module
