"""What hooks and estimators return during an update phase, before it is trained on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from kit.collectors.plan_fit import Refusal
from kit.envs.spaces import path_of
from kit.fast.nested import entry, leaves
from kit.steps import SettingError
from kit.trainer.batches import size_of


def refuse(*refusals: Iterable[Refusal]) -> None:
    """Raise the first refusal, if there is one.

    Raises:
        SettingError: with its field, value, reason and what works.
    """
    for refusal in itertools.chain(*refusals):
        raise SettingError(*refusal)


ADDING = ("batch_process", "pre_epoch", "process_optim_batch")
"""Stages whose hooks may add advantages."""


def reads_advantage(loss_module: Any) -> Any:
    """The key of the advantages that a loss reads; ``None`` if it reads none."""
    keys = getattr(loss_module, "tensor_keys", None)
    # Losses of action values name an advantage too, for estimators, and do not read it.
    return None if hasattr(keys, "action_value") else getattr(keys, "advantage", None)


def unestimated(loss_module: Any) -> str:
    """Describe, for a message, a loss that gets no advantages."""
    name = type(loss_module).__name__
    return f"{name} without advantages, which it would estimate from shuffled minibatches"


def in_estimated(batch: TensorDictBase, before: TensorDictBase, trainer: Any) -> Iterator[Refusal]:
    """Yield missing transitions or advantages in a batch from the estimator of advantages."""
    name = getattr(trainer.advantage, "__name__", type(trainer.advantage).__name__)
    if batch.numel() != before.numel():
        why = f"returned {batch.numel()} of the {before.numel()} transitions of a batch"
        yield "advantage", name, why, "return all of them, which the plan trains on"
    key = reads_advantage(trainer.loss_module)
    adds = any(trainer.stages[stage] for stage in ADDING)
    if key is not None and not adds and entry(batch, key) is None:
        why = f"wrote no {key!r} and leaves {unestimated(trainer.loss_module)}"
        yield "advantage", name, why, "write it, or name it: loss.set_keys(advantage=...)"


def in_processed(
    stage: str, before: int, paths: Iterable[Any], batch: TensorDictBase, trainer: Any
) -> Iterator[Refusal]:
    """Yield another number of transitions than planned, or missing advantages.

    Update epochs are planned for ``before`` transitions, those that hooks of ``stage`` received
    with entries at ``paths``.
    """
    if trainer.plan.on_policy and (after := size_of(batch)) != before:
        why = f"has hooks that returned {after} transitions for the {before} of a batch"
        yield "stage", stage, why, "return as many: update epochs are planned for all of them"
    yield from in_left_out(stage, paths, batch, trainer)


def in_left_out(
    stage: str, paths: Iterable[Any], batch: TensorDictBase, trainer: Any
) -> Iterator[Refusal]:
    """Yield advantages that hooks have removed: the loss would estimate them from minibatches.

    Other missing entries raise in the loss.
    """
    key, later = reads_advantage(trainer.loss_module), ADDING[ADDING.index(stage) + 1 :]
    added_later = any(trainer.stages[one] for one in later)
    if key is not None and not added_later and path_of(key) in {*paths}.difference(leaves(batch)):
        why = f"has hooks that removed {key!r}, and leaves {unestimated(trainer.loss_module)}"
        yield "stage", stage, why, "leave it in the batch"


def in_places(drawn: Tensor, told: Tensor | None) -> Iterator[Refusal]:
    """Rows that a hook has put into a minibatch from elsewhere, with their places there.

    They would set priorities of other rows, and of some that were never written.
    """
    if told is None or not told.is_cpu:  # a GPU is not asked
        return
    if not (torch.isin(told, drawn) | (told < 0)).all():
        why = "has hooks that returned rows of elsewhere with places that were not drawn"
        works = "give these rows an index of -1: they have no priority in this buffer"
        yield "stage", "process_optim_batch", why, works
