"""Prioritised sampling on a sum tree, on the host or on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.utils import unravel_index

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

    Args:
        size: number of values, all zero at first.
        device: where they are.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.size = size
        self.sums: list[Tensor] = []
        nodes = size + 1  # a place more, that writes of masked values can go to
        while not self.sums or nodes > _WIDEST_ROOT:
            nodes = -(-nodes // _FAN_OUT)
            whole = torch.zeros(nodes * _FAN_OUT, dtype=torch.float64, device=device)
            self.sums.append(whole)
        self._rows = [sums.view(-1, _FAN_OUT) for sums in self.sums]

    @property
    def values(self) -> Tensor:
        """All values, ``[size]``."""
        return self.sums[0][: self.size]

    def total(self) -> Tensor:
        """The sum of all values."""
        return self.sums[-1].sum()

    def min(self) -> Tensor:
        """The smallest positive value; infinite if there is none."""
        return torch.where(self.values > 0, self.values, torch.inf).min()

    def __getitem__(self, places: Tensor) -> Tensor:
        return self.sums[0][places]

    def __setitem__(self, places: Tensor | slice, values: Tensor | float) -> None:
        if isinstance(places, slice):
            places = torch.arange(self.size, device=self.sums[0].device)[places]
        values = torch.as_tensor(values, dtype=torch.float64, device=self.sums[0].device)
        self._write(places, values.expand(places.shape))

    def _write(self, places: Tensor, values: Tensor) -> None:
        self.sums[0][places] = values
        for rows, above in zip(self._rows, self.sums[1:]):
            places = places // _FAN_OUT
            above[places] = rows.index_select(0, places).sum(-1)

    def find(self, share: Tensor) -> Tensor:
        """Places whose part of the sum contains the given shares of it.

        Args:
            share: float64 in [0, 1), ``[batch]``.

        Returns:
            Places ``[batch]``, never one of value zero while any is positive.
        """
        reached = self.sums[-1].cumsum(0)
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
        return place


class HostPriorityTree(PriorityTree):
    """A tree in host memory, by NumPy where its operations take less time than PyTorch's.

    The smallest value is that of the smallest block. Of each block of values a lower bound is kept,
    which is made exact again only where it is the lowest of all.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._arrays = [sums.numpy() for sums in self.sums]
        self._row_arrays = [rows.numpy() for rows in self._rows]
        self._block = _FAN_OUT**2
        blocks = -(-(size + 1) // self._block)
        self._lowest, self._is_bound = np.full(blocks, np.inf), np.zeros(blocks, dtype=bool)

    def min(self) -> Tensor:
        """The smallest positive value; infinite if there is none."""
        while self._is_bound[block := int(self._lowest.argmin())]:
            first = block * self._block
            values = self._arrays[0][first : min(first + self._block, self.size)]
            self._lowest[block] = values.min(where=values > 0, initial=np.inf)
            self._is_bound[block] = False
        return torch.as_tensor(self._lowest[block])

    def _write(self, places: Tensor, values: Tensor) -> None:
        place, value = places.numpy(), values.numpy()
        self._arrays[0][place] = value
        block = place // self._block
        np.minimum.at(self._lowest, block, np.where(value > 0, value, np.inf))
        self._is_bound[block] = True
        for rows, above in zip(self._row_arrays, self._arrays[1:]):
            place = place // _FAN_OUT
            above[place] = torch.from_numpy(rows.take(place, 0)).sum(-1).numpy()

    def find(self, share: Tensor) -> Tensor:
        """Places whose part of the sum contains the given shares of it."""
        top = self._arrays[-1]
        reached = top.cumsum()
        wanted = share.numpy() * reached[-1]
        place = np.minimum(reached.searchsorted(wanted, "right"), len(top) - 1)
        rest, first = wanted - (reached - top)[place], np.arange(len(share)) * _FAN_OUT
        for rows in self._row_arrays[-2::-1]:
            children = torch.from_numpy(rows.take(place, 0))
            reached_so_far = children.cumsum(-1)
            sums = reached_so_far.numpy()
            target = np.minimum(rest, sums[:, -1] * _BELOW_ONE)
            found = torch.searchsorted(
                reached_so_far, torch.from_numpy(target).unsqueeze(1), right=True
            )
            child = found.numpy()[:, 0]
            at = first + child
            rest = target - (sums.ravel()[at] - children.numpy().ravel()[at])
            place = place * _FAN_OUT + child
        return torch.from_numpy(place)


class PrioritizedSampler(TorchRLPrioritizedSampler):  # type: ignore[misc, unused-ignore]
    """Prioritised experience replay (Schaul et al. 2016), without compiled extensions.

    TorchRL's class with its arguments and formulas, whose segment trees are compiled for one
    release of PyTorch; here they are torch operations, on the storage's device. A transition with
    priority p is drawn with probability (p + eps)^alpha over the sum of all (section 3.3); its
    ``priority_weight`` is (P / min P)^-beta (section 3.4, normalised by the largest possible
    weight). New transitions have the highest priority so far. Random numbers are PyTorch's.

    Args:
        max_capacity: transitions that the buffer holds.
        alpha: exponent of priorities; 0 samples uniformly.
        beta: exponent of the correction by importance weights.
        eps: added to priorities.
        dtype: of weights.
        reduction: how errors of several entries become one priority: ``max``, ``min``, ``median``
            or ``mean``.
        max_priority_within_buffer: whether the highest priority is that of transitions still
            stored, rather than of all so far.
        device: of the tree; ``None``: the storage's.
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value in (("alpha", alpha), ("beta", beta)):
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {name}={value}")
        self._max_capacity = max_capacity
        self._alpha, self._beta, self._eps = alpha, beta, eps
        self.dtype, self.reduction = dtype, reduction
        self._max_priority_within_buffer = max_priority_within_buffer
        self._device = None if device is None else torch.device(device)
        self._init()

    def _init(self) -> None:
        device, size = self._device or torch.device("cpu"), self._max_capacity
        on_host = device.type == "cpu"
        self._sum_tree = HostPriorityTree(size) if on_host else PriorityTree(size, device)
        self._min_tree = self._sum_tree
        self._highest: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where priorities are."""
        return self._sum_tree.values.device  # type: ignore[no-any-return]

    @property
    def default_priority(self) -> Any:
        """Priority of new transitions: the highest so far, or 1."""
        if self._max_priority_within_buffer and self._alpha > 0 and self._highest is not None:
            highest = self._sum_tree.values.max()
            raw = (highest ** (1 / self._alpha) - self._eps).clamp_min(0)
            return torch.where(highest > 0, raw, torch.ones_like(raw))
        return 1.0 if self._highest is None else self._highest

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draw transitions by priority, with replacement.

        Returns:
            Their places, and their importance weights as ``priority_weight``.

        Raises:
            RuntimeError: if nothing is stored.
        """
        self._maybe_init_from_storage(storage)
        if len(storage) == 0:
            raise RuntimeError("Cannot sample from an empty storage.")
        tree: PriorityTree = self._sum_tree
        share = torch.rand(batch_size, dtype=torch.float64, device=self.device, generator=self._rng)
        index: Any = tree.find(share)
        weight = (tree[index] / tree.min()).to(self.dtype).pow_(-self._beta)
        if storage.ndim > 1:
            index = unravel_index(index, storage.shape)
        return index, {"priority_weight": weight}

    @torch.no_grad()
    def update_priority(
        self,
        index: int | Tensor,
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
    ) -> None:
        """Set priorities.

        Args:
            index: places, ``[batch]`` or, in a storage of several dimensions, ``[batch, ndim]``;
                negative ones are left out.
            priority: not negative, one for each place or one for all.
            storage: whose shape is needed for several dimensions.
        """
        self._maybe_init_from_storage(storage)
        index = torch.as_tensor(index, dtype=torch.long, device=self.device)
        if index.ndim > 1:
            assert storage is not None
            strides = torch.tensor((*storage.shape[1:], 1)).flip(0).cumprod(0).flip(0)
            index = (index * strides.to(self.device)).sum(-1)
        index = index.reshape(-1)
        if not len(index):
            return
        priority = torch.as_tensor(priority, device=self.device).detach().to(torch.float32)
        priority = priority.reshape(-1).expand(index.shape)
        if not index.is_cpu or bool((index < 0).any()):  # a GPU is not asked
            written = index >= 0
            index = torch.where(written, index, self._max_capacity)
            value = torch.where(written, (priority + self._eps).pow(self._alpha), 0.0)
            priority = torch.where(written, priority, 0.0)
        else:
            value = (priority + self._eps).pow(self._alpha)
        highest = priority.max()
        self._highest = highest if self._highest is None else self._highest.maximum(highest)
        self._sum_tree[index] = value

    def _maybe_init_from_storage(self, storage: Storage | None) -> None:
        """Move the tree to a storage's GPU; priorities stay."""
        device = self._tree_device_from_storage(storage)
        if device is not None and device.type != self.device.type:
            state = self.state_dict()
            self._device = device
            self.load_state_dict(state)

    def add(self, index: Any) -> None:
        """Do nothing: :meth:`mark_update` follows."""

    def extend(self, index: Any) -> None:
        """Do nothing: :meth:`mark_update` follows."""

    # ------------------------------------------------------------------ in and out
    def state_dict(self) -> dict[str, Any]:
        """Exponents and priorities, as plain values and tensors."""
        values = self._sum_tree.values
        written = values.nonzero()
        count = int(written[-1]) + 1 if len(written) else 0
        return {
            "alpha": self._alpha,
            "beta": self._beta,
            "eps": self._eps,
            "highest": self._highest,
            "values": values[:count].clone(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._alpha, self._beta = state_dict["alpha"], state_dict["beta"]
        self._eps = state_dict["eps"]
        self._init()
        values, highest = state_dict["values"], state_dict["highest"]
        self._highest = None if highest is None else highest.to(self.device)
        self._sum_tree[: len(values)] = values

    def dumps(self, path: Path | str) -> None:
        """Write the state to a folder."""
        Path(path).mkdir(exist_ok=True)
        torch.save(self.state_dict(), Path(path) / "priorities.pt")

    def loads(self, path: Path | str) -> None:
        """Read the state from a folder."""
        self.load_state_dict(torch.load(Path(path) / "priorities.pt", weights_only=True))

    def _tree_argmax(self) -> tuple[Tensor, Tensor]:
        return self._sum_tree.values.max(0)  # type: ignore[no-any-return]
