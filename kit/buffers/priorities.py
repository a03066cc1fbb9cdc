"""Prioritized sampling with a sum tree, on the host or on a GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data import PrioritizedSampler as TorchRLPrioritizedSampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.utils import unravel_index

from kit.buffers.priority_trees import PriorityTree
from kit.config.devices import usable_device
from kit.steps import SettingError
from kit.steps.errors import real_number, whole_number


class PrioritizedSampler(TorchRLPrioritizedSampler):  # type: ignore[misc, unused-ignore]
    """Prioritized experience replay (Schaul et al. 2016) on the storage's device.

    TorchRL's class has the same arguments and formulas. Unlike it, this class works with any
    PyTorch release and saves its priorities in checkpoints. A transition with priority p is drawn
    with a probability P proportional to (p + eps)^alpha (section 3.3). Its ``priority_weight`` is
    (P / min P)^-beta (section 3.4, normalised by the largest possible weight). New transitions get
    the highest priority so far. Samples are drawn with PyTorch's RNG.

    Args:
        max_capacity: Capacity of the buffer.
        alpha: Exponent of priorities; 0 samples uniformly.
        beta: Exponent of the importance-sampling correction, from 0 (none) to 1 (full).
        eps: Non-negative constant added to priorities.
        dtype: Data type of the importance weights.
        reduction: How the TD errors of several entries are reduced to one priority: ``max``,
            ``min``, ``median`` or ``mean``.
        max_priority_within_buffer: Whether new transitions get the highest priority of the stored
            transitions, rather than of all transitions so far.
        device: Device of the tree; ``None``: the storage's device.

    Raises:
        SettingError: If an argument is out of range.
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
        self._max_capacity = whole_number("max_capacity", max_capacity, at_least=1)
        self._alpha = real_number("alpha", alpha, at_least=0)
        self._beta = real_number("beta", beta, at_least=0, at_most=1)
        self._eps = real_number("eps", eps, at_least=0)
        self.dtype, self.reduction = dtype, reduction
        self._max_priority_within_buffer = max_priority_within_buffer
        self._device = None if device is None else usable_device(device=device)
        self._init()

    def _init(self) -> None:
        device = self._device or torch.device("cpu")
        self._sum_tree = make_priority_tree(self._max_capacity, device)
        self._min_tree = self._sum_tree
        self._highest: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Device of the priorities."""
        return self._sum_tree.device  # type: ignore[no-any-return]

    @property
    def default_priority(self) -> Any:
        """Priority of new transitions: the highest priority so far, initially 1."""
        if self._max_priority_within_buffer and self._alpha > 0 and self._highest is not None:
            highest = self._sum_tree.values.max()
            raw = (highest ** (1 / self._alpha) - self._eps).clamp_min(0)
            return torch.where(highest > 0, raw, torch.ones_like(raw))
        return 1.0 if self._highest is None else self._highest

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draw transitions by priority, with replacement.

        Returns:
            Storage indices and importance weights (``priority_weight``), on the storage's device.

        Raises:
            SettingError: If the priorities' sum is not positive and finite (not checked on a GPU).
        """
        self._maybe_init_from_storage(storage)
        tree: PriorityTree = self._sum_tree
        draws = torch.rand(batch_size, dtype=torch.float64, device=self.device, generator=self._rng)
        places, values = tree.find(tree.array(draws))
        weight = tree.tensor((values / tree.min()) ** -self._beta, self.dtype)
        index: Any = tree.tensor(places)
        if self._device is not None:  # the storage may be on another device
            index, weight = index.to(storage.device), weight.to(storage.device)
        if storage.ndim > 1:
            index = unravel_index(index, storage.shape)
        return index, {"priority_weight": weight}

    def update_priority(
        self, index: int | Tensor, priority: float | Tensor, *, storage: Storage | None = None
    ) -> None:
        """Set the priorities of transitions.

        Args:
            index: Storage indices ``[batch]``, or ``[batch, ndim]`` for a multi-dimensional
                storage; negative indices are ignored.
            priority: Non-negative priorities, either one per index or one for all.
            storage: Storage whose shape is used for multi-dimensional indices.

        Raises:
            IndexError: If an index is out of range (not checked on a GPU).
            SettingError: If a priority is negative (not checked on a GPU).
        """
        self._maybe_init_from_storage(storage)
        index = _as_tensor(index, torch.long, self.device)
        if index.ndim > 1:
            assert storage is not None
            strides = torch.tensor((*storage.shape[1:], 1)).flip(0).cumprod(0).flip(0)
            index = (index * strides.to(self.device)).sum(-1)
        index = index.reshape(-1) if index.ndim != 1 else index
        if not len(index):
            return
        priority = _as_tensor(priority, torch.float32, self.device)
        if priority.shape != index.shape:
            priority = priority.reshape(-1).expand(index.shape)
        tree: PriorityTree = self._sum_tree
        if index.is_cpu:  # checks on a GPU would synchronise with the host
            least, most, lowest, highest = tree.limits(tree.array(index), tree.array(priority))
            if most >= self._max_capacity:
                raise IndexError(f"index {most} is out of range 0 to {self._max_capacity - 1}")
            if least < 0:
                written = index >= 0
                self.update_priority(index[written], priority[written], storage=storage)
                return
            if lowest < 0:
                reason = "Priorities must not be negative"
                raise SettingError("td_error", float(lowest), reason, "Pass absolute TD errors")
        else:
            written = index >= 0
            index = torch.where(written, index, self._max_capacity)
            priority = torch.where(written, priority, 0.0)
            highest = priority.max()
        self._highest = tree.higher(self._highest, highest)
        value = (tree.array(priority) + self._eps) ** self._alpha
        tree[tree.array(index)] = value if index.is_cpu else torch.where(written, value, 0.0)

    def _maybe_init_from_storage(self, storage: Storage | None) -> None:
        """Move the tree and its priorities to the storage's GPU, if necessary."""
        device = self._tree_device_from_storage(storage)
        if device is not None and device.type != self.device.type:
            state = self.state_dict()
            self._device = device
            self.load_state_dict(state)

    def add(self, index: Any) -> None:
        """Do nothing. :meth:`mark_update` sets the priorities afterwards."""

    def extend(self, index: Any) -> None:
        """Do nothing. :meth:`mark_update` sets the priorities afterwards."""

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """Return the exponents and priorities as plain values and tensors."""
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
        """Restore the state returned by :meth:`state_dict`.

        Raises:
            SettingError: If the state has more priorities than the buffer's capacity.
        """
        values, highest = state_dict["values"], state_dict["highest"]
        if len(values) > self._max_capacity:  # a compiled tree does not check indices
            reason = f"The checkpoint contains priorities for {len(values)} transitions"
            raise SettingError("max_capacity", self._max_capacity, reason, [len(values)])
        self._alpha, self._beta = state_dict["alpha"], state_dict["beta"]
        self._eps = state_dict["eps"]
        self._init()
        self._highest = None if highest is None else highest.to(self.device)
        tree: PriorityTree = self._sum_tree
        places = torch.arange(len(values), device=self.device)
        tree[tree.array(places)] = tree.array(values.to(self.device))

    def dumps(self, path: Path | str) -> None:
        """Write the state to a folder."""
        Path(path).mkdir(exist_ok=True)
        torch.save(self.state_dict(), Path(path) / "priorities.pt")

    def loads(self, path: Path | str) -> None:
        """Read the state from a folder."""
        self.load_state_dict(torch.load(Path(path) / "priorities.pt", weights_only=True))


def make_priority_tree(size: int, device: torch.device) -> PriorityTree:
    """Create the fastest tree for a device. On the host, use Numba if it is installed."""
    if device.type == "cpu":
        with contextlib.suppress(ImportError):  # Numba is missing, or does not support this NumPy
            from kit.buffers.numba_tree import NumbaPriorityTree

            return NumbaPriorityTree(size)
    return PriorityTree(size, device)


def _as_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Convert a value to a tensor with this dtype and device, detached from gradients."""
    fits = type(value) is Tensor and value.dtype is dtype and value.device == device
    if fits and not value.requires_grad:
        return value  # type: ignore[no-any-return]
    return torch.as_tensor(value, dtype=dtype, device=device).detach()
