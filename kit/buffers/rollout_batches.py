"""What a minibatch of a rollout is: a part of a shuffled pass over the last batch."""

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
"""The minibatches of one gradient step: one, or several whose gradients are accumulated."""


class Minibatches(Protocol):
    """Takes batches in and gives minibatches out, as many as a plan says."""

    def extend(self, batch: TensorDictBase, keys: Sequence[Any] = ()) -> None:
        """Take in a collected batch.

        Args:
            batch: ``[num_envs, steps]``.
            keys: the only ones that will be read of minibatches; empty: any may be.
        """

    def epoch(self, plan: StepPlan, limit: int) -> Iterator[MinibatchGroup]:
        """Yield the minibatches of one update epoch, grouped by gradient step.

        Args:
            plan: says how minibatches are cut.
            limit: gradient steps that are due, at most which are yielded.
        """

    def update_priority(self, minibatch: TensorDictBase) -> None:
        """Take note of a minibatch that was trained on, where its errors decide what comes next."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state kept between iterations."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


class RolloutMinibatches:
    """Shuffled passes over the last batch: in each, every transition is seen once.

    With ``last_minibatch="carry"`` a permutation continues where it was left, over epochs and
    iterations.
    """

    reads_minibatches = False
    """Whether minibatches are read after they were returned, other than a loss's outputs."""
    reads_loss_outputs = False
    """whether :meth:`update_priority` reads what a loss writes into minibatches."""

    def __init__(self) -> None:
        self._rows: TensorDictBase | None = None
        self._in_turn = 1  # environments whose rows follow one another
        self._order = torch.empty(0, dtype=torch.long)

    def extend(self, batch: TensorDictBase, keys: Sequence[Any] = ()) -> None:
        """Replace the batch before; keys that are not read are dropped: they cost in slicing."""
        self._rows = valid_rows(batch, keys)
        of_envs = batch.ndim == 2 and entry(batch, ("collector", "mask")) is None
        self._in_turn = batch.shape[0] if of_envs else 1

    def epoch(self, plan: StepPlan, limit: int) -> Iterator[MinibatchGroup]:
        """Yield the minibatches of one pass, cut as the plan says."""
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
        """Do nothing: every transition is seen as often as every other."""

    def _newest(self, rows: TensorDictBase, plan: StepPlan) -> TensorDictBase:
        """The newest rows of each environment, as many of one as of another."""
        newest = plan.train_on_newest
        if newest is None or newest >= rows.shape[0]:
            return rows
        of_each = rows.reshape(self._in_turn, -1)
        return of_each[:, -(newest // self._in_turn) :].reshape(-1)

    def _shuffled(self, rows: TensorDictBase, plan: StepPlan) -> Iterator[TensorDictBase]:
        count = rows.shape[0]
        sizes = epoch_sizes(count, plan.minibatch_size or max(count, 1), plan.last_minibatch)
        if sizes == [count]:  # in another order they would be the same minibatch
            own = {path: value.clone() for path, value in leaves(rows).items()}
            yield nested(own, rows.shape)
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
        """Return the rest of the permutation; the batch itself is used up."""
        return {"order": self._order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._order = state_dict["order"].clone()


def _permutation(count: int, rows: TensorDictBase) -> Tensor:
    """A random order of so many rows, on the device of their entries."""
    device = rows.device or next(iter(leaves(rows).values())).device
    return torch.randperm(count, device=device)


class GroupedMinibatches(RolloutMinibatches):
    """Shuffled passes in which groups of environments have the same share of every minibatch.

    Rows of a minibatch are those of the first group, then those of the next: for particles, each of
    which learns from environments of its own.

    Args:
        groups: of consecutive environments; minibatches are multiples of their number.
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
    """Return the transitions of a batch ``[num_envs, steps]`` as rows, without padding.

    Args:
        batch: may have a mask of padding.
        keys: the only ones to return; empty: all.
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
