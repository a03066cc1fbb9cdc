"""Trees in which one of many values is found by its share of their sum."""

from __future__ import annotations

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
BLOCK = 1_024
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

    def limits(self, places: Any, values: Any) -> tuple[Any, Any, Any, Any]:
        """The first and the last place, the lowest and the highest value, of some in host memory.

        The highest is not a number if one of them is not.
        """
        return int(places.min()), int(places.max()), values.min(), values.max()

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
    """A tree in host memory, whose arrays are NumPy's and whose sums compiled code keeps.

    Places are not checked: the compiled code does not look at limits.

    The smallest value is that of the smallest block. Of each block of values a lower bound is kept,
    which is made exact again only where it is the lowest of all.

    Subclasses read values (``__getitem__``) and define :attr:`sum`, :meth:`_write` and
    :meth:`_first_with`.

    Args:
        size: number of values, all zero at first.
    """

    def __init__(self, size: int) -> None:
        self.size, self.device = size, torch.device("cpu")
        blocks = -(-size // BLOCK)
        self._bounds, self._is_bound = np.full(blocks, np.inf), np.zeros(blocks, dtype=bool)

    @property
    def sum(self) -> float:
        """The sum of all values."""
        raise NotImplementedError

    def _write(self, places: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Set values, and lower the bounds of their blocks; of several for one place the last one.

        Both arrays lie in one piece.
        """
        raise NotImplementedError

    def _first_with(
        self, sums: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The first places up to which, these included, values add up to these sums; and values."""
        raise NotImplementedError

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

    def higher(self, one: Tensor | None, other: float) -> Tensor:
        """The higher of two numbers; not a number if one of them is not."""
        if one is not None and not other > float(one) and other == other:
            return one
        return torch.tensor(float(other), dtype=torch.float32)

    def min(self) -> float:
        """The smallest positive value; infinite if there is none."""
        while self._is_bound[block := int(self._bounds.argmin())]:
            first = block * BLOCK
            values = self[np.arange(first, min(first + BLOCK, self.size))]
            self._bounds[block] = values.min(where=values > 0, initial=np.inf)
            self._is_bound[block] = False
        return float(self._bounds[block])

    def __setitem__(self, places: NDArray[np.int64], values: NDArray[np.floating[Any]]) -> None:
        # Compiled code takes numbers as they lie in memory.
        self._write(np.ascontiguousarray(places), np.ascontiguousarray(values, dtype=np.float64))

    def find(self, share: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Places ``[batch]`` whose part of the sum contains the given shares of it, and values."""
        _check_sum(total := self.sum)
        wanted = share * total
        place, found = self._first_with(wanted)
        while not found.all():
            # A share of nothing, which belongs to the first positive value, or rounding led beyond
            # the last one of a branch.
            lower = np.maximum(np.nextafter(wanted, 0.0), _SMALLEST)
            wanted = np.where(found > 0, wanted, lower)
            place, found = self._first_with(wanted)
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
