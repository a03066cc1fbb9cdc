"""N-step transitions."""

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
"""Arrays or tensors, keyed by path."""
_REWARD, _DONE, _STEPS = ("next", "reward"), ("next", "done"), ("steps_to_next_obs",)


class NStep:
    """Builds n-step transitions from consecutive steps (Sutton and Barto 2018, eq. 7.1).

    Computes the same transitions as TorchRL's ``MultiStepTransform``, more than three times as
    fast. The entries ``gamma``, ``nonterminal`` and ``original_reward`` are omitted, because no
    loss reads them. Observation and flags under ``next`` come from the last summed step, which is
    the n-th step or the last step of the episode. ``steps_to_next_obs`` is the number of summed
    steps.

    Args:
        steps: Maximum number of rewards per transition.
        gamma: Discount factor.

    Attributes:
        apart: Whether transitions store all rewards ``[..., steps]``, so that each reward can be
            normalised and clipped before :meth:`summed` adds them. Rewards after the episode end
            are 0.
    """

    apart = False

    def __init__(self, steps: int, gamma: float) -> None:
        self.steps, self.gamma = steps, real_number("gamma", gamma, 0, 1)
        self._newest: Values = {}
        self._size: list[int] = []

    @property
    def waiting(self) -> TensorDictBase | None:
        """Steps whose n-step transitions are still incomplete; ``None`` if there are none."""
        return nested(_tensors(self._newest), self._size) if self._newest else None

    @waiting.setter
    def waiting(self, steps: TensorDictBase | None) -> None:
        self._newest, self._size = ({}, []) if steps is None else (leaves(steps), [*steps.shape])

    def __call__(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Return the transitions that a batch completes, or ``None``. Time is the last dimension.

        Args:
            batch: Steps ``[num_envs, steps]``, or concatenated complete episodes ``[steps]``.

        Raises:
            SettingError: If the number of environments has changed, or an entry is not a tensor.
        """
        entries, axis, total = leaves(batch), batch.ndim - 1, batch.shape[-1]
        _check_tensors(entries)
        # For small arrays, NumPy takes half the time that PyTorch needs.
        library: Any = np if _fits_numpy(entries) and _fits_numpy(self._newest) else torch
        values: Values = _arrays(entries) if library is np else entries
        if self._newest:
            check_num_envs([*batch.shape[:-1]], self._size[:-1])
            before = _arrays(self._newest) if library is np else _moved_to(self._newest, entries)
            values = {p: library.concatenate((before[p], one), axis) for p, one in values.items()}
            total += self._size[-1]
        pending, count = min(self.steps, total), max(total - self.steps, 0)
        newest = _time_slice(axis, total - pending, pending)
        # Copy the steps, because the caller may modify the batches.
        copied = np.copy if library is np else torch.clone
        self._newest = {path: copied(one[newest]) for path, one in values.items()}
        self._size = [*batch.shape[:-1], pending]
        if not count:
            return None
        summed = _tensors(self._summed(values, axis, count, library))
        return nested(summed, [*batch.shape[:-1], count], batch.device)

    def unfinished(self) -> TensorDictBase:
        """Return the transitions of the waiting steps, with the rewards that are known so far."""
        axis = len(self._size) - 1
        values = _tensors(self._newest)
        ended = values[_DONE].clone()
        ended[_time_slice(axis, self._size[-1] - 1, 1)] = True  # no rewards are known after it
        values = {
            path: torch.cat([one, *[one.narrow(axis, -1, 1)] * (self.steps - 1)], axis)
            for path, one in {**values, _DONE: ended}.items()
        }
        summed = _tensors(self._summed(values, axis, self._size[-1], torch))
        summed[_DONE] = summed["next", "terminated"] | summed["next", "truncated"]
        return nested(summed, self._size)

    def _summed(self, values: Values, axis: int, count: int, library: Any) -> Values:
        reward, done = values[_REWARD], values[_DONE]
        first = _time_slice(axis, 0, count)
        found = {path: one[first] for path, one in values.items()}
        summed, is_open = found[_REWARD], ~found[_DONE]
        rewards = [summed]
        following = library.zeros_like(is_open, dtype=library.int64)
        for step in range(1, self.steps):
            later = _time_slice(axis, step, count)
            if self.apart:
                rewards.append(reward[later] * is_open)
            else:
                summed = summed + self.gamma**step * reward[later] * is_open
            following += is_open
            is_open = is_open & ~done[later]
        steps = following.squeeze(-1)
        last = steps + _positions(steps, axis, library)
        for path in values.keys() - {_REWARD}:
            if path[0] == "next":
                found[path] = _select_steps(values[path], last, axis, library)
        if self.apart:
            summed = library.concatenate(rewards, -1)
        return found | {_REWARD: summed, _STEPS: steps + 1}

    def summed(self, rewards: Tensor) -> Tensor:
        """Return the discounted sums ``[..., 1]`` of rewards ``[..., steps]``."""
        discounts = self.gamma ** torch.arange(self.steps, device=rewards.device)
        return (rewards * discounts).sum(-1, keepdim=True)

    def close_open_episodes(self) -> None:
        """Mark the last step of every open episode as truncated."""
        if self.waiting is not None:
            close(self.waiting[..., -1])  # a view of the stored steps


def _check_tensors(entries: Entries) -> None:
    """Raise an error for non-tensor entries, which cannot be concatenated over time."""
    for path, value in entries.items():
        if not isinstance(value, Tensor):
            reason = f"N-step returns require tensors, but this entry is a {type(value).__name__}"
            raise SettingError("entry", ".".join(path), reason, "Remove the entry, or use n_step=1")


def _time_slice(axis: int, start: int, count: int) -> tuple[slice, ...]:
    """Return an index for time steps ``start`` to ``start + count - 1`` along ``axis``."""
    return (slice(None),) * axis + (slice(start, start + count),)


def _select_steps(values: Any, steps: Any, axis: int, library: Any) -> Any:
    """Select time steps, which may differ per environment, from values ``[..., steps, ...]``."""
    if axis == 0:
        return values[steps]
    if len(values) == 1:
        return values[:, steps[0]]
    return values[_positions(steps, 0, library), steps]


def _positions(like: Any, axis: int, library: Any) -> Any:
    """Return an array of the same shape with each entry's index along ``axis``."""
    return library.ones_like(like).cumsum(axis) - 1


def _fits_numpy(values: Values) -> bool:
    """Return whether NumPy can process the entries without copies or a changed reward dtype."""
    tensors = {path: one for path, one in values.items() if isinstance(one, Tensor)}
    reward = tensors.get(_REWARD)
    floating = reward is None or reward.is_floating_point()  # NumPy promotes integers to float64
    return floating and all(map(on_host, tensors.values()))


def _arrays(values: Values) -> Values:
    return {p: one.numpy() if isinstance(one, Tensor) else one for p, one in values.items()}


def _tensors(values: Values) -> Entries:
    return {p: one if isinstance(one, Tensor) else from_numpy(one) for p, one in values.items()}


def _moved_to(values: Values, others: Entries) -> Entries:
    """Move each entry to the device of the entry with the same path in ``others``."""
    return {path: one.to(others[path].device) for path, one in _tensors(values).items()}


def close(rows: TensorDictBase) -> None:
    """Mark transitions as the last of their episodes. Those not done become truncated."""
    done, truncated = (rows.get(("next", name), None) for name in ("done", "truncated"))
    if truncated is not None:
        truncated |= ~done
    done.fill_(True)
