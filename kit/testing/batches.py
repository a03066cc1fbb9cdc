"""Helpers that extract steps, sequences and episodes from the batches of any collector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from kit.testing.trial import Run


def whole_episodes(batch: TensorDictBase) -> bool:
    """Return whether a batch consists of complete episodes, padded or flat."""
    return batch.ndim == 1 or batch.get(("collector", "mask"), None) is not None


def size(batch: TensorDictBase) -> int:
    """Return the number of steps in a batch, without padding."""
    mask = batch.get(("collector", "mask"), None)
    return batch.numel() if mask is None else int(mask.sum())


def rows(batch: TensorDictBase) -> TensorDictBase:
    """Return the transitions of a batch without padding, ordered by environment and time."""
    mask = batch.get(("collector", "mask"), None)
    return batch.reshape(-1) if mask is None else batch[mask]


def integers(action: Tensor) -> Tensor:
    """Return actions as integers, converting one-hot actions."""
    return action.argmax(-1) if action.ndim > 1 else action


def sequences(run: Run, num_envs: int) -> list[TensorDictBase]:
    """Split a run into sequences of consecutive steps that each start with a new episode.

    If episodes can span batches, each environment's steps form one sequence, or two if the run was
    restarted. If batches consist of complete episodes, each episode is a sequence.
    """
    if whole_episodes(run.batches[0]):
        return [episode for batch in run.batches for episode in _episodes_of(batch)]
    parts = (run.batches[: run.restarted], run.batches[run.restarted :])
    return [
        torch.cat([batch[env] for batch in part])
        for part in parts
        if part
        for env in range(num_envs)
    ]


def restart(batches: Sequence[TensorDictBase], loaded: int) -> int:
    """Return the index of the batch in which the environments abandon unfinished episodes.

    This is the first batch after loading, or a later batch if batches were already queued when
    the state was saved.

    Args:
        batches: batches of a run that was saved and loaded.
        loaded: index of the first batch after loading; returned if no such batch is found.
    """
    for number in range(max(loaded, 1), len(batches)):
        before, after = batches[number - 1], batches[number]
        if whole_episodes(after):
            break
        follows = (after["observation"][:, 0] == before["next", "observation"][:, -1]).all(-1)
        if not (follows | before["next", "done"][:, -1, 0]).all():
            return number
    return loaded


def ages(done: Tensor) -> Tensor:
    """Return each step's 1-based number in its episode, given end-of-episode flags ``[steps]``."""
    steps = torch.arange(1, len(done) + 1, device=done.device)
    ends = torch.where(done, steps, 0).cummax(0).values
    return steps - torch.cat((torch.zeros_like(ends[:1]), ends[:-1]))


def equal(
    one: Sequence[TensorDictBase], other: Sequence[TensorDictBase], rounding: float = 0.0
) -> bool:
    """Return whether two lists of batches are equal.

    ``rounding`` is the relative and absolute tolerance for floats; all else must be identical.
    """
    if len(one) != len(other):
        return False
    for a, b in zip(one, other):
        keys = set(a.keys(True, True))
        if a.shape != b.shape or keys != set(b.keys(True, True)):
            return False
        if not all(_same(a.get(key), b.get(key), rounding) for key in keys):
            return False
    return True


def _same(one: Tensor, other: Tensor, rounding: float) -> bool:
    if torch.equal(one, other):
        return True
    comparable = one.dtype == other.dtype and one.shape == other.shape
    return (
        rounding > 0.0
        and comparable
        and one.is_floating_point()
        and torch.allclose(one, other, rtol=rounding, atol=rounding)
    )


def _episodes_of(batch: TensorDictBase) -> list[TensorDictBase]:
    steps = rows(batch)
    numbers = steps["collector", "traj_ids"]
    return [steps[numbers == number] for number in numbers.unique()]
