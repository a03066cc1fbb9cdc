"""Sum trees for sampling values in proportion to their size."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kit.steps.errors import SettingError

_FAN_OUT = 32
"""Number of children per node."""
_WIDEST_ROOT = 1_024
"""Maximum number of children of the root; a wider root would cost more than another level."""
_BELOW_ONE = 1 - 2**-53
"""Largest float64 below 1."""


class PriorityTree:
    """A sum tree of non-negative values, for sampling them in proportion to their size.

    The leaves are the values. Each node stores the sum of its children and is recomputed when a
    child changes, so rounding errors do not accumulate. Every operation processes a batch in
    O(log(size)) steps, on any device and without synchronising with the host.

    Indices, fractions and values are arrays, which are tensors here and NumPy arrays in
    :class:`~kit.buffers.numba_tree.NumbaPriorityTree`; see :meth:`array`.

    Args:
        size: Number of values, which are initially zero.
        device: Device of the values.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.size, self.device = size, torch.device(device)
        self.sums: list[Tensor] = []
        nodes = size + 1  # writes that are masked out go to one extra entry
        while not self.sums or nodes > _WIDEST_ROOT:
            nodes = -(-nodes // _FAN_OUT)
            level = torch.zeros(nodes * _FAN_OUT, dtype=torch.float64, device=device)
            self.sums.append(level)
        self._rows = [sums.view(-1, _FAN_OUT) for sums in self.sums]
        self._lowest = torch.full_like(self._rows[0][:, 0], torch.inf)  # lowest positive value

    @property
    def values(self) -> Tensor:
        """All values, ``[size]``."""
        return self.sums[0][: self.size]

    def array(self, tensor: Tensor) -> Any:
        """Convert a tensor to the tree's array type without copying it."""
        return tensor

    def tensor(self, array: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Return an array as a tensor, optionally converted to ``dtype``."""
        return array if dtype is None else array.to(dtype)  # type: ignore[no-any-return]

    def higher(self, one: Tensor | None, other: Any) -> Tensor:
        """Return the higher of two numbers, or NaN if either is NaN. ``one`` may be ``None``."""
        return other if one is None else one.maximum(other)  # type: ignore[no-any-return]

    def min(self) -> Tensor | float:
        """Return the smallest positive value, or infinity if no value is positive."""
        return self._lowest.min()

    def limits(self, places: Any, values: Any) -> tuple[Any, Any, Any, Any]:
        """Return the minimum and maximum of host arrays of indices and of values.

        The maximum value is NaN if any value is NaN.
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
        """Return the indices at the given fractions of the cumulative sum.

        Args:
            share: Fractions of the sum, float64 in [0, 1), ``[batch]``.

        Returns:
            Indices ``[batch]`` of positive values, and these values.

        Raises:
            SettingError: If the sum is not positive and finite (not checked on a GPU).
        """
        reached = self.sums[-1].cumsum(0)
        if reached.is_cpu:  # a check on a GPU would synchronise with the host
            check_sum(float(reached[-1]))
        wanted = share * reached[-1]
        place = torch.searchsorted(reached, wanted, right=True).clamp_(max=len(reached) - 1)
        rest = wanted - (reached - self.sums[-1])[place]
        for rows in self._rows[-2::-1]:
            children = rows.index_select(0, place)
            reached = children.cumsum(-1)
            # Keep the target below the sum, so that rounding cannot select an index after the end.
            target = torch.minimum(rest, reached[:, -1] * _BELOW_ONE).unsqueeze(1)
            child = torch.searchsorted(reached, target, right=True)
            rest = (target - (reached - children).gather(1, child)).squeeze(1)
            place = place * _FAN_OUT + child.squeeze(1)
        return place, self[place]


def check_sum(total: float) -> None:
    """Raise an error if the priorities do not have a valid sum for sampling.

    Raises:
        SettingError: If the sum is not positive and finite.
    """
    if not 0 < total < math.inf:
        hint = "Use finite TD errors, a smaller alpha, or eps > 0 if all TD errors are 0"
        reason = "Sampling requires a positive and finite sum of priorities"
        raise SettingError("priorities", total, reason, hint)
