"""Trees in which one of many values is found by its share of their sum."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kit.steps.errors import SettingError

_FAN_OUT = 32
"""Children of a node."""
_WIDEST_ROOT = 1_024
"""Children of the root: up to here one cumulative sum is cheaper than another level."""
_BELOW_ONE = 1 - 2**-53
"""The largest float64 below 1."""


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
            check_sum(float(reached[-1]))
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


def check_sum(total: float) -> None:
    """Raise an error if nothing can be drawn by these priorities.

    Raises:
        SettingError: if their sum is not positive and finite.
    """
    if not 0 < total < math.inf:
        works = "give finite errors, a smaller exponent, or eps above 0 where all errors are 0"
        raise SettingError("priorities", total, "is their sum, by which none can be drawn", works)
