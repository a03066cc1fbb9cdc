"""Sum tree of priorities in host memory, compiled with Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kit.buffers.priority_trees import PriorityTree, check_sum

BLOCK = 1_024
"""Number of values in a block. A lower bound is stored for each block."""
_SMALLEST = float(np.nextafter(0.0, 1.0))
"""Smallest positive float64."""


class NumbaPriorityTree(PriorityTree):
    """A sum tree in host memory, four times as fast as :class:`PriorityTree`.

    Indices and values are NumPy arrays. Indices are not checked, and the compiled code accesses
    memory outside the tree if an index is out of range.

    The tree is binary, but only every third level is stored. Each stored node has eight children,
    which fill one cache line. The two levels in between are recomputed on demand. A batch is
    processed one level at a time without branches, so that memory accesses for many rows overlap.

    A lower bound is stored for each block of values. A bound is recomputed only if it is the lowest
    of all bounds, so finding the smallest value rarely reads more than one block.

    Args:
        size: Number of values, which are initially zero.
    """

    def __init__(self, size: int) -> None:
        self.size, self.device = size, torch.device("cpu")
        blocks = -(-size // BLOCK)
        self._bounds, self._is_bound = np.full(blocks, np.inf), np.zeros(blocks, dtype=bool)
        counts = [max(1 << size.bit_length(), 8)]  # nodes per level, in groups of eight
        while counts[-1] > 8:
            counts.append(max(counts[-1] >> 3, 8))
        self._starts = np.cumsum([0, *counts]).astype(np.uint64)
        # Unlike NumPy, PyTorch aligns memory to cache lines.
        self._nodes = torch.zeros(sum(counts), dtype=torch.float64).numpy()

    @property
    def sum(self) -> float:
        """Sum of all values."""
        return float(_sum_of_eight(self._nodes, self._starts[-2]))

    def limits(self, places: Any, values: Any) -> tuple[Any, Any, Any, Any]:
        """Return the minimum and maximum index, and the minimum and maximum value."""
        return _limits(places, values)  # type: ignore[no-any-return]

    def __getitem__(self, places: Any) -> NDArray[np.float64]:
        values: NDArray[np.float64] = self._nodes[np.asarray(places)]
        return values

    @property
    def values(self) -> Tensor:
        """All values, ``[size]``."""
        return torch.from_numpy(self[np.arange(self.size)])

    def array(self, tensor: Tensor) -> NDArray[Any]:
        """Return a NumPy array that shares memory with a host tensor."""
        return tensor.numpy()

    def tensor(self, array: NDArray[Any], dtype: torch.dtype | None = None) -> Tensor:
        """Return a NumPy array as a tensor, optionally converted to ``dtype``."""
        if dtype is torch.float32:  # NumPy converts dtypes three times as fast as PyTorch
            return torch.from_numpy(array.astype(np.float32))
        found = torch.from_numpy(array)
        return found if dtype is None else found.to(dtype)

    def higher(self, one: Tensor | None, other: float) -> Tensor:
        """Return the higher of two numbers, or NaN if either is NaN."""
        if one is not None and not other > float(one) and other == other:
            return one
        return torch.tensor(float(other), dtype=torch.float32)

    def min(self) -> float:
        """Return the smallest positive value, or infinity if no value is positive."""
        while self._is_bound[block := int(self._bounds.argmin())]:
            first = block * BLOCK
            values = self[np.arange(first, min(first + BLOCK, self.size))]
            self._bounds[block] = values.min(where=values > 0, initial=np.inf)
            self._is_bound[block] = False
        return float(self._bounds[block])

    def __setitem__(self, places: NDArray[np.int64], values: NDArray[np.floating[Any]]) -> None:
        # The compiled code expects contiguous arrays.
        places = np.ascontiguousarray(places)
        values = np.ascontiguousarray(values, dtype=np.float64)
        _write(self._nodes, self._starts, places, values, self._bounds, self._is_bound)

    def find(self, share: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the indices ``[batch]`` at given fractions of the cumulative sum, and values."""
        check_sum(total := self.sum)
        wanted = share * total
        place, found = _find(self._nodes, self._starts, wanted)
        while not found.all():
            # A fraction of 0 must select a positive value, and rounding may skip the last value.
            lower = np.maximum(np.nextafter(wanted, 0.0), _SMALLEST)
            wanted = np.where(found > 0, wanted, lower)
            place, found = _find(self._nodes, self._starts, wanted)
        return place, found

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "values": self.values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["size"])  # type: ignore[misc]
        self[np.arange(self.size)] = state["values"].numpy()


def _compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function now, or load it from Numba's cache if caching is possible."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, cache=True)(function)
        except RuntimeError:  # no writable cache folder
            return numba.njit(signature)(function)

    return compiled


# Indices are unsigned, so Numba generates no code for negative indices.
@_compiled("float64(float64[::1], uint64)")
def _sum_of_eight(nodes: Any, first: Any) -> Any:
    """Return the sum of eight nodes, added in pairs as in a binary tree."""
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    left = (nodes[first] + nodes[first + one]) + (nodes[first + two] + nodes[first + three])
    first += four
    right = (nodes[first] + nodes[first + one]) + (nodes[first + two] + nodes[first + three])
    return left + right


@_compiled("Tuple((int64, int64, float32, float32))(int64[:], float32[:])")
def _limits(places: Any, values: Any) -> Any:
    """Return the minimum and maximum index, and the minimum and maximum value."""
    least, most, lowest, highest = places[0], places[0], values[0], values[0]
    for row in range(len(places)):
        least, most = min(least, places[row]), max(most, places[row])
        lowest = min(lowest, values[row])
        if not values[row] <= highest and highest == highest:  # keeps NaN
            highest = values[row]
    return least, most, lowest, highest


@_compiled("void(float64[::1], uint64[::1], int64[::1], float64[::1], float64[::1], boolean[::1])")
def _write(nodes: Any, starts: Any, places: Any, values: Any, bounds: Any, is_bound: Any) -> None:
    """Set values. Update the sums that include them and the lower bounds for their blocks."""
    place = places.astype(np.uint64)
    for row in range(len(place)):
        value, block = values[row], place[row] // np.uint64(BLOCK)
        if 0 < value <= bounds[block]:
            bounds[block] = value
        elif nodes[place[row]] == bounds[block]:
            is_bound[block] = True  # the bound may now be lower than every value
        nodes[place[row]] = value
    for level in range(1, len(starts) - 1):
        children, start = starts[level - 1], starts[level]
        parents = (start - children) >> np.uint64(3)
        if parents <= len(place):  # updating all parents on this level is cheaper
            for parent in range(parents):
                nodes[start + parent] = _sum_of_eight(nodes, children + (parent << np.uint64(3)))
        else:
            for row in range(len(place)):
                parent = place[row] >> np.uint64(3)
                nodes[start + parent] = _sum_of_eight(nodes, children + (parent << np.uint64(3)))
                place[row] = parent


@_compiled("Tuple((int64[::1], float64[::1]))(float64[::1], uint64[::1], float64[::1])")
def _find(nodes: Any, starts: Any, sums: Any) -> Any:
    """Return the first indices at which the cumulative sum reaches ``sums``, and the values."""
    one, two, three = np.uint64(1), np.uint64(2), np.uint64(3)
    rest = sums.copy()
    place = np.zeros(len(rest), np.uint64)
    first = np.empty(len(rest))  # values of the first children, read for all rows in advance
    for level in range(len(starts) - 2, -1, -1):
        start = starts[level]
        for row in range(len(rest)):
            first[row] = nodes[start + (place[row] << three)]
        for row in range(len(rest)):
            node, wanted = start + (place[row] << three), rest[row]
            left = (first[row] + nodes[node + one]) + (nodes[node + two] + nodes[node + three])
            is_right = wanted > left
            wanted = wanted - left if is_right else wanted
            node += np.uint64(is_right) << two
            left = nodes[node] + nodes[node + one]
            is_right = wanted > left
            wanted = wanted - left if is_right else wanted
            node += np.uint64(is_right) << one
            left = nodes[node]
            is_right = wanted > left
            rest[row] = wanted - left if is_right else wanted
            place[row] = node + np.uint64(is_right) - start
    for row in range(len(rest)):
        rest[row] = nodes[place[row]]
    return place.astype(np.int64), rest
