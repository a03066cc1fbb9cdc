"""Replay storage that stores each observation, or each frame of a frame stack, only once."""

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
"""Markers used instead of a row: next observation not stored separately, or repeated."""

Path = tuple[str, ...]
Array = NDArray[Any]


class ObservationStorage(TransitionStorage):
    """TorchRL storage for transitions that stores each observation only once.

    The next observation of a transition equals the observation of the environment's following
    transition, so it is stored separately only at the end of an episode. For frame stacks, only the
    newest frame is stored, and stacks are rebuilt on reading. Values are restored bit for bit.

    Args:
        max_size: Maximum number of transitions; the oldest are overwritten.
        stacked_frames: Number of consecutive frames in each observation ``[stacked_frames, ...]``;
            only the newest frame is stored. Stacks must be padded with the first frame of the
            episode, as in Gymnasium's ``FrameStackObservation``. 1: store whole observations.
        num_envs: Number of environments that write in turn.
        folder: Folder for the files on disk; ``None``: keep transitions in memory.
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
        self._written = 0  # number of transitions written so far
        self._memories: dict[Path, _Frames] = {}
        self._begins = np.zeros(0, np.bool_)
        self._ends = np.zeros(0, np.int64)  # row of a separate next observation, or a marker
        self._free: list[int] = []  # free rows for last observations

    def _empty(self) -> None:
        super()._empty()
        self._written, self._memories, self._free = 0, {}, []

    def belong_to(self, num_envs: int) -> None:
        """Set the number of environments that write in turn.

        Raises:
            SettingError: If a different number of environments has already written, or the storage
                is too small.
        """
        if 2 * num_envs > self.max_size:
            reason = f"The buffer must have room for two transitions from each of {num_envs} envs"
            raise SettingError("buffer_size", self.max_size, reason, [2 * num_envs])
        if self._written:
            check_num_envs(num_envs, self.num_envs)
        self.num_envs = num_envs

    # ------------------------------------------------------------------ writing
    def set(self, cursor: Any, data: TensorDictBase, *, set_cursor: bool = True) -> None:
        """Store new rows, in time order."""
        values = leaves(data if data.ndim else data.unsqueeze(0))
        self.store(values)
        rest = self.without_observations(values)
        observed = [path for path in values if path not in rest]
        super().set(cursor, data.exclude(*observed), set_cursor=set_cursor)

    @staticmethod
    def without_observations(values: Mapping[Path, Tensor]) -> dict[Path, Tensor]:
        """Return the entries that are not observations, keyed by path."""
        observed = {path for path in values if _is_observed(path, values)}
        observed |= {("next", *path) for path in observed}
        return {path: value for path, value in values.items() if path not in observed}

    def store(self, values: Mapping[Path, Tensor]) -> None:
        """Store the observations of new rows ``[rows, ...]``, keyed by path.

        Call it before storing other entries, because they may overwrite the flags read here.
        """
        paths = [path for path in values if _is_observed(path, values)]
        if not self._memories:
            self._allocate(paths, values)
        for path in self._memories.keys() ^ {*paths}:
            reason = "Some batches contain this observation and others do not"
            raise SettingError(
                "entry", ".".join(path), reason, "Use the same entries in all batches"
            )
        pairs = {p: (values[p].cpu().numpy(), values["next", *p].cpu().numpy()) for p in paths}
        flags = values["next", "done"].cpu()
        done: Array = flags.reshape(len(flags), -1).any(1).numpy()
        # ended[i]: whether the environment's previous transition ended an episode.
        ended = np.concatenate([self._last_ended(), done])
        for start in range(0, len(done), self.num_envs):  # one time step of all environments
            group = slice(start, min(start + self.num_envs, len(done)))
            step = {k: (a[group], b[group]) for k, (a, b) in pairs.items()}
            self._write(step, done[group], ended[group])

    def _last_ended(self) -> Array:
        """Return whether the newest stored transition of each environment ended its episode."""
        numbers = np.arange(self._written - self.num_envs, self._written)
        if self._storage is None:
            return np.zeros(self.num_envs, np.bool_)
        flags: Array = self._storage["next", "done"].numpy()[numbers % self.max_size]
        return flags.reshape(self.num_envs, -1).any(1) & (numbers >= 0)

    def _allocate(self, paths: list[Path], values: Mapping[Path, Tensor]) -> None:
        places = self.max_size + self.frames * self.num_envs
        for path in paths:
            shape = values[path].shape[1:]
            frame = shape[1:] if self.frames > 1 else shape
            memory = self.zeros((places, *frame), values[path].dtype)
            self._memories[path] = _Frames(memory.numpy())
        self._begins = np.zeros(places, np.bool_)
        self._ends = np.full(self.max_size, _NONE)

    def _write(self, pairs: dict[Path, tuple[Array, Array]], done: Array, ended: Array) -> None:
        """Store the observations and next observations from one time step of all environments.

        ``ended`` marks environments whose previous transition ended an episode.
        """
        numbers = np.arange(self._written, self._written + len(done))
        self._written += len(done)
        before, places = numbers - self.num_envs, numbers % len(self._begins)
        has_previous = before >= 0
        changed = np.zeros_like(done)  # differs from the previous step's next observation
        for path, (seen, _) in pairs.items():
            differs = self._newest(seen) != self._memories[path].values[places]
            changed |= differs.reshape(len(done), -1).any(1)
        lost = has_previous & (self._ends[before % self.max_size] == _NONE) & changed
        if lost.any():  # the environment was reset between the steps
            frames = {path: memory.values[places[lost]] for path, memory in self._memories.items()}
            self._store_last(before[lost], frames)
        index = numbers % self.max_size
        self._free += [row for row in self._ends[index].tolist() if row >= 0]
        # A failed environment repeats its observation, so its frame stack has no new frame.
        repeated = done.copy()
        for seen, following in pairs.values() if done.any() else ():
            repeated &= (seen == following).reshape(len(done), -1).all(1)
        done = done & ~repeated
        self._ends[index] = np.where(repeated, _REPEATED, _NONE)
        self._begins[places] = ~has_previous | ended | changed
        next_places = (numbers + self.num_envs) % len(self._begins)
        for path, (seen, following) in pairs.items():
            values = self._memories[path].values
            values[places], values[next_places] = self._newest(seen), self._newest(following)
        if done.any():
            frames = {path: self._newest(after)[done] for path, (_, after) in pairs.items()}
            self._store_last(numbers[done], frames)
        if self.frames > 1:
            self._check_stacks(numbers, pairs)

    def _newest(self, observation: Array) -> Array:
        return observation[:, -1] if self.frames > 1 else observation

    def _store_last(self, numbers: Array, last: dict[Path, Array]) -> None:
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
        for path, written in pairs.items():
            if not all(map(np.array_equal, self._read(path, numbers), written)):
                name = ".".join(path)
                reason = f"The frames of {name} must be consecutive and padded with the first frame"
                raise SettingError("stacked_frames", self.frames, reason, [1])

    # ------------------------------------------------------------------ reading
    @property
    def observed_bytes(self) -> int:
        """Size in bytes of one transition's two observations; 0 if the storage is empty."""
        frames: int = sum(memory.values[0].nbytes for memory in self._memories.values())
        return 2 * self.frames * frames

    def get(self, index: Any) -> Any:
        """Return complete rows, including observations and next observations."""
        rows = super().get(index).copy()  # get() may return the storage itself if it is full
        if isinstance(index, (slice, range)):
            span = index if isinstance(index, range) else range(*index.indices(len(self)))
            index = np.arange(span.start, span.stop, span.step)
        index = np.asarray(index)
        for path, value in self.read(index.reshape(-1)).items():
            rows.set(path, value.reshape(*index.shape, *value.shape[1:]))
        return rows

    def read(self, index: Array) -> dict[Path, Tensor]:
        """Return observations and next observations ``[rows, ...]`` at ``index``, keyed by path."""
        newest, found = self._written - 1, {}
        numbers = newest - (newest - index) % self.max_size
        for path in self._memories:
            both = self._read(path, numbers)
            found[path], found["next", *path] = map(torch.from_numpy, both)
        return found

    def _read(self, path: Path, numbers: Array) -> tuple[Array, Array]:
        """Return observations and next observations ``[rows, ...]`` for transition numbers."""
        memory, size = self._memories[path], len(self._begins)
        rows = self._ends[numbers % self.max_size]
        following = memory.values[(numbers + self.num_envs) % size]
        ended = rows >= 0
        if ended.any():
            following[ended] = memory.last[rows[ended]]
        places = [numbers % size]
        for _ in range(self.frames - 1):
            behind = np.where(self._begins[places[0]], 0, self.num_envs)
            places.insert(0, (places[0] - behind) % size)
        if self.frames == 1:
            seen = memory.values[places[0]]
        else:
            seen = memory.values[np.stack(places, 1)]
            following = np.concatenate([seen[:, 1:], following[:, None]], 1)
        repeated = rows == _REPEATED
        following[repeated] = seen[repeated]
        return seen, following

    # ------------------------------------------------------------------ state
    def rows(self, index: Any) -> TensorDictBase:
        """Return rows with all entries except the observations."""
        return super().get(index)  # type: ignore[no-any-return]

    def set_rows(self, index: Any, rows: TensorDictBase) -> None:
        """Store the entries of rows that contain no observations."""
        super().set(index, rows)

    def observations(self) -> dict[str, Any]:
        """Return all stored observations and their bookkeeping as plain values and tensors."""
        used = self._written + self.num_envs  # includes next observations of the newest step
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
        """Return the state of TorchRL's storage and the observations."""
        return {**super().state_dict(), "observations": self.observations()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
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
        """Restore the observations returned by :meth:`observations`."""
        self._written, self.num_envs = int(state["written"]), int(state["num_envs"])
        self._free = [int(row) for row in state["free"]]
        self._begins, self._ends = state["begins"].numpy().copy(), state["ends"].numpy().copy()
        self._memories = {}
        for path, values, last in zip(state["paths"], state["values"], state["last"]):
            memory = self.zeros((len(self._begins), *values.shape[1:]), values.dtype)
            memory[: len(values)] = values
            self._memories[tuple(path)] = _Frames(memory.numpy(), last.numpy().copy())


class _Frames:
    """Stored frames for one observation entry. Last frames of episodes are in ``last``."""

    def __init__(self, values: Array, last: Array | None = None) -> None:
        self.values = values
        self.last = np.zeros((0, *values.shape[1:]), values.dtype) if last is None else last

    def grow(self, rows: int) -> None:
        more = np.zeros((rows, *self.last.shape[1:]), self.last.dtype)
        more[: len(self.last)] = self.last
        self.last = more


def _is_observed(path: Path, values: Mapping[Path, Tensor]) -> bool:
    """Return whether an entry has a next value and is neither a reward nor a flag."""
    return ("next", *path) in values and path not in _FLAGS
