"""Hindsight experience replay for several environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import HERReplayBuffer, TensorDictReplayBuffer

from kit.buffers.writer import SliceWriter, check_num_envs
from kit.steps import SettingError
from kit.steps.errors import whole_number


class HindsightReplayBuffer(HERReplayBuffer):  # type: ignore[misc, unused-ignore]
    """Hindsight experience replay (Andrychowicz et al. 2017) for several environments.

    TorchRL's class has the same arguments and strategies but assumes that adjacent rows belong to
    one episode. In this class, transitions of several environments alternate, as kit's collectors
    write them: row ``i`` belongs to environment ``i % num_envs``. Episode boundaries are recorded
    when transitions are written, so sampling does not search the storage. An open episode is
    treated as ending with its newest transition. An episode whose start was overwritten is treated
    as starting with its oldest stored transition.

    Args:
        reward_fn: Function from relabelled transitions to rewards; see TorchRL's class.
        num_envs: Number of environments that write in turn; set by the trainer.
        **kwargs: Arguments for TorchRL's class: ``her_ratio``, ``strategy``, ``goal_key``,
            ``reward_key``, ``end_key``, ``sampler``, ``storage``, ``batch_size``, ... By default,
            ``achieved_goal_key`` is the goal achieved after the action. In TorchRL's class, it is
            the goal achieved before the action.

    Raises:
        SettingError: If rows do not come from all environments in turn.
    """

    def __init__(self, reward_fn: Any, *, num_envs: int = 1, **kwargs: Any) -> None:
        kwargs.setdefault("writer", SliceWriter())
        # A goal that was achieved before the action teaches nothing about the action.
        kwargs.setdefault("achieved_goal_key", ("next", "achieved_goal"))
        super().__init__(reward_fn, **kwargs)
        self.num_envs = whole_number("num_envs", num_envs, at_least=1)
        self._restart()

    def _restart(self) -> None:
        size = self._storage.max_size
        # First and last time step of each stored row's episode; the last is -1 while it is open.
        self._begins = torch.zeros(size, dtype=torch.long)
        self._ends = torch.full((size,), -1)
        self._open = [0] * self.num_envs  # first time step of each environment's open episode
        self._rows = 0

    def belong_to(self, num_envs: int) -> None:
        """Set the number of environments that write in turn.

        Raises:
            SettingError: If a different number of environments has already written.
        """
        if self._rows:
            check_num_envs(num_envs, self.num_envs)
        if num_envs != self.num_envs:
            self.num_envs = num_envs
            self._restart()

    def extend(self, tensordicts: TensorDictBase, **kwargs: Any) -> Tensor:
        """Store rows in time order. Each time step has one row per environment."""
        if len(tensordicts) % self.num_envs:
            reason = f"A batch of {len(tensordicts)} rows is not divisible by num_envs"
            hint = "Collect with steps_per_env instead of whole episodes"
            raise SettingError("num_envs", self.num_envs, reason, hint)
        index: Tensor = super().extend(tensordicts, **kwargs)
        self.note(tensordicts.get(self.end_key).reshape(-1, self.num_envs))
        return index

    def add(self, data: TensorDictBase) -> Tensor:
        """Store one row. Requires ``num_envs`` to be 1."""
        return self.extend(data.unsqueeze(0))

    def note(self, done: Tensor) -> None:
        """Record the episode boundaries of new rows; ``done`` is ``[steps, num_envs]``."""
        done = done.cpu()
        first = self._rows // self.num_envs
        self._rows += done.numel()
        for env in range(self.num_envs):
            stored = self._oldest(env)
            begin, newest = self._open[env], first + len(done) - 1
            for end in (first + done[:, env].nonzero().flatten()).tolist():
                self._ends[self._span(max(begin, stored), end, env)] = end
                self._begins[self._span(max(begin, first, stored), end, env)] = begin
                begin = end + 1
            new = self._span(max(begin, first, stored), newest, env)
            self._begins[new], self._ends[new] = begin, -1
            self._open[env] = begin

    def _oldest(self, env: Any) -> Any:
        """Return the time step of an environment's oldest row that is still stored."""
        overwritten = max(self._rows - self._storage.max_size, 0)
        return (overwritten - env + self.num_envs - 1) // self.num_envs

    def _span(self, first: int, last: int, env: int) -> Tensor:
        """Return the storage indices of an environment's time steps ``first`` to ``last``."""
        steps = torch.arange(first, max(first, last + 1))
        return self._places(steps, env)  # type: ignore[no-any-return]

    def _places(self, steps: Any, env: Any) -> Any:
        return (steps * self.num_envs + env) % self._storage.max_size

    def _rows_at(self, places: Tensor) -> Tensor:
        """Return how many rows were written before the row at each storage index."""
        newest = self._rows - 1
        size: int = self._storage.max_size
        return newest - (newest - places) % size

    # ------------------------------------------------------------------ goal relabelling
    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        data, info = TensorDictReplayBuffer._sample(self, batch_size)
        self.relabel(data, info["index"])
        return data, info

    def relabel(self, minibatch: TensorDictBase, index: Tensor) -> None:
        """Relabel the first rows of a minibatch in place; ``her_ratio`` is their fraction.

        TorchRL's class computes the same result, but reads all entries of the goal rows.

        Args:
            minibatch: Transitions ``[batch]``.
            index: Storage indices of its rows.
        """
        self._validate_storage_keys()
        rows = int(len(index) * self.her_ratio)
        if not rows:
            return
        begins, ends = self._get_episode_range(index[:rows], index)
        goals = self._sample_goal_indices(index[:rows], begins, ends, len(self._storage))
        stored = self._storage._storage.get(self.achieved_goal_key)
        if stored is None:  # an ObservationStorage keeps observations separately
            achieved = self._storage.get(goals).get(self.achieved_goal_key)
        else:
            achieved = stored[goals]
        relabelled = minibatch[:rows]
        for key in (self.goal_key, self._next_key(self.goal_key)):
            if relabelled.get(key, None) is not None:
                relabelled.set_(key, achieved)
        relabelled.set_(self.reward_key, self.reward_fn(relabelled))

    def _get_episode_range(self, idx: Tensor, episode_ends: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first and last stored time step of each row's episode."""
        del episode_ends
        idx = idx.cpu()
        oldest = self._oldest(self._rows_at(idx) % self.num_envs)
        newest = self._rows // self.num_envs - 1
        ends = self._ends[idx]
        return self._begins[idx].maximum(oldest), torch.where(ends < 0, newest, ends)

    def _sample_goal_indices(
        self, her_idx: Tensor, ep_starts: Tensor, ep_ends: Tensor, storage_len: int
    ) -> Tensor:
        """Choose goals with TorchRL's strategy, and return their storage indices."""
        if self.strategy == "random":
            return super()._sample_goal_indices(her_idx, ep_starts, ep_ends, storage_len)  # type: ignore[no-any-return]
        rows = self._rows_at(her_idx.cpu())
        steps = super()._sample_goal_indices(rows // self.num_envs, ep_starts, ep_ends, storage_len)
        return self._places(steps, rows % self.num_envs).to(her_idx.device)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ episodes and state
    def close_open_episodes(self) -> None:
        """End every open episode at its last stored transition."""
        newest = self._rows // self.num_envs - 1
        for env in range(self.num_envs):
            begin = max(self._open[env], self._oldest(env))
            self._ends[self._span(begin, newest, env)] = newest
            self._open[env] = newest + 1

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all transitions and episode boundaries."""
        super().empty(empty_write_count)
        self._restart()

    def episodes_state(self) -> dict[str, Any]:
        """Return the episode boundaries to store in a checkpoint."""
        filled = len(self._storage)
        return {
            "num_envs": self.num_envs,
            "rows": self._rows,
            "open": list(self._open),
            "begins": self._begins[:filled].clone(),
            "ends": self._ends[:filled].clone(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of TorchRL's buffer and the episode boundaries."""
        return {**super().state_dict(), "episodes": self.episodes_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        super().load_state_dict(state_dict)
        self.load_episodes_state(state_dict["episodes"])

    def dumps(self, path: Path | str) -> None:
        """Write the state to a folder."""
        super().dumps(path)
        torch.save(self.episodes_state(), Path(path) / "episodes.pt")

    def loads(self, path: Path | str) -> None:
        """Read the state from a folder."""
        super().loads(path)
        self.load_episodes_state(torch.load(Path(path) / "episodes.pt", weights_only=True))

    def load_episodes_state(self, state: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`episodes_state`."""
        self.num_envs = int(state["num_envs"])
        self._restart()
        self._rows, self._open = int(state["rows"]), list(state["open"])
        self._begins[: len(state["begins"])] = state["begins"]
        self._ends[: len(state["ends"])] = state["ends"]
