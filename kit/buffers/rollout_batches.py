"""Minibatches from shuffled passes over the last collected batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from kit.envs.spaces import path_of
from kit.fast.nested import entry, leaves, nested
from kit.steps import StepPlan
from kit.steps.minibatches import epoch_sizes

MinibatchGroup = list[TensorDictBase]
"""Minibatches for one gradient step, over which gradients are accumulated."""


class Minibatches(Protocol):
    """Stores collected batches and yields minibatches with the sizes in the plan."""

    def extend(self, batch: TensorDictBase, keys: Sequence[Any] = ()) -> None:
        """Store a collected batch.

        Args:
            batch: Batch ``[num_envs, steps]``.
            keys: Minibatch keys that will be read; empty: any key may be read.
        """

    def epoch(self, plan: StepPlan, limit: int) -> Iterator[MinibatchGroup]:
        """Yield the minibatches of one update epoch, grouped by gradient step.

        Args:
            plan: Step plan, which determines the minibatch sizes.
            limit: Maximum number of gradient steps.
        """

    def update_priority(self, minibatch: TensorDictBase) -> None:
        """Update sampling priorities from the minibatch's TD errors."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is kept between iterations."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""


class RolloutMinibatches:
    """Yields shuffled passes over the last batch; each pass contains every transition once.

    With ``last_minibatch="carry"``, a permutation continues across epochs and iterations.
    """

    reads_minibatches = False
    """Whether minibatch entries other than the loss's outputs are read after the gradient step."""
    reads_loss_outputs = False
    """Whether :meth:`update_priority` reads loss outputs from minibatches."""

    def __init__(self) -> None:
        self._rows: TensorDictBase | None = None
        self._row_blocks = 1  # number of contiguous blocks of rows, one per environment
        self._order = torch.empty(0, dtype=torch.long)

    def extend(self, batch: TensorDictBase, keys: Sequence[Any] = ()) -> None:
        """Replace the previous batch. Entries that will not be read are dropped to save time."""
        self._rows = valid_rows(batch, keys)
        has_envs = batch.ndim == 2 and entry(batch, ("collector", "mask")) is None
        self._row_blocks = batch.shape[0] if has_envs else 1

    def epoch(self, plan: StepPlan, limit: int) -> Iterator[MinibatchGroup]:
        """Yield the minibatches of one pass, with sizes from the plan."""
        assert self._rows is not None  # extend() comes first
        rows = self._newest(self._rows, plan)
        length = plan.sequence_length or 1
        if length > 1:
            rows = rows[: rows.shape[0] // length * length].reshape(-1, length)
        if plan.last_minibatch == "carry":
            minibatches = self._carried(rows, plan)
        else:
            minibatches = self._shuffled(rows, plan)
        group = plan.minibatches_per_gradient_step
        for _ in range(limit):
            step = list(minibatches if group is None else islice(minibatches, group))
            if not step:
                return
            yield step

    def update_priority(self, minibatch: TensorDictBase) -> None:
        """Do nothing, because every transition is sampled equally often."""

    def _newest(self, rows: TensorDictBase, plan: StepPlan) -> TensorDictBase:
        """Return the newest rows that are used for training, equally many per environment."""
        newest = plan.train_on_newest
        if newest is None or newest >= rows.shape[0]:
            return rows
        by_env = rows.reshape(self._row_blocks, -1)
        return by_env[:, -(newest // self._row_blocks) :].reshape(-1)

    def _shuffled(self, rows: TensorDictBase, plan: StepPlan) -> Iterator[TensorDictBase]:
        count = rows.shape[0]
        sizes = epoch_sizes(count, plan.minibatch_size or max(count, 1), plan.last_minibatch)
        if sizes == [count]:  # the order of rows does not matter in a single minibatch
            copies = {path: value.clone() for path, value in leaves(rows).items()}
            yield nested(copies, rows.shape)
            return
        order = _permutation(count, rows)
        shuffled = {path: value[order] for path, value in leaves(rows).items()}
        start = 0
        for size in sizes[: plan.minibatches_per_epoch]:
            end = start + size
            part = {path: value[start:end] for path, value in shuffled.items()}
            yield nested(part, [size, *rows.shape[1:]])
            start = end

    def _carried(self, rows: TensorDictBase, plan: StepPlan) -> Iterator[TensorDictBase]:
        for _ in range(plan.minibatches_in_epoch(rows.numel())):
            if not len(self._order):
                self._order = torch.randperm(rows.shape[0])
            size = plan.minibatch_size or rows.shape[0]
            chosen, self._order = self._order[:size], self._order[size:]
            yield rows[chosen.to(rows.device) if rows.device is not None else chosen]

    def state_dict(self) -> dict[str, Any]:
        """Return the unused indices of the current permutation. The batch itself is not saved."""
        return {"order": self._order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._order = state_dict["order"].clone()


def _permutation(count: int, rows: TensorDictBase) -> Tensor:
    device = rows.device or next(iter(leaves(rows).values())).device
    return torch.randperm(count, device=device)


class GroupedMinibatches(RolloutMinibatches):
    """Yields shuffled passes whose minibatches contain equally many rows from each env group.

    A minibatch contains the rows of the first group, then of the second group, and so on. Use this
    class for particles that each learn from separate environments.

    Args:
        groups: Number of groups of consecutive environments; minibatch sizes are multiples of it.
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def _shuffled(self, rows: TensorDictBase, plan: StepPlan) -> Iterator[TensorDictBase]:
        count, start = rows.shape[0], 0
        sizes = epoch_sizes(count, plan.minibatch_size or max(count, 1), plan.last_minibatch)
        each = rows.reshape(self.groups, -1)
        shuffled = each[:, _permutation(each.shape[1], rows)]
        for size in sizes[: plan.minibatches_per_epoch]:
            yield shuffled[:, start : start + size // self.groups].reshape(-1)
            start += size // self.groups


def valid_rows(batch: TensorDictBase, keys: Sequence[Any] = ()) -> TensorDictBase:
    """Return the transitions of a batch ``[num_envs, steps]`` as rows, excluding padding.

    Args:
        batch: Batch, possibly with a padding mask.
        keys: Keys to return; empty: all keys.
    """
    mask = batch.get(("collector", "mask"), None)
    if mask is not None:
        return (batch.select(*keys, strict=False) if keys else batch)[mask]
    paths, last = {*map(path_of, keys)}, batch.ndim - 1
    rows = {
        path: value.flatten(0, last)
        for path, value in leaves(batch).items()
        if path in paths or not keys
    }
    return nested(rows, [batch.numel()], batch.device)
