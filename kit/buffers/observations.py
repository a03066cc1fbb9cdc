"""Replay memory that keeps each observation once, and of stacked frames the newest alone."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import LazyTensorStorage

from kit.fast.nested import leaves
from kit.steps import SettingError

_FLAGS = {("reward",), ("done",), ("terminated",), ("truncated",)}


class ObservationStorage(LazyTensorStorage):  # type: ignore[misc, unused-ignore]
    """TorchRL's storage of transitions in memory, with each observation stored once.

    The next observation of a transition is the observation of the following one of the same
    environment; only where an episode ends is it stored on its own. Of an observation that is a
    stack of frames, the newest frame is stored, and stacks are made again when they are read. What
    is read is, bit for bit, what was written.

    Args:
        max_size: transitions it holds; the oldest are overwritten.
        stacked_frames: of an observation ``[stacked_frames, ...]`` of consecutive frames, of which
            the newest alone is stored. Before an episode's first frame there is that frame again
            (Gymnasium's ``FrameStackObservation``). 1: observations are stored as they are.
        num_envs: environments that write in turn.
    """

    def __init__(self, max_size: int, *, stacked_frames: int = 1, num_envs: int = 1) -> None:
        super().__init__(max_size, compilable=True)
        self.frames, self.num_envs = stacked_frames, num_envs
        self._written = 0  # transitions so far: each has a number, the place of its observation
        self._memories: dict[tuple[str, ...], _Frames] = {}
        self._begins = torch.zeros(0, dtype=torch.bool)
        self._ends = torch.zeros(0, dtype=torch.long)  # row of the last observation; -1: none
        self._free: list[int] = []  # rows for last observations

    def belong_to(self, num_envs: int) -> None:
        """Say how many environments write in turn.

        Raises:
            SettingError: if others have written before, or more write than there is memory for.
        """
        if 2 * num_envs > self.max_size:
            why = f"is less than two transitions of each of the {num_envs} environments"
            raise SettingError("buffer_size", self.max_size, why, [2 * num_envs])
        if self._written and num_envs != self.num_envs:
            why = f"differs from the {self.num_envs} environments whose transitions are stored"
            raise SettingError("num_envs", num_envs, why, [self.num_envs])
        self.num_envs = num_envs

    # ------------------------------------------------------------------ writing
    def set(self, cursor: Any, data: TensorDictBase, *, set_cursor: bool = True) -> None:
        """Store the rows that follow the last ones, in the order of time."""
        values = leaves(data)
        paths = [p for p in values if ("next", *p) in values and p not in _FLAGS]
        rest = data.exclude(*paths, *(("next", *path) for path in paths))
        if not self._memories:
            self._make(paths, values)
        done = values["next", "done"].reshape(len(data), -1).any(1)
        # Whether the row before each ended an episode: read before it may be overwritten.
        ended = torch.cat([self._last_ended(), done])[: len(data)]
        super().set(cursor, rest, set_cursor=set_cursor)
        pairs = {path: (values[path], values["next", *path]) for path in paths}
        for start in range(0, len(data), self.num_envs):  # no row follows another of its group
            group = slice(start, start + self.num_envs)
            of_group = {k: (a[group], b[group]) for k, (a, b) in pairs.items()}
            self._write(of_group, done[group], ended[group])

    def _last_ended(self) -> Tensor:
        """Whether the newest transition of each environment is stored as the end of an episode."""
        numbers = torch.arange(self._written - self.num_envs, self._written)
        if self._storage is None:
            return torch.zeros(self.num_envs, dtype=torch.bool)
        flags: Tensor = self._storage["next", "done"][numbers % self.max_size]
        return flags.reshape(self.num_envs, -1).any(1) & (numbers >= 0)

    def _make(self, paths: list[tuple[str, ...]], values: dict[tuple[str, ...], Tensor]) -> None:
        places = self.max_size + self.frames * self.num_envs
        for path in paths:
            shape = values[path].shape[1:]
            if self.frames > 1 and (len(shape) < 2 or shape[0] != self.frames):
                why = f"are not in {'.'.join(path)} of shape {tuple(shape)}"
                raise SettingError("stacked_frames", self.frames, why, shape[:1][: len(shape) - 1])
            frame = shape[1:] if self.frames > 1 else shape
            self._memories[path] = _Frames(torch.empty(places, *frame, dtype=values[path].dtype))
        self._begins = torch.zeros(places, dtype=torch.bool)
        self._ends = torch.full((self.max_size,), -1)

    def _write(
        self, pairs: dict[tuple[str, ...], tuple[Tensor, Tensor]], done: Tensor, ended: Tensor
    ) -> None:
        """Store observations of one time step, and those that followed.

        Args:
            pairs: observation and next observation by path, of one row an environment at most.
            done: whether the episode ended.
            ended: whether the one of the row before ended with it.
        """
        numbers = torch.arange(self._written, self._written + len(done))
        self._written += len(done)
        before, places = numbers - self.num_envs, numbers % len(self._begins)
        known = before >= 0
        kept = self._ends[before % self.max_size] >= 0
        other = torch.zeros_like(done)  # than the observation that the step before led to
        for path, (seen, _) in pairs.items():
            expected = self._memories[path].values[places]
            other |= (self._newest(seen) != expected).reshape(len(done), -1).any(1)
        lost = known & ~kept & other
        if lost.any():  # the environment was reset in between
            self._keep(before[lost], {p: m.values[places[lost]] for p, m in self._memories.items()})
        self._free += [row for row in self._ends[numbers % self.max_size].tolist() if row >= 0]
        self._ends[numbers % self.max_size] = -1
        self._begins[places] = ~known | ended | other
        following = (numbers + self.num_envs) % len(self._begins)
        for path, (seen, then) in pairs.items():
            values = self._memories[path].values
            values[places] = self._newest(seen)
            values[following] = self._newest(then)
        if done.any():
            self._keep(numbers[done], {p: self._newest(b)[done] for p, (_, b) in pairs.items()})
        if self.frames > 1:
            self._check_stacks(numbers, pairs)

    def _newest(self, observation: Tensor) -> Tensor:
        return observation[:, -1] if self.frames > 1 else observation

    def _keep(self, numbers: Tensor, last: dict[tuple[str, ...], Tensor]) -> None:
        """Store the last observations of episodes on their own."""
        first = next(iter(self._memories.values()))
        while len(self._free) < len(numbers):
            size = len(first.last)
            self._free += range(size, 2 * size or 64)
            for memory in self._memories.values():
                memory.grow(2 * size or 64)
        rows = torch.tensor([self._free.pop() for _ in range(len(numbers))])
        self._ends[numbers % self.max_size] = rows
        for path, values in last.items():
            self._memories[path].last[rows] = values

    def _check_stacks(
        self, numbers: Tensor, pairs: dict[tuple[str, ...], tuple[Tensor, Tensor]]
    ) -> None:
        for path, given in pairs.items():
            if not all(map(torch.equal, self._read(path, numbers), given)):
                why = f"are not consecutive, or not padded with the first, in {'.'.join(path)}"
                raise SettingError("stacked_frames", self.frames, why, [1])

    # ------------------------------------------------------------------ reading
    def get(self, index: Any) -> Any:
        """Read rows with both observations."""
        rows = super().get(index)
        if isinstance(index, (slice, range)):
            span = index if isinstance(index, range) else range(*index.indices(len(self)))
            index = torch.arange(span.start, span.stop, span.step)
        index = torch.as_tensor(index)
        newest = self._written - 1
        numbers = newest - (newest - index.reshape(-1)) % self.max_size
        for path in self._memories:
            seen, then = self._read(path, numbers)
            rows.set(path, seen.reshape(*index.shape, *seen.shape[1:]))
            rows.set(("next", *path), then.reshape(*index.shape, *then.shape[1:]))
        return rows

    def _read(self, path: tuple[str, ...], numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Observations and next observations of transitions by number, ``[rows, ...]``."""
        memory, size = self._memories[path], len(self._begins)
        rows = self._ends[numbers % self.max_size]
        then = memory.values[(numbers + self.num_envs) % size]
        ended = rows >= 0
        if ended.any():
            then[ended] = memory.last[rows[ended]]
        places = [numbers % size]
        for _ in range(self.frames - 1):
            behind = torch.where(self._begins[places[0]], 0, self.num_envs)
            places.insert(0, (places[0] - behind) % size)
        if self.frames == 1:
            return memory.values[places[0]], then
        seen = memory.values[torch.stack(places, 1)]
        return seen, torch.cat([seen[:, 1:], then.unsqueeze(1)], 1)

    # ------------------------------------------------------------------ in and out
    def rows(self, index: Any) -> TensorDictBase:
        """Rows without observations."""
        return super().get(index)  # type: ignore[no-any-return]

    def set_rows(self, index: Any, rows: TensorDictBase) -> None:
        """Store rows without observations."""
        super().set(index, rows)

    def observations(self) -> dict[str, Any]:
        """The observations, as plain values and tensors."""
        return {
            "written": self._written,
            "num_envs": self.num_envs,
            "begins": self._begins,
            "ends": self._ends,
            "free": list(self._free),
            "paths": [list(path) for path in self._memories],
            "values": [memory.values for memory in self._memories.values()],
            "last": [memory.last for memory in self._memories.values()],
        }

    def load_observations(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`observations` returned."""
        self._written, self.num_envs = int(state["written"]), int(state["num_envs"])
        self._free = [int(row) for row in state["free"]]
        self._begins, self._ends = state["begins"].clone(), state["ends"].clone()
        self._memories = {
            tuple(path): _Frames(values.clone(), last.clone())
            for path, values, last in zip(state["paths"], state["values"], state["last"])
        }


class _Frames:
    """Frames of one entry of the observation.

    Args:
        values: of transitions by place, ``[places, ...]``.
        last: of episodes, where they are kept on their own, ``[rows, ...]``.
    """

    def __init__(self, values: Tensor, last: Tensor | None = None) -> None:
        self.values = values
        self.last = values.new_empty(0, *values.shape[1:]) if last is None else last

    def grow(self, rows: int) -> None:
        """Make room for more last frames."""
        more = self.last.new_empty(rows, *self.last.shape[1:])
        more[: len(self.last)] = self.last
        self.last = more
