"""Reading the batches of any collector: their steps, and which of them follow one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from kit.testing.trial import Run


def whole_episodes(batch: TensorDictBase) -> bool:
    """Whether a batch is one of whole episodes, padded or one after the other."""
    return batch.ndim == 1 or batch.get(("collector", "mask"), None) is not None


def size(batch: TensorDictBase) -> int:
    """The number of steps without padding."""
    mask = batch.get(("collector", "mask"), None)
    return batch.numel() if mask is None else int(mask.sum())


def rows(batch: TensorDictBase) -> TensorDictBase:
    """The transitions of a batch, env by env in the order of time, without padding."""
    mask = batch.get(("collector", "mask"), None)
    return batch.reshape(-1) if mask is None else batch[mask]


def integers(action: Tensor) -> Tensor:
    """Actions as integers, also where they are one-hot."""
    return action.argmax(-1) if action.ndim > 1 else action


def sequences(run: Run, num_envs: int) -> list[TensorDictBase]:
    """Steps that follow one another, each sequence from the beginning of an episode.

    Where batches cut episodes these are the steps of each env: two sequences, if the envs begin
    again in between. Where batches are whole episodes they are the episodes.
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
    """The number of the batch with which envs leave the episodes that they were in.

    The first one that is made after loading; there can be others that were made before saving.

    Args:
        batches: of a run that was saved.
        loaded: number of the first one after loading, which is returned if none is found.
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
    """The number of each step in its episode, from 1, of whether each ended one, ``[steps]``."""
    steps = torch.arange(1, len(done) + 1, device=done.device)
    ends = torch.where(done, steps, 0).cummax(0).values
    return steps - torch.cat((torch.zeros_like(ends[:1]), ends[:-1]))


def equal(
    one: Sequence[TensorDictBase], other: Sequence[TensorDictBase], rounding: float = 0.0
) -> bool:
    """Whether batches are the same, bit by bit.

    Floating numbers may differ by ``rounding``, relatively and absolutely.
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
