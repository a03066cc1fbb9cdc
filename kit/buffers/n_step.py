"""Transitions of several steps."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from kit.fast.nested import leaves, nested
from kit.steps import SettingError
from kit.steps.errors import real_number

Entries = dict[tuple[str, ...], Tensor]
_REWARD, _DONE, _STEPS = ("next", "reward"), ("next", "done"), ("steps_to_next_obs",)


class NStep:
    """Sums the rewards of several steps into one transition (Sutton and Barto 2018, eq. 7.1).

    What TorchRL's ``MultiStepTransform`` writes, in a third of its time; without its entries
    ``gamma``, ``nonterminal`` and ``original_reward``, which no loss reads. Observation and flags
    under ``next`` are those after the last of the steps whose rewards were summed: the n-th, or the
    last of the episode. The number of these steps is ``steps_to_next_obs``.

    Args:
        steps: rewards of a transition, at most.
        gamma: discount factor.

    Attributes:
        waiting: the newest steps, as many as a transition has, which wait for what follows.
    """

    def __init__(self, steps: int, gamma: float) -> None:
        self.steps, self.gamma = steps, real_number("gamma", gamma, 0, 1)
        self.waiting: TensorDictBase | None = None

    def __call__(self, batch: TensorDictBase) -> TensorDictBase | None:
        """Return the transitions that a batch completes, time last; ``None`` where there is none.

        Args:
            batch: steps ``[num_envs, steps]``, or whole episodes one after the other, ``[steps]``.

        Raises:
            SettingError: if it is of other environments than the steps that wait, or has other
                entries, or one that is no tensor.
        """
        entries, axis, total = leaves(batch), batch.ndim - 1, batch.shape[-1]
        if self.waiting is None:
            _check_tensors(entries)
        else:
            waiting = leaves(self.waiting)
            _check_alike(batch, entries, self.waiting, waiting)
            entries = {
                path: torch.cat([one.to(entries[path].device), entries[path]], axis)
                for path, one in waiting.items()
            }
            total += self.waiting.shape[-1]
        kept, count = min(self.steps, total), max(total - self.steps, 0)
        newest = {path: value.narrow(axis, total - kept, kept) for path, value in entries.items()}
        own = {path: value.clone() for path, value in newest.items()}  # a batch may be written to
        self.waiting = nested(own, [*batch.shape[:-1], kept], batch.device)
        if not count:
            return None
        summed = self._summed(entries, axis, count)
        return nested(summed, [*batch.shape[:-1], count], batch.device)

    def _summed(self, entries: Entries, axis: int, count: int) -> Entries:
        reward, done = entries[_REWARD], entries[_DONE]
        found = {path: value.narrow(axis, 0, count) for path, value in entries.items()}
        summed, going = found[_REWARD], ~found[_DONE]
        following = torch.zeros_like(going, dtype=torch.long)
        for step in range(1, self.steps):
            summed = summed + self.gamma**step * reward.narrow(axis, step, count) * going
            following += going
            going = going & ~done.narrow(axis, step, count)
        steps = following.squeeze(-1)
        last = steps + torch.arange(count, device=steps.device)
        for path in entries.keys() - {_REWARD}:
            if path[0] == "next":
                found[path] = _taken(entries[path], last, axis)
        return found | {_REWARD: summed, _STEPS: steps + 1}

    def close_open_episodes(self) -> None:
        """Mark the newest step of every environment as truncated, if its episode has not ended."""
        if self.waiting is not None:
            close(self.waiting[..., -1])


def _check_tensors(entries: Entries) -> None:
    """Refuse texts and objects, of which a transition of several steps would need one."""
    for path, value in entries.items():
        if not isinstance(value, Tensor):
            why = f"is a {type(value).__name__}, and n-step returns join tensors"
            raise SettingError("entry", ".".join(path), why, "leave it out, or use n_step=1")


def _check_alike(
    batch: TensorDictBase, entries: Entries, before: TensorDictBase, waiting: Entries
) -> None:
    """Refuse a batch with which the steps that wait cannot go on."""
    if batch.shape[:-1] != before.shape[:-1]:
        given, known = ([*one.shape[:-1]] for one in (batch, before))
        why = f"of a batch are not the {known} whose steps wait for those that follow"
        raise SettingError("num_envs", given, why, [known])
    for path in waiting.keys() ^ entries.keys():
        found, have = ("in", "do not have") if path in entries else ("missing in", "have")
        why = f"is {found} a batch, and the steps that wait for those that follow {have} it"
        raise SettingError("entry", ".".join(path), why, "give all batches the same entries")


def _taken(values: Tensor, steps: Tensor, axis: int) -> Tensor:
    """Values ``[..., steps, ...]`` of some time steps of each environment."""
    if axis == 0 or len(values) == 1:
        return values.index_select(axis, steps.flatten())
    return values[torch.arange(len(values), device=steps.device).unsqueeze(-1), steps]


def close(rows: TensorDictBase) -> None:
    """Mark transitions in place as the last of their episodes: truncated, if they do not end."""
    done, truncated = (rows.get(("next", name), None) for name in ("done", "truncated"))
    if truncated is not None:
        truncated |= ~done
    done.fill_(True)
