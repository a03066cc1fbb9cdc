"""TorchRL's compiled tree of priorities in host memory."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import cache
from importlib.machinery import ExtensionFileLoader
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kit.buffers.priority_trees import BLOCK, CompiledPriorityTree


class TorchRLPriorityTree(CompiledPriorityTree):
    """TorchRL's ``SumSegmentTreeFp64``.

    Args:
        size: number of values, all zero at first.

    Raises:
        ImportError: if TorchRL's extension cannot be loaded.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._tree = _compiled_trees().SumSegmentTreeFp64(size)

    @property
    def sum(self) -> float:
        """The sum of all values."""
        return float(self._tree.query(0, self.size))

    def __getitem__(self, places: Any) -> NDArray[np.float64]:
        # A tensor is not for C++ compiled for another release of PyTorch: it would read it where
        # it is not.
        values: NDArray[np.float64] = self._tree.at(np.asarray(places))
        return values

    def _write(self, places: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        self._tree.update(places, values)
        block = places // BLOCK
        np.minimum.at(self._bounds, block, values)  # below a block's smallest where one is zero
        self._is_bound[block] = True

    def _first_with(
        self, sums: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        place: NDArray[np.int64] = self._tree.scan_lower_bound(sums)
        return place, self[place]


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
