"""Prioritised sampling by a sum tree, on the host or on a GPU."""

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
    """Prioritised experience replay (Schaul et al. 2016), on the storage's device.

    TorchRL's class with its arguments and formulas, whose tree works with any release of PyTorch
    and is in checkpoints. A transition with priority p is drawn with probability (p + eps)^alpha
    over the sum of all (section 3.3); its ``priority_weight`` is (P / min P)^-beta (section 3.4,
    normalised by the largest possible weight). New transitions have the highest priority so far.
    Random numbers are PyTorch's.

    Args:
        max_capacity: transitions that the buffer holds.
        alpha: exponent of priorities; 0 samples uniformly.
        beta: exponent of the correction by importance weights, from 0 to 1 (all of it).
        eps: added to priorities, from 0.
        dtype: of weights.
        reduction: how errors of several entries become one priority: ``max``, ``min``, ``median``
            or ``mean``.
        max_priority_within_buffer: whether the highest priority is that of transitions still
            stored, rather than of all so far.
        device: of the tree; ``None``: the storage's.

    Raises:
        SettingError: if a number is out of range.
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
        """Where priorities are."""
        return self._sum_tree.device  # type: ignore[no-any-return]

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
            Their places and, as ``priority_weight``, importance weights; on the storage's device.

        Raises:
            SettingError: if the priorities do not add up to a positive finite number (on a GPU that
                is not asked).
        """
        self._maybe_init_from_storage(storage)
        tree: PriorityTree = self._sum_tree
        share = torch.rand(batch_size, dtype=torch.float64, device=self.device, generator=self._rng)
        places, values = tree.find(tree.array(share))
        weight = tree.tensor((values / tree.min()) ** -self._beta, self.dtype)
        index: Any = tree.tensor(places)
        if self._device is not None:  # rows are read where they are stored
            index, weight = index.to(storage.device), weight.to(storage.device)
        if storage.ndim > 1:
            index = unravel_index(index, storage.shape)
        return index, {"priority_weight": weight}

    def update_priority(
        self, index: int | Tensor, priority: float | Tensor, *, storage: Storage | None = None
    ) -> None:
        """Set priorities.

        Args:
            index: places, ``[batch]`` or, in a storage of several dimensions, ``[batch, ndim]``;
                negative ones are left out.
            priority: not negative, one for each place or one for all.
            storage: whose shape is needed for several dimensions.

        Raises:
            IndexError: if a place is beyond the buffer (on a GPU it is not asked).
            SettingError: if a priority is negative (on a GPU it is not asked).
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
        if index.is_cpu:  # a GPU is not asked
            least, most, lowest, highest = tree.limits(tree.array(index), tree.array(priority))
            if most >= self._max_capacity:
                works = f"0 to {self._max_capacity - 1}"
                raise IndexError(f"place {most} is not in the buffer; what works: {works}")
            if least < 0:
                written = index >= 0
                self.update_priority(index[written], priority[written], storage=storage)
                return
            if lowest < 0:
                why = "is a negative priority, such as an error with its sign"
                raise SettingError("td_error", float(lowest), why, "give its absolute value")
        else:
            written = index >= 0
            index = torch.where(written, index, self._max_capacity)
            priority = torch.where(written, priority, 0.0)
            highest = priority.max()
        self._highest = tree.higher(self._highest, highest)
        given = tree.array(priority)
        value = (given + self._eps) ** self._alpha
        tree[tree.array(index)] = value if index.is_cpu else torch.where(written, value, 0.0)

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
        """Restore what :meth:`state_dict` returned.

        Raises:
            SettingError: if it is of more transitions than the buffer holds.
        """
        values, highest = state_dict["values"], state_dict["highest"]
        if len(values) > self._max_capacity:  # a compiled tree would write beyond its memory
            why = f"is less than the {len(values)} transitions whose priorities were saved"
            raise SettingError("max_capacity", self._max_capacity, why, [len(values)])
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
    """The fastest tree for a device: on the host Numba's, if it is installed."""
    if device.type == "cpu":
        with contextlib.suppress(ImportError):  # also where Numba does not know this NumPy
            from kit.buffers.numba_tree import NumbaPriorityTree

            return NumbaPriorityTree(size)
    return PriorityTree(size, device)


def _as_tensor(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this type and on this device, without gradients; most are that already."""
    fits = type(value) is Tensor and value.dtype is dtype and value.device == device
    if fits and not value.requires_grad:
        return value  # type: ignore[no-any-return]
    return torch.as_tensor(value, dtype=dtype, device=device).detach()
