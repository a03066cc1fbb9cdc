"""Buffers for rollouts in host environments, and the batches returned from these buffers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import MultiDiscrete
from numpy.typing import NDArray
from tensordict import TensorDictBase

from kit.collectors.policy import Tensors
from kit.envs.backends.base import Mask, StepArrays, rows_of
from kit.envs.episodes import EpisodeStatistics
from kit.envs.errors import EnvError
from kit.envs.spaces import Arrays, Key, path_of, some
from kit.envs.vector_env import VectorEnv
from kit.fast.nested import nested

CHUNK = 128
"""Minimum number of time steps for which memory is allocated at once."""

SMALL = 2**22
"""Maximum batch size in bytes for which batches are copied."""

_FLAGS = ("done", "terminated", "truncated")
_AT_ENDS = frozenset({*(("next", name) for name in _FLAGS), ("collector", "traj_ids")})
"""Entries that are copied only if an episode ends in the batch."""

Copies = Mapping[tuple[str, ...], NDArray[Any]]
"""Arrays, keyed by path."""

Row = tuple[Arrays, StepArrays]
"""Observation arrays for one time step, and the arrays for that step's results."""


class RolloutBuffer:
    """Buffer of arrays ``[steps, num_envs, ...]`` into which environments write one batch.

    A batch copies these arrays or shares their memory (see :class:`RolloutViews`).

    Args:
        env: environments that write to the buffer.
        steps: number of time steps per batch.
        actions: key, shape ``[num_envs, ...]`` and dtype of the actions, if the policy writes them
            to the buffer.

    Attributes:
        rows: arrays for each time step.
        whole: results of all time steps.
        acted_on: observations that the policy acted on.
        actions: actions, if the policy writes them to the buffer.
        done: whether each step ended an episode.
        any_done: whether any step ended an episode.
        episode_ids: episode number of each step; written only if an episode ended.
    """

    def __init__(
        self, env: VectorEnv, steps: int, actions: tuple[Key, tuple[int, ...], Any] | None = None
    ) -> None:
        self.env, self.steps = env, steps
        shape = steps, env.num_envs
        leaves = env.observation_leaves
        seen = {leaf.key: ((steps + 1, env.num_envs, *leaf.shape), leaf.dtype) for leaf in leaves}
        following = {leaf.key: ((*shape, *leaf.shape), leaf.dtype) for leaf in leaves}
        others: dict[str, Any] = {"reward": (shape, np.float32)}
        self.action_key: Key = ""
        if actions is not None:
            self.action_key, rows, dtype = actions
            others["actions"] = (steps, *rows), dtype
        self._memory, (self._seen, next_observation, made) = _zeros(seen, following, others)
        self.acted_on = {key: array[:-1] for key, array in self._seen.items()}
        self._ended = np.zeros((2, *shape), np.bool_)  # terminated, truncated
        self.whole = StepArrays(
            next_observation,
            {key: array[1:] for key, array in self._seen.items()},
            made["reward"],
            self._ended[0],
            self._ended[1],
            np.ones(shape, np.int32),
            np.empty(shape, np.float32) if env.needs_raw_reward else None,
        )
        self.done, self.episode_ids = np.zeros(shape, np.bool_), np.zeros(shape, np.int64)
        self.any_done = False
        self.actions: NDArray[Any] | None = made.get("actions")
        self.rows: list[Row] = list(zip(rows_of(self.acted_on), self.whole.rows()))

    def begin(self, *, shown: bool = False) -> None:
        """Begin a batch. ``shown``: whether the caller may have changed the last batch's flags."""
        present, first = self.env.start(), self.rows[0][0]
        for key, row in first.items():
            row[...] = present[key]
        self.env.acts_on(first)
        self.whole.env_steps[...] = 1
        if self.any_done or shown:
            self._ended[...] = self.done[...] = False

    def end(self, episodes: EpisodeIds) -> None:
        """Record which steps ended an episode, and the episode number of each step."""
        whole = self.whole
        self.any_done = some(self._ended)
        if self.any_done:
            np.logical_or(whole.terminated, whole.truncated, out=self.done)
            episodes.number(self.done, self.episode_ids)

    def entries(self) -> dict[tuple[str, ...], NDArray[Any]]:
        """Return the batch's arrays ``[steps, num_envs, ...]``, keyed by path."""
        whole = self.whole
        found = {path_of(key): array for key, array in self.acted_on.items()}
        found |= {("next", *path_of(key)): array for key, array in whole.next_observation.items()}
        found["next", "reward"] = whole.reward[..., None]
        for name, flags in zip(_FLAGS, (self.done, whole.terminated, whole.truncated)):
            found["next", name] = flags[..., None]
        found["collector", "traj_ids"] = self.episode_ids
        if self.actions is not None:
            found[path_of(self.action_key)] = self.actions
        return found

    def may_be_infinite(self) -> bool:
        """Return whether any value in this buffer may be infinite or NaN."""
        return any(map(may_be_infinite, self._memory))

    def doubtful_actions(self) -> Tensors:
        """Return the actions if any of them may be NaN, else an empty dict."""
        if self.actions is None or not may_be_infinite(self.actions):
            return {}
        return {self.action_key: torch.from_numpy(self.actions.swapaxes(0, 1))}

    def has_infinite(self) -> bool:
        """Return whether a reward or an observation may be infinite or NaN."""
        found = may_be_infinite(self.whole.reward) or any(map(may_be_infinite, self._seen.values()))
        if not self.any_done:  # all next observations are also stored in _seen
            return found
        return found or any(map(may_be_infinite, self.whole.next_observation.values()))

    def check_finite(self, name: str, statistics: EpisodeStatistics, taken: int) -> None:
        """Raise ``EnvError`` for the first observation or reward that is not finite.

        Args:
            name: name of the environment.
            statistics: statistics of the episodes that were open before this batch.
            taken: number of time steps before this batch.
        """
        whole = self.whole
        for what, values in (("reward", whole.reward), *whole.next_observation.items()):
            found = first_infinite(values)
            if found is not None:
                step, env, value = found
                ends = np.flatnonzero(self.done[:step, env])
                length = int(statistics.lengths[env]) + step
                length = step - int(ends[-1]) - 1 if len(ends) else length
                text = f"returned {value} as {what}, {length} policy steps into its episode"
                raise EnvError(name, env, text, taken + step)
        for what, values in self._seen.items():
            found = first_infinite(values)
            if found is not None:
                text = f"returned {found[2]} as {what} when it was reset"
                raise EnvError(name, found[1], text, taken + found[0])


class RolloutViews:
    """Creates batches that are copies or views of a rollout buffer.

    Args:
        buffer: rollout buffer that environments write to.
        count: number of batches to allocate memory for.
        copied: whether each batch is a copy owned by the caller, not a view of the buffer.
    """

    def __init__(self, buffer: RolloutBuffer, count: int, *, copied: bool) -> None:
        self._buffer, self.steps, self._count, self.copied = buffer, buffer.steps, count, copied
        self._used = self._counted = 0
        self._size = buffer.env.num_envs, buffer.steps
        # Copies for counting steps and episodes, because callers may change the batches.
        counted = buffer.whole.counted
        self._counts = [np.zeros((count, *a.shape), a.dtype) for a in counted]
        self._pairs = list(zip(self._counts, counted))
        self._tensordicts: Sequence[TensorDictBase] = ()
        shown = entries = buffer.entries()
        if copied:
            copies = {k: _aligned(count, a.shape, a.dtype) for k, a in entries.items()}
            self._copy(entries, copies)
            if count > 1:
                views = {k: torch.from_numpy(a).transpose(1, 2) for k, a in copies.items()}
                self._tensordicts = nested(views, [count, *self._size]).unbind(0)
            shown = {key: array[0] for key, array in copies.items()}
        self._views = {k: torch.from_numpy(a).transpose(0, 1) for k, a in shown.items()}

    def _copy(self, entries: Copies, copies: Copies) -> None:
        """Choose the arrays that are copied from the buffer for every batch."""
        for key in _AT_ENDS:
            copies[key][...] = 0
        self._pairs += [(copies[key], entries[key]) for key in entries if key not in _AT_ENDS]
        self._pairs_at_ends = [(copies[key], entries[key]) for key in _AT_ENDS]
        self._ids, self._numbered = copies["collector", "traj_ids"], -1

    @property
    def is_full(self) -> bool:
        """Whether all allocated memory is in use."""
        return self._used >= self._count

    @property
    def uncounted_steps(self) -> int:
        """Number of time steps collected since the last call to :meth:`uncounted`."""
        return (self._used - self._counted) * self.steps

    def rewind(self) -> None:
        """Start again at the first allocated batch. All batches must have been counted."""
        self._used = self._counted = 0

    def take(self, outputs: Tensors, episodes: EpisodeIds) -> TensorDictBase:
        """Return the buffer's batch ``[num_envs, steps]``, including the policy's outputs.

        ``outputs`` have shape ``[num_envs, steps, ...]``.
        """
        buffer, number = self._buffer, self._used
        self._used += 1
        for copies, array in self._pairs:
            copies[number] = array
        if not self.copied:
            if not buffer.any_done:
                buffer.episode_ids[...] = episodes.present
        else:
            if self._numbered != episodes.changes:  # ids are constant until an episode ends
                self._ids[number:] = episodes.present
                self._numbered = episodes.changes
            if buffer.any_done:
                for copies, array in self._pairs_at_ends:
                    copies[number] = array
        tensordicts = self._tensordicts
        batch = tensordicts[number] if tensordicts else nested(self._views, self._size)
        for key, value in outputs.items():
            batch.set(key, value)
        return batch

    def uncounted(self) -> list[NDArray[Any]]:
        """Return raw rewards, end flags (terminated, truncated) and env steps since the last call.

        Each array has shape ``[steps, num_envs]``.
        """
        new, shape = slice(self._counted, self._used), (-1, self._buffer.env.num_envs)
        self._counted = self._used
        return [array[new].reshape(shape) for array in self._counts]


class EpisodeIds:
    """Assigns numbers to the episodes of a run.

    Attributes:
        present: numbers of the open episodes, ``[num_envs]``.
        changes: number of times that ``present`` has changed.
    """

    def __init__(self, num_envs: int) -> None:
        self.present = np.arange(-num_envs, 0)  # so that the first new number is 0
        self.changes = 0

    def number(self, done: Mask, ids: NDArray[np.int64]) -> None:
        """Write each step's episode number to ``ids``. Both arrays are ``[steps, num_envs]``."""
        self.changes += 1
        ids[...] = self.present
        following = int(self.present.max()) + 1
        for env, end in zip(*(places.tolist() for places in done.T.nonzero())):
            ids[end + 1 :, env] = following
            self.present[env] = following
            following += 1

    def load(self, present: Sequence[int]) -> None:
        """Replace the numbers of the open episodes."""
        self.changes += 1
        self.present[...] = present

    def restart(self) -> None:
        """Assign new numbers. Called when all environments start new episodes."""
        self.changes += 1
        self.present += int(self.present.max()) + 1 - int(self.present.min())


def _aligned(count: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array ``[count, *shape]`` with each ``[*shape]`` block padded to 16 bytes."""
    memory = np.empty((count, _padded(shape, dtype)), dtype)
    return memory[:, : math.prod(shape)].reshape(count, *shape)


def _zeros(*groups: Mapping[Any, Any]) -> tuple[list[NDArray[Any]], list[dict[Any, NDArray[Any]]]]:
    """Allocate arrays of zeros; return their memory, and a dict of arrays for each group.

    Arrays of the same dtype share memory, aligned to 16 bytes. Large arrays are allocated
    separately, because the caller receives them with their batch.
    """
    sizes: dict[np.dtype[Any], int] = defaultdict(int)
    for shape, dtype in chain.from_iterable(group.values() for group in groups):
        sizes[np.dtype(dtype)] += _padded(shape, np.dtype(dtype))
    if sum(size * dtype.itemsize for dtype, size in sizes.items()) > SMALL:
        alone = [{name: np.zeros(*one) for name, one in group.items()} for group in groups]
        return [array for group in alone for array in group.values()], alone
    memory = {dtype: np.zeros(size, dtype) for dtype, size in sizes.items()}
    left = dict(memory)

    def allocate(shape: Sequence[int], kind: Any) -> NDArray[Any]:
        dtype = np.dtype(kind)
        array = left[dtype][: math.prod(shape)].reshape(shape)
        left[dtype] = left[dtype][_padded(shape, dtype) :]
        return array

    return [*memory.values()], [{k: allocate(*a) for k, a in group.items()} for group in groups]


def _padded(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Return the number of entries rounded up to 16 bytes, as MKL's rounding needs alignment."""
    return -(-math.prod(shape) * dtype.itemsize // 16) * 16 // dtype.itemsize


def may_be_infinite(values: NDArray[Any]) -> bool:
    """Return whether any entry may be infinite or NaN, based only on a dot product."""
    return values.dtype.kind == "f" and not np.vdot(values, values) < np.inf


class MaskCheck:
    """Raises an error if the action mask of an environment forbids every action."""

    def __init__(self, env: VectorEnv) -> None:
        self._name = env.name
        masks = [leaf for leaf in env.observation_leaves if leaf.is_action_mask]
        space = env.action_leaves[0].space
        self._key = masks[0].key if masks else None
        choices: Any = np.ravel(space.nvec) if isinstance(space, MultiDiscrete) else []
        several = bool(masks) and masks[0].shape == (int(np.sum(choices)),)
        self._starts = np.cumsum([0, *choices[:-1]]) if several else None

    def __call__(self, acted_on: Arrays, taken: int) -> None:
        """Raise ``EnvError`` if a mask in ``[steps, num_envs, ...]`` allows no action."""
        if self._key is None:
            return
        mask = acted_on[self._key]
        if self._starts is None:
            allowed = mask.any(-1)
        else:
            allowed = np.logical_or.reduceat(mask != 0, self._starts, axis=-1).all(-1)
        if not allowed.all():
            step, number = np.argwhere(~allowed)[0].tolist()
            what = "allows no action according to its action_mask"
            raise EnvError(self._name, number, what, taken + step)


def first_infinite(values: NDArray[Any]) -> tuple[int, int, str] | None:
    """Return the step, environment and kind of the first NaN or infinity; ``None`` if none.

    ``values`` have shape ``[steps, num_envs, ...]``.
    """
    if not may_be_infinite(values):
        return None
    found = np.argwhere(~np.isfinite(values))
    if not len(found):
        return None
    value = values[tuple(found[0])]
    return int(found[0][0]), int(found[0][1]), "NaN" if np.isnan(value) else "infinity"
