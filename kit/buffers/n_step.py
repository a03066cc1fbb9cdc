"""Transitions of several steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, from_numpy

from kit.buffers.writer import check_num_envs
from kit.fast.nested import leaves, nested, on_host
from kit.steps import SettingError
from kit.steps.errors import real_number

Entries = dict[tuple[str, ...], Tensor]
Values = dict[tuple[str, ...], Any]
"""Entries as arrays or tensors."""
_REWARD, _DONE, _STEPS = ("next", "reward"), ("next", "done"), ("steps_to_next_obs",)


class NStep:
    """Sums the rewards of several steps into one transition (Sutton and Barto 2018, eq. 7.1).

    What TorchRL's ``MultiStepTransform`` writes, in less than a third of its time; without its
    entries ``gamma``, ``nonterminal`` and ``original_reward``, which no loss reads. Observation and
    flags under ``next`` are those after the last of the steps whose rewards were summed: the n-th,
    or the last of the episode. The number of these steps is ``steps_to_next_obs``.

    Args:
        steps: rewards of a transition, at most.
        gamma: discount factor.

    Attributes:
        apart: whether transitions have all their rewards, ``[..., steps]``, for :meth:`summed` to
            add later: normalised rewards are clipped one by one. Rewards after the end of an
            episode are 0.
    """

    apart = False

    def __init__(self, steps: int, gamma: float) -> None:
        self.steps, self.gamma = steps, real_number("gamma", gamma, 0, 1)
        self._newest: Values = {}
        self._size: list[int] = []

    @property
    def waiting(self) -> TensorDictBase | None:
        """The newest steps, as many as a transition has, which wait for what follows."""
        return nested(_tensors(self._newest), self._size) if self._newest else None

    @waiting.setter
    def waiting(self, steps: TensorDictBase | None) -> None:
        self._newest, self._size = ({}, []) if steps is None else (leaves(steps), [*steps.shape])

    def __call__(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Return the transitions that a batch completes, time last; ``None`` where there is none.

        Args:
            batch: steps ``[num_envs, steps]``, or whole episodes one after the other, ``[steps]``.

        Raises:
            SettingError: if its number of environments is not that of the steps that wait, or an
                entry is no tensor.
        """
        entries, axis, total = leaves(batch), batch.ndim - 1, batch.shape[-1]
        _check_tensors(entries)
        # For a few numbers NumPy takes half of PyTorch's time; both are called alike here.
        library: Any = np if _by_numpy(entries) and _by_numpy(self._newest) else torch
        values: Values = _arrays(entries) if library is np else entries
        if self._newest:
            check_num_envs([*batch.shape[:-1]], self._size[:-1])
            before = _arrays(self._newest) if library is np else _beside(self._newest, entries)
            values = {p: library.concatenate((before[p], one), axis) for p, one in values.items()}
            total += self._size[-1]
        kept, count = min(self.steps, total), max(total - self.steps, 0)
        newest = _along(axis, total - kept, kept)
        # Copied, as who receives a batch may write to it.
        copied = np.copy if library is np else torch.clone
        self._newest = {path: copied(one[newest]) for path, one in values.items()}
        self._size = [*batch.shape[:-1], kept]
        if not count:
            return None
        summed = _tensors(self._summed(values, axis, count, library))
        return nested(summed, [*batch.shape[:-1], count], batch.device)

    def _summed(self, values: Values, axis: int, count: int, library: Any) -> Values:
        reward, done = values[_REWARD], values[_DONE]
        first = _along(axis, 0, count)
        found = {path: one[first] for path, one in values.items()}
        summed, going = found[_REWARD], ~found[_DONE]
        rewards = [summed]
        following = library.zeros_like(going, dtype=library.int64)
        for step in range(1, self.steps):
            later = _along(axis, step, count)
            if self.apart:
                rewards.append(reward[later] * going)
            else:
                summed = summed + self.gamma**step * reward[later] * going
            following += going
            going = going & ~done[later]
        steps = following.squeeze(-1)
        last = steps + _counted(steps, axis, library)
        for path in values.keys() - {_REWARD}:
            if path[0] == "next":
                found[path] = _taken(values[path], last, axis, library)
        if self.apart:
            summed = library.concatenate(rewards, -1)
        return found | {_REWARD: summed, _STEPS: steps + 1}

    def summed(self, rewards: Tensor) -> Tensor:
        """Return the discounted sums ``[..., 1]`` of rewards ``[..., steps]``."""
        discounts = self.gamma ** torch.arange(self.steps, device=rewards.device)
        return (rewards * discounts).sum(-1, keepdim=True)

    def close_open_episodes(self) -> None:
        """Mark the newest step of every environment as truncated, if its episode has not ended."""
        if self.waiting is not None:
            close(self.waiting[..., -1])  # in the memory of those that wait


def _check_tensors(entries: Entries) -> None:
    """Refuse texts and objects, of which a transition of several steps would need one."""
    for path, value in entries.items():
        if not isinstance(value, Tensor):
            why = f"is a {type(value).__name__}, and n-step returns join tensors"
            raise SettingError("entry", ".".join(path), why, "leave it out, or use n_step=1")


def _along(axis: int, start: int, count: int) -> tuple[slice, ...]:
    """The index of some time steps."""
    return (slice(None),) * axis + (slice(start, start + count),)


def _taken(values: Any, steps: Any, axis: int, library: Any) -> Any:
    """Values ``[..., steps, ...]`` of some time steps of each environment."""
    if axis == 0:
        return values[steps]
    if len(values) == 1:
        return values[:, steps[0]]
    return values[_counted(steps, 0, library), steps]


def _counted(like: Any, axis: int, library: Any) -> Any:
    """The place of every entry along an axis, from 0."""
    return library.ones_like(like).cumsum(axis) - 1


def _by_numpy(values: Values) -> bool:
    """Whether NumPy shows all entries, and its sums of rewards have the type of PyTorch's."""
    tensors = {path: one for path, one in values.items() if isinstance(one, Tensor)}
    reward = tensors.get(_REWARD)
    floating = reward is None or reward.is_floating_point()  # of integers NumPy makes float64
    return floating and all(map(on_host, tensors.values()))


def _arrays(values: Values) -> Values:
    """Entries of the host as arrays, in the same memory."""
    return {p: one.numpy() if isinstance(one, Tensor) else one for p, one in values.items()}


def _tensors(values: Values) -> Entries:
    """Entries as tensors, in the same memory."""
    return {p: one if isinstance(one, Tensor) else from_numpy(one) for p, one in values.items()}


def _beside(values: Values, others: Entries) -> Entries:
    """Entries where others are: they may have come from a checkpoint, or be arrays."""
    return {path: one.to(others[path].device) for path, one in _tensors(values).items()}


def close(rows: TensorDictBase) -> None:
    """Mark transitions in place as the last of their episodes: truncated, if they do not end."""
    done, truncated = (rows.get(("next", name), None) for name in ("done", "truncated"))
    if truncated is not None:
        truncated |= ~done
    done.fill_(True)
