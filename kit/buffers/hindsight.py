"""Hindsight experience replay from several environments at once."""

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
    """Hindsight replay (Andrychowicz et al. 2017) whose goals come from the same episode.

    TorchRL's class with its arguments and strategies, which takes rows that follow each other for
    one episode. Here transitions of several environments alternate, as the kit's collectors write
    them: environment ``e`` of ``num_envs`` owns every row whose number is ``e`` modulo
    ``num_envs``. Where its episodes begin and end is noted when they are written, so sampling does
    not search the storage. An episode that is still open ends, for now, with its newest
    transition; one whose beginning was overwritten begins with its oldest.

    Args:
        reward_fn: from relabelled transitions to rewards; see TorchRL's class.
        num_envs: environments that write in turn; the trainer sets it with the first batch.
        **kwargs: of TorchRL's class: ``her_ratio``, ``strategy``, ``goal_key``, ``reward_key``,
            ``end_key``, ``sampler``, ``storage``, ``batch_size``, ... ``achieved_goal_key`` is the
            goal achieved after the action by default, and before it in TorchRL's class.

    Raises:
        SettingError: if rows do not come from all environments in turn.
    """

    def __init__(self, reward_fn: Any, *, num_envs: int = 1, **kwargs: Any) -> None:
        kwargs.setdefault("writer", SliceWriter())
        # The goal before the action is already reached: nothing is learned by relabelling with it.
        kwargs.setdefault("achieved_goal_key", ("next", "achieved_goal"))
        super().__init__(reward_fn, **kwargs)
        self.num_envs = whole_number("num_envs", num_envs, at_least=1)
        self._restart()

    def _restart(self) -> None:
        size = self._storage.max_size
        # By place: time steps at which the episode of a row begins and ends; -1: it is still open.
        self._begins = torch.zeros(size, dtype=torch.long)
        self._ends = torch.full((size,), -1)
        self._open = [0] * self.num_envs  # by environment: where its open episode begins
        self._rows = 0

    def belong_to(self, num_envs: int) -> None:
        """Say how many environments write in turn.

        Raises:
            SettingError: if others have written already.
        """
        if self._rows:
            check_num_envs(num_envs, self.num_envs)
        if num_envs != self.num_envs:
            self.num_envs = num_envs
            self._restart()

    def extend(self, tensordicts: TensorDictBase, **kwargs: Any) -> Tensor:
        """Store rows, all environments of a time step after each other."""
        if len(tensordicts) % self.num_envs:
            why = f"does not divide the {len(tensordicts)} rows that are stored at once"
            works = "collect with steps_per_env: whole episodes are not of one length"
            raise SettingError("num_envs", self.num_envs, why, works)
        index: Tensor = super().extend(tensordicts, **kwargs)
        self.note(tensordicts.get(self.end_key).reshape(-1, self.num_envs))
        return index

    def add(self, data: TensorDictBase) -> Tensor:
        """Store one row; of one environment only."""
        return self.extend(data.unsqueeze(0))

    def note(self, done: Tensor) -> None:
        """Note where the episodes of new rows begin and end; ``done`` is ``[steps, num_envs]``."""
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
        """Time step of the oldest row of an environment that is not overwritten."""
        overwritten = max(self._rows - self._storage.max_size, 0)
        return (overwritten - env + self.num_envs - 1) // self.num_envs

    def _span(self, first: int, last: int, env: int) -> Tensor:
        """Places of an environment's time steps from ``first`` to ``last``, or none."""
        steps = torch.arange(first, max(first, last + 1))
        return self._places(steps, env)  # type: ignore[no-any-return]

    def _places(self, steps: Any, env: Any) -> Any:
        return (steps * self.num_envs + env) % self._storage.max_size

    def _rows_at(self, places: Tensor) -> Tensor:
        """Numbers, counted from the first ever written, of the rows at places."""
        newest = self._rows - 1
        size: int = self._storage.max_size
        return newest - (newest - places) % size

    # ------------------------------------------------------------------ goals of samples
    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        data, told = TensorDictReplayBuffer._sample(self, batch_size)
        self.relabel(data, told["index"])
        return data, told

    def relabel(self, minibatch: TensorDictBase, index: Tensor) -> None:
        """Replace the goals and rewards of the first ``her_ratio`` of the rows, in place.

        As by TorchRL, which reads all entries of the rows that goals are taken from.

        Args:
            minibatch: ``[batch]``.
            index: places of its rows.
        """
        self._validate_storage_keys()
        rows = int(len(index) * self.her_ratio)
        if not rows:
            return
        begins, ends = self._get_episode_range(index[:rows], index)
        goals = self._sample_goal_indices(index[:rows], begins, ends, len(self._storage))
        stored = self._storage._storage.get(self.achieved_goal_key)
        if stored is None:  # observations are stored elsewhere, once
            achieved = self._storage.get(goals).get(self.achieved_goal_key)
        else:
            achieved = stored[goals]
        relabelled = minibatch[:rows]
        for key in (self.goal_key, self._next_key(self.goal_key)):
            if relabelled.get(key, None) is not None:
                relabelled.set_(key, achieved)
        relabelled.set_(self.reward_key, self.reward_fn(relabelled))

    def _get_episode_range(self, idx: Tensor, episode_ends: Tensor) -> tuple[Tensor, Tensor]:
        """Time steps at which the episodes of places begin and end, as far as they are stored."""
        del episode_ends
        idx = idx.cpu()
        oldest = self._oldest(self._rows_at(idx) % self.num_envs)
        newest = self._rows // self.num_envs - 1
        ends = self._ends[idx]
        return self._begins[idx].maximum(oldest), torch.where(ends < 0, newest, ends)

    def _sample_goal_indices(
        self, her_idx: Tensor, ep_starts: Tensor, ep_ends: Tensor, storage_len: int
    ) -> Tensor:
        """Places of goals: TorchRL's choice among time steps, brought back to places."""
        if self.strategy == "random":
            return super()._sample_goal_indices(her_idx, ep_starts, ep_ends, storage_len)  # type: ignore[no-any-return]
        rows = self._rows_at(her_idx.cpu())
        steps = super()._sample_goal_indices(rows // self.num_envs, ep_starts, ep_ends, storage_len)
        return self._places(steps, rows % self.num_envs).to(her_idx.device)  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ in and out
    def close_open_episodes(self) -> None:
        """End every open episode with its newest transition."""
        newest = self._rows // self.num_envs - 1
        for env in range(self.num_envs):
            begin = max(self._open[env], self._oldest(env))
            self._ends[self._span(begin, newest, env)] = newest
            self._open[env] = newest + 1

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget everything."""
        super().empty(empty_write_count)
        self._restart()

    def episodes_state(self) -> dict[str, Any]:
        """Where episodes begin and end, for a checkpoint."""
        filled = len(self._storage)
        return {
            "num_envs": self.num_envs,
            "rows": self._rows,
            "open": list(self._open),
            "begins": self._begins[:filled].clone(),
            "ends": self._ends[:filled].clone(),
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of TorchRL's buffer, and of the episodes."""
        return {**super().state_dict(), "episodes": self.episodes_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
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
        """Restore what :meth:`episodes_state` returned."""
        self.num_envs = int(state["num_envs"])
        self._restart()
        self._rows, self._open = int(state["rows"]), list(state["open"])
        self._begins[: len(state["begins"])] = state["begins"]
        self._ends[: len(state["ends"])] = state["ends"]
