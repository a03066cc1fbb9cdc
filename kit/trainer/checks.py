"""Checks for batches returned by hooks and advantage estimators."""

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


def raise_first(*errors: Iterable[Refusal]) -> None:
    """Raise the first error, if there is one.

    Raises:
        SettingError: with the setting, value, reason and hint of the first error.
    """
    for arguments in itertools.chain(*errors):
        raise SettingError(*arguments)


ADDING = ("batch_process", "pre_epoch", "process_optim_batch")
"""Stages whose hooks may add advantages."""


def reads_advantage(loss_module: Any) -> Any:
    """Return the key under which a loss reads advantages, or ``None`` if it reads none."""
    keys = getattr(loss_module, "tensor_keys", None)
    # Losses with action values define an advantage key for their estimators but do not read it.
    return None if hasattr(keys, "action_value") else getattr(keys, "advantage", None)


def unestimated(loss_module: Any) -> str:
    """Return a phrase for error messages about a loss that receives no advantages."""
    name = type(loss_module).__name__
    return f"{name} without advantages, so it would estimate them from shuffled minibatches"


def in_estimated(batch: TensorDictBase, before: TensorDictBase, trainer: Any) -> Iterator[Refusal]:
    """Yield an error if the advantage estimator dropped transitions or wrote no advantages."""
    name = getattr(trainer.advantage, "__name__", type(trainer.advantage).__name__)
    if batch.numel() != before.numel():
        reason = f"returned {batch.numel()} of the {before.numel()} transitions in a batch"
        yield "advantage", name, reason, "return all transitions, because the plan counts them"
    key = reads_advantage(trainer.loss_module)
    adds = any(trainer.stages[stage] for stage in ADDING)
    if key is not None and not adds and entry(batch, key) is None:
        reason = f"wrote no {key!r} and leaves {unestimated(trainer.loss_module)}"
        yield "advantage", name, reason, "write this key, or call loss.set_keys(advantage=...)"


def in_processed(
    stage: str, before: int, paths: Iterable[Any], batch: TensorDictBase, trainer: Any
) -> Iterator[Refusal]:
    """Yield an error if hooks changed the number of transitions or removed advantages.

    The batch passed to the hooks had ``before`` transitions and the entries ``paths``.
    """
    if trainer.plan.on_policy and (after := size_of(batch)) != before:
        reason = f"has hooks that returned {after} instead of {before} transitions"
        yield "stage", stage, reason, "return all transitions, because update epochs count them"
    yield from in_left_out(stage, paths, batch, trainer)


def in_left_out(
    stage: str, paths: Iterable[Any], batch: TensorDictBase, trainer: Any
) -> Iterator[Refusal]:
    """Yield an error if hooks removed the advantages that the loss reads.

    The loss would silently estimate missing advantages from minibatches. For other missing entries,
    the loss itself raises an error.
    """
    key, later = reads_advantage(trainer.loss_module), ADDING[ADDING.index(stage) + 1 :]
    added_later = any(trainer.stages[name] for name in later)
    if key is not None and not added_later and path_of(key) in {*paths}.difference(leaves(batch)):
        reason = f"has hooks that removed {key!r}, which leaves {unestimated(trainer.loss_module)}"
        yield "stage", stage, reason, "keep this key in the batch"


def in_places(drawn: Tensor, returned: Tensor | None) -> Iterator[Refusal]:
    """Yield an error if a hook returned a minibatch with buffer indices that were not drawn.

    With such indices, the priorities of wrong or unwritten rows would be updated.
    """
    if returned is None or not returned.is_cpu:  # a check on the GPU would synchronise
        return
    if not (torch.isin(returned, drawn) | (returned < 0)).all():
        reason = "has hooks that returned buffer indices which were not in the minibatch"
        hint = "set the index of added rows to -1, because they have no priority in this buffer"
        yield "stage", "process_optim_batch", reason, hint
