"""Replay memory that keeps each observation once, and of stacked frames the newest alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as Folder
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from kit.buffers.disk import TransitionStorage
from kit.buffers.writer import check_num_envs
from kit.fast.nested import leaves
from kit.steps import SettingError

_FLAGS = {("reward",), ("done",), ("terminated",), ("truncated",)}
_NONE, _REPEATED = -1, -2
"""In place of the row of a last observation: there is none, or it is the observation again."""

Path = tuple[str, ...]
Array = NDArray[Any]


class ObservationStorage(TransitionStorage):
    """TorchRL's storage of transitions, with each observation stored once.

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
        folder: on whose disk it is; ``None``: it is in memory.
    """

    def __init__(
        self,
        max_size: int,
        *,
        stacked_frames: int = 1,
        num_envs: int = 1,
        folder: Folder | str | None = None,
    ) -> None:
        super().__init__(max_size, folder, compilable=True)
        self.frames, self.num_envs = stacked_frames, num_envs
        self._written = 0  # transitions so far: each has a number, the place of its observation
        self._memories: dict[Path, _Frames] = {}
        self._begins = np.zeros(0, np.bool_)
        self._ends = np.zeros(0, np.int64)  # row of the last observation
        self._free: list[int] = []  # rows for last observations

    def _empty(self) -> None:
        super()._empty()
        self._written, self._memories, self._free = 0, {}, []

    def belong_to(self, num_envs: int) -> None:
        """Say how many environments write in turn.

        Raises:
            SettingError: if others have written before, or more write than there is memory for.
        """
        if 2 * num_envs > self.max_size:
            why = f"is less than two transitions of each of the {num_envs} environments"
            raise SettingError("buffer_size", self.max_size, why, [2 * num_envs])
        if self._written:
            check_num_envs(num_envs, self.num_envs)
        self.num_envs = num_envs

    # ------------------------------------------------------------------ writing
    def set(self, cursor: Any, data: TensorDictBase, *, set_cursor: bool = True) -> None:
        """Store the rows that follow the last ones, in the order of time."""
        values = leaves(data if data.ndim else data.unsqueeze(0))
        self.store(values)
        rest = self.without_observations(values)
        observed = [path for path in values if path not in rest]
        super().set(cursor, data.exclude(*observed), set_cursor=set_cursor)

    @staticmethod
    def without_observations(values: Mapping[Path, Tensor]) -> dict[Path, Tensor]:
        """The entries of rows that are stored as they are, by path."""
        observed = {path for path in values if _is_observed(path, values)}
        observed |= {("next", *path) for path in observed}
        return {path: value for path, value in values.items() if path not in observed}

    def store(self, values: Mapping[Path, Tensor]) -> None:
        """Store the observations of the rows that follow the last ones, ``[rows, ...]`` by path.

        Called before their other entries are stored, which may overwrite flags that are read here.
        """
        paths = [path for path in values if _is_observed(path, values)]
        if not self._memories:
            self._make(paths, values)
        for path in self._memories.keys() ^ {*paths}:
            why = "is an observation in a batch, and not in all that were stored"
            raise SettingError("entry", ".".join(path), why, "give all batches the same entries")
        pairs = {p: (values[p].cpu().numpy(), values["next", *p].cpu().numpy()) for p in paths}
        flags = values["next", "done"].cpu()
        done: Array = flags.reshape(len(flags), -1).any(1).numpy()
        # Whether the row before each ended an episode.
        ended = np.concatenate([self._last_ended(), done])
        for start in range(0, len(done), self.num_envs):  # no row follows another of its group
            group = slice(start, min(start + self.num_envs, len(done)))
            of_group = {k: (a[group], b[group]) for k, (a, b) in pairs.items()}
            self._write(of_group, done[group], ended[group])

    def _last_ended(self) -> Array:
        """Whether the newest transition of each environment is stored as the end of an episode."""
        numbers = np.arange(self._written - self.num_envs, self._written)
        if self._storage is None:
            return np.zeros(self.num_envs, np.bool_)
        flags: Array = self._storage["next", "done"].numpy()[numbers % self.max_size]
        return flags.reshape(self.num_envs, -1).any(1) & (numbers >= 0)

    def _make(self, paths: list[Path], values: Mapping[Path, Tensor]) -> None:
        places = self.max_size + self.frames * self.num_envs
        for path in paths:
            shape = values[path].shape[1:]
            frame = shape[1:] if self.frames > 1 else shape
            memory = self.zeros((places, *frame), values[path].dtype)
            self._memories[path] = _Frames(memory.numpy())
        self._begins = np.zeros(places, np.bool_)
        self._ends = np.full(self.max_size, _NONE)

    def _write(self, pairs: dict[Path, tuple[Array, Array]], done: Array, ended: Array) -> None:
        """Store observations of one time step and those that followed, at most a row of each env.

        ``ended`` says whether the row before each ended an episode.
        """
        numbers = np.arange(self._written, self._written + len(done))
        self._written += len(done)
        before, places = numbers - self.num_envs, numbers % len(self._begins)
        known = before >= 0
        other = np.zeros_like(done)  # than the observation that the step before led to
        for path, (seen, _) in pairs.items():
            differs = self._newest(seen) != self._memories[path].values[places]
            other |= differs.reshape(len(done), -1).any(1)
        lost = known & (self._ends[before % self.max_size] == _NONE) & other
        if lost.any():  # the environment was reset in between
            self._keep(before[lost], {p: m.values[places[lost]] for p, m in self._memories.items()})
        index = numbers % self.max_size
        self._free += [row for row in self._ends[index].tolist() if row >= 0]
        # After a fault an environment has no other observation, and no stack with a new frame.
        again = done.copy()
        for seen, then in pairs.values() if done.any() else ():
            again &= (seen == then).reshape(len(done), -1).all(1)
        done = done & ~again
        self._ends[index] = np.where(again, _REPEATED, _NONE)
        self._begins[places] = ~known | ended | other
        following = (numbers + self.num_envs) % len(self._begins)
        for path, (seen, then) in pairs.items():
            values = self._memories[path].values
            values[places], values[following] = self._newest(seen), self._newest(then)
        if done.any():
            self._keep(numbers[done], {p: self._newest(b)[done] for p, (_, b) in pairs.items()})
        if self.frames > 1:
            self._check_stacks(numbers, pairs)

    def _newest(self, observation: Array) -> Array:
        return observation[:, -1] if self.frames > 1 else observation

    def _keep(self, numbers: Array, last: dict[Path, Array]) -> None:
        """Store the last observations of episodes on their own."""
        first = next(iter(self._memories.values()))
        while len(self._free) < len(numbers):
            size = len(first.last)
            self._free += range(size, 2 * size or 64)
            for memory in self._memories.values():
                memory.grow(2 * size or 64)
        rows = [self._free.pop() for _ in range(len(numbers))]
        self._ends[numbers % self.max_size] = rows
        for path, values in last.items():
            self._memories[path].last[rows] = values

    def _check_stacks(self, numbers: Array, pairs: dict[Path, tuple[Array, Array]]) -> None:
        for path, given in pairs.items():
            if not all(map(np.array_equal, self._read(path, numbers), given)):
                why = f"are not consecutive, or not padded with the first, in {'.'.join(path)}"
                raise SettingError("stacked_frames", self.frames, why, [1])

    # ------------------------------------------------------------------ reading
    @property
    def observed_bytes(self) -> int:
        """Bytes of both observations of a transition, once the first is stored."""
        frames: int = sum(memory.values[0].nbytes for memory in self._memories.values())
        return 2 * self.frames * frames

    def get(self, index: Any) -> Any:
        """Read rows with both observations."""
        rows = super().get(index).copy()  # of a full memory all rows are the memory itself
        if isinstance(index, (slice, range)):
            span = index if isinstance(index, range) else range(*index.indices(len(self)))
            index = np.arange(span.start, span.stop, span.step)
        index = np.asarray(index)
        for path, value in self.read(index.reshape(-1)).items():
            rows.set(path, value.reshape(*index.shape, *value.shape[1:]))
        return rows

    def read(self, index: Array) -> dict[Path, Tensor]:
        """Observations and next observations by path, ``[rows, ...]``, of an index ``[rows]``."""
        newest, found = self._written - 1, {}
        numbers = newest - (newest - index) % self.max_size
        for path in self._memories:
            both = self._read(path, numbers)
            found[path], found["next", *path] = map(torch.from_numpy, both)
        return found

    def _read(self, path: Path, numbers: Array) -> tuple[Array, Array]:
        """Observations and next observations of transitions by number, ``[rows, ...]``."""
        memory, size = self._memories[path], len(self._begins)
        rows = self._ends[numbers % self.max_size]
        then = memory.values[(numbers + self.num_envs) % size]
        ended = rows >= 0
        if ended.any():
            then[ended] = memory.last[rows[ended]]
        places = [numbers % size]
        for _ in range(self.frames - 1):
            behind = np.where(self._begins[places[0]], 0, self.num_envs)
            places.insert(0, (places[0] - behind) % size)
        if self.frames == 1:
            seen = memory.values[places[0]]
        else:
            seen = memory.values[np.stack(places, 1)]
            then = np.concatenate([seen[:, 1:], then[:, None]], 1)
        again = rows == _REPEATED
        then[again] = seen[again]
        return seen, then

    # ------------------------------------------------------------------ in and out
    def rows(self, index: Any) -> TensorDictBase:
        """Rows without observations."""
        return super().get(index)  # type: ignore[no-any-return]

    def set_rows(self, index: Any, rows: TensorDictBase) -> None:
        """Store rows without observations."""
        super().set(index, rows)

    def observations(self) -> dict[str, Any]:
        """The observations written so far, as plain values and tensors."""
        used = self._written + self.num_envs  # the newest step has written what followed it, too
        return {
            "written": self._written,
            "num_envs": self.num_envs,
            "begins": torch.from_numpy(self._begins),
            "ends": torch.from_numpy(self._ends),
            "free": list(self._free),
            "paths": [list(path) for path in self._memories],
            "values": [
                torch.from_numpy(memory.values[:used]) for memory in self._memories.values()
            ],
            "last": [torch.from_numpy(memory.last) for memory in self._memories.values()],
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of TorchRL's storage, and the observations."""
        return {**super().state_dict(), "observations": self.observations()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state_dict)
        self.load_observations(state_dict["observations"])

    def dumps(self, path: Folder | str) -> None:
        """Write the state to a folder."""
        super().dumps(path)
        torch.save(self.observations(), Folder(path) / "observations.pt")

    def loads(self, path: Folder | str) -> None:
        """Read the state from a folder."""
        super().loads(path)
        self.load_observations(torch.load(Folder(path) / "observations.pt", weights_only=True))

    def load_observations(self, state: dict[str, Any]) -> None:
        """Restore the state of :meth:`observations`."""
        self._written, self.num_envs = int(state["written"]), int(state["num_envs"])
        self._free = [int(row) for row in state["free"]]
        self._begins, self._ends = state["begins"].numpy().copy(), state["ends"].numpy().copy()
        self._memories = {}
        for path, values, last in zip(state["paths"], state["values"], state["last"]):
            memory = self.zeros((len(self._begins), *values.shape[1:]), values.dtype)
            memory[: len(values)] = values
            self._memories[tuple(path)] = _Frames(memory.numpy(), last.numpy().copy())


class _Frames:
    """Frames of one entry: by place, and apart the last ones of episodes."""

    def __init__(self, values: Array, last: Array | None = None) -> None:
        self.values = values
        self.last = np.zeros((0, *values.shape[1:]), values.dtype) if last is None else last

    def grow(self, rows: int) -> None:
        """Make room for more last frames."""
        more = np.zeros((rows, *self.last.shape[1:]), self.last.dtype)
        more[: len(self.last)] = self.last
        self.last = more


def _is_observed(path: Path, values: Mapping[Path, Tensor]) -> bool:
    """Whether an entry is an observation: there is a next one, and it is no flag."""
    return ("next", *path) in values and path not in _FLAGS
