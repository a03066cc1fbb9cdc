"""Prioritised sampling on a sum tree of torch operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.utils import unravel_index

_FAN_OUT = 64
"""Children of a node: wide nodes mean few operations on larger tensors."""
_WIDEST_ROOT = 16_384
"""Children of the root: up to here one cumulative sum is cheaper than another level."""
_BELOW_ONE = 1 - 2**-53
"""The largest float64 below 1."""


class PriorityTree:
    """Non-negative values, of which one can be found by its share of their sum.

    A tree with the values as leaves; a node holds the sum and the smallest positive value of its
    children, recomputed from them whenever one changes, so that rounding errors do not add up.
    Everything is done for a batch at a time, in operations whose number grows with the logarithm
    of the size, on any device and without reading a tensor on the host.

    Args:
        size: number of values, all zero at first.
        device: where they are.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.size = size
        self.sums: list[Tensor] = []
        self.smallest: list[Tensor] = []
        nodes = size + 1  # a place more, that writes of masked values can go to
        while True:
            whole = -(-nodes // _FAN_OUT) * _FAN_OUT
            self.sums.append(torch.zeros(whole, dtype=torch.float64, device=device))
            self.smallest.append(torch.full_like(self.sums[-1], torch.inf))
            if nodes <= _WIDEST_ROOT:
                break
            nodes = whole // _FAN_OUT

    @property
    def values(self) -> Tensor:
        """All values, ``[size]``."""
        return self.sums[0][: self.size]

    def total(self) -> Tensor:
        """The sum of all values."""
        return self.sums[-1].sum()

    def min(self) -> Tensor:
        """The smallest positive value; infinite if there is none."""
        return self.smallest[-1].min()

    def __getitem__(self, places: Tensor) -> Tensor:
        return self.sums[0][places]

    def __setitem__(self, places: Tensor | slice, values: Tensor | float) -> None:
        if isinstance(places, slice):
            places = torch.arange(self.size, device=self.sums[0].device)[places]
        values = torch.as_tensor(values, dtype=torch.float64, device=self.sums[0].device)
        values = values.expand(places.shape)
        for level, (sums, smallest) in enumerate(zip(self.sums, self.smallest)):
            if level:
                places = places // _FAN_OUT
                below = self.sums[level - 1].view(-1, _FAN_OUT).index_select(0, places)
                lower = self.smallest[level - 1].view(-1, _FAN_OUT).index_select(0, places)
                sums[places], smallest[places] = below.sum(-1), lower.amin(-1)
            else:
                sums[places] = values
                smallest[places] = values.masked_fill(values <= 0, torch.inf)

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
        weight = self.sums[-1][place]
        rest = wanted - (reached[place] - weight)
        for sums in self.sums[-2::-1]:
            children = sums.view(-1, _FAN_OUT).index_select(0, place)
            sums_so_far = children.cumsum(-1)
            # A share of the node below one: rounding cannot lead beyond its last positive child.
            inside = (rest / weight).clamp_(0, _BELOW_ONE)
            target = (inside * sums_so_far[:, -1]).unsqueeze(1)
            child = torch.searchsorted(sums_so_far, target, right=True).clamp_(max=_FAN_OUT - 1)
            chosen = children.gather(1, child)
            rest = (target - (sums_so_far.gather(1, child) - chosen)).squeeze(1)
            weight = chosen.squeeze(1)
            place = place * _FAN_OUT + child.squeeze(1)
        return place


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
        self._sum_tree = self._min_tree = PriorityTree(self._max_capacity, self._device or "cpu")
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
        written = index >= 0
        highest = torch.where(written, priority, 0.0).max()
        self._highest = highest if self._highest is None else self._highest.maximum(highest)
        value = torch.where(written, torch.pow(priority + self._eps, self._alpha), 0.0)
        self._sum_tree[torch.where(written, index, self._max_capacity)] = value

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
