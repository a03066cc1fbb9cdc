"""Memory of rollouts: environments write to its rows, batches are views of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from kit.collectors.actor import Tensors
from kit.envs.backends.base import Mask, StepArrays, rows_of
from kit.envs.episodes import Episode, EpisodeStatistics
from kit.envs.errors import EnvironmentFault
from kit.envs.spaces import Arrays, Key
from kit.envs.vector_env import VectorEnv

CHUNK = 128
"""Time steps for which memory is made at once, at least."""

Row = tuple[Arrays, StepArrays]
"""What a time step acts on, and where it is written."""


class RolloutBuffer:
    """Memory of several consecutive batches, time first.

    Batches of few steps share an allocation: arrays, their rows and the TensorDicts that show them
    are made for all of its batches at once. No batch is written to again after the next has begun,
    so each belongs to who receives it.

    Args:
        env: whose observations and rewards are written.
        steps: time steps of a batch.
        batches: for which there is memory.
        actions: key, shape ``[num_envs, ...]`` and type of actions that the policy writes here;
            ``None``: it does not.

    Attributes:
        rows: of the present batch.
        actions: where the policy writes its actions, ``[steps, num_envs, ...]``, or ``None``.
        any_done: whether one of the present batch's steps ended an episode.
    """

    rows: list[Row]
    actions: NDArray[Any] | None = None
    any_done: bool

    def __init__(
        self,
        env: VectorEnv,
        steps: int,
        batches: int = 1,
        actions: tuple[Key, tuple[int, ...], Any] | None = None,
    ) -> None:
        self.steps, self.batches = steps, batches
        shape = batches, steps, env.num_envs
        one_more = steps + 1, env.num_envs
        leaves = env.observation_leaves
        self._observation = {
            leaf.key: _aligned(batches, (*one_more, *leaf.shape), leaf.dtype) for leaf in leaves
        }
        raw = np.empty(shape, np.float32) if env.needs_raw_reward else None
        self._results = StepArrays(
            {leaf.key: np.empty((*shape, *leaf.shape), leaf.dtype) for leaf in leaves},
            {key: array[:, 1:] for key, array in self._observation.items()},
            np.empty(shape, np.float32),
            np.zeros(shape, np.bool_),
            np.zeros(shape, np.bool_),
            np.ones(shape, np.int32),
            raw,
        )
        self._done, self._ids = np.zeros(shape, np.bool_), np.zeros(shape, np.int64)
        self._actions: dict[Key, NDArray[Any]] = {}
        if actions is not None:
            key, rows, dtype = actions
            self._actions = {key: np.empty((batches, steps, *rows), dtype)}
        self._may_be_nan = actions is not None and np.dtype(actions[2]).kind == "f"
        self._rows = self._all_rows()
        self._tensordicts: Sequence[TensorDictBase] = ()
        self._used = self._given = self._counted = 0
        self._numbered = -1

    def _all_rows(self) -> list[Row]:
        """The rows of all batches: cheaper to make at once."""
        shape = self.batches * self.steps, self._done.shape[2]

        def flat(array: NDArray[Any]) -> NDArray[Any]:
            return array.reshape(*shape, *array.shape[3:])

        def each(batches: slice) -> Iterator[Arrays]:
            rows = [
                [r for block in a[:, batches] for r in block] for a in self._observation.values()
            ]
            return (dict(zip(self._observation, row)) for row in zip(*rows))

        results = self._results
        following = {key: flat(array) for key, array in results.next_observation.items()}
        raw = itertools.repeat(None) if results.raw_reward is None else flat(results.raw_reward)
        flags = flat(results.terminated), flat(results.truncated)
        numbers = flat(results.reward), *flags, flat(results.env_steps), raw
        written = map(StepArrays, rows_of(following), each(slice(1, None)), *numbers)
        return list(zip(each(slice(None, -1)), written))

    @property
    def present(self) -> int:
        """Number of the present batch."""
        return self._used - 1

    @property
    def whole(self) -> StepArrays:
        """Arrays of the present batch but for what is acted on, ``[steps, num_envs, ...]``."""
        return self._results.at(self.present)

    @property
    def acted_on(self) -> Arrays:
        """Observations that the present batch acts on, ``[steps, num_envs, ...]``."""
        return {key: array[self.present, :-1] for key, array in self._observation.items()}

    @property
    def done(self) -> Mask:
        """Whether each step of the present batch ended an episode, ``[steps, num_envs]``."""
        done: Mask = self._done[self.present]
        return done

    @property
    def is_full(self) -> bool:
        """Whether there is no memory for another batch."""
        return self._used == self.batches

    def begin(self, present: Arrays) -> None:
        """Go on to the memory of the next batch.

        Args:
            present: the observation to act on first, copied.
        """
        first = self._used * self.steps
        self.rows = self._rows[first : first + self.steps]
        for array in self._actions.values():
            self.actions = array[self._used]
        self._used += 1
        for key, row in self.rows[0][0].items():
            row[...] = present[key]

    def begin_again(self, present: Arrays) -> None:
        """Overwrite the present batch with the next one."""
        results = self._results
        results.terminated[...] = results.truncated[...] = self._done[...] = False
        results.env_steps[...] = 1
        self._used, self._tensordicts = 0, ()
        self._given, self._counted, self._numbered = 0, 0, -1
        self.begin(present)

    def end(self, episodes: EpisodeIds) -> None:
        """Note which steps ended an episode, and to which episode each belongs."""
        if episodes.changes != self._numbered:  # once for all batches in which no episode ends
            self._ids[self.present :] = episodes.present
            self._numbered = episodes.changes
        flags = self._results.terminated[self.present], self._results.truncated[self.present]
        self.any_done = _some(flags[0]) or _some(flags[1])
        if self.any_done:
            np.logical_or(*flags, out=self.done)
            episodes.number(self.done, self._ids[self.present])

    def uncounted(self) -> StepArrays:
        """Results of the batches that :meth:`tensordict` has returned since the last call.

        Returns:
            Arrays ``[steps, num_envs]``, all batches one after the other, without observations.
        """
        new, shape = slice(self._counted, self._given), (-1, self._done.shape[2])
        self._counted = self._given
        numbers = [None if a is None else a[new].reshape(shape) for a in self._results[2:]]
        return StepArrays({}, {}, *numbers)  # type: ignore[arg-type]

    def tensordict(self, outputs: Tensors) -> TensorDictBase:
        """Return the present batch, ``[num_envs, steps]``.

        Args:
            outputs: of the policy, ``[num_envs, steps, ...]``; entries under ``next`` go there.
                Actions that are already here may be left out.
        """
        if not self._tensordicts:
            self._tensordicts = self._views().unbind(0)
        batch = self._tensordicts[self._used - 1]
        self._given = self._used
        for key, value in outputs.items():
            batch.set(key, value)
        return batch

    def _views(self) -> TensorDictBase:
        """Return a TensorDict ``[batches, num_envs, steps]`` that shows the arrays."""
        shape = [self.batches, self._done.shape[2], self.steps]
        results = self._results
        following: dict[Any, Tensor] = {k: _view(a) for k, a in results.next_observation.items()}
        following["done"] = _view(self._done).unsqueeze(-1)
        for name in ("reward", "terminated", "truncated"):
            following[name] = _view(getattr(results, name)).unsqueeze(-1)
        root: dict[Any, Any] = {key: _view(a[:, :-1]) for key, a in self._observation.items()}
        root |= {key: _view(array) for key, array in self._actions.items()}
        root["collector"] = TensorDict({"traj_ids": _view(self._ids)}, shape)
        root["next"] = TensorDict(following, shape)
        return TensorDict(root, shape)

    def doubtful_actions(self) -> Tensors:
        """The actions that were written here, if some may be NaN."""
        if self.actions is None or not self._may_be_nan or not may_be_nan(self.actions):
            return {}
        return {key: torch.from_numpy(self.actions.swapaxes(0, 1)) for key in self._actions}

    def has_nan(self) -> bool:
        """Whether a reward or an observation of the present batch may be NaN."""
        results, present = self._results, self.present
        arrays = results.reward, *results.next_observation.values()
        return any(may_be_nan(array[present]) for array in arrays)

    def check_finite(self, name: str, statistics: EpisodeStatistics, taken: int) -> None:
        """Refuse NaN, naming environment and step.

        Args:
            name: of the environment.
            statistics: of the episodes that were open before this batch.
            taken: time steps before this batch.

        Raises:
            EnvironmentFault: if an observation or reward is NaN.
        """
        for what, values in (("reward", self.whole.reward), *self.whole.next_observation.items()):
            found = _first_nan(values)
            if found is not None:
                step, env = found
                ends = np.flatnonzero(self.done[:step, env])
                length = int(statistics.lengths[env]) + step
                length = step - int(ends[-1]) - 1 if len(ends) else length
                text = f"returned NaN as {what}, {length} policy steps into its episode"
                raise EnvironmentFault(name, env, text, taken + step)


class EpisodeIds:
    """Numbers of episodes through the whole run: a new one for each that begins.

    Args:
        num_envs: number of environments.

    Attributes:
        present: of the open episodes, ``[num_envs]``.
        changes: of ``present`` so far.
    """

    def __init__(self, num_envs: int) -> None:
        self.present = np.arange(num_envs)
        self.changes = 0

    def number(self, done: Mask, ids: NDArray[np.int64]) -> None:
        """Write the number of each step's episode.

        Args:
            done: whether each step ended an episode, ``[steps, num_envs]``.
            ids: written to, ``[steps, num_envs]``.
        """
        self.changes += 1
        ids[...] = self.present
        following = int(self.present.max()) + 1
        for env in np.flatnonzero(done.any(axis=0)):
            for end in np.flatnonzero(done[:, env]):
                ids[end + 1 :, env] = following
                self.present[env] = following
                following += 1

    def restart(self) -> None:
        """Begin new episodes in all environments."""
        self.changes += 1
        self.present += int(self.present.max()) + 1 - int(self.present.min())


# ---------------------------------------------------------------------- whole episodes
@dataclass
class Span:
    """Where an episode is in the memory."""

    env: int
    start: int
    end: int = 0
    """time step after its last one; 0 while it is open."""

    @property
    def steps(self) -> slice:
        """Its time steps, once it has ended."""
        return slice(self.start, self.end)


class EpisodeBuffer:
    """Memory that grows while episodes are played.

    Args:
        env: whose observations and rewards are written.

    Attributes:
        steps: time steps so far.
    """

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self.steps = 0
        self._chunks: list[RolloutBuffer] = []
        self._arrays: dict[str, NDArray[Any]] = {}

    def rows(self) -> Iterator[Row]:
        """Yield rows without end."""
        while True:
            chunk = RolloutBuffer(self.env, CHUNK)
            chunk.begin(self.env.start())
            self._chunks.append(chunk)
            for row in chunk.rows:
                self.steps += 1
                yield row

    def _whole(self, name: str) -> NDArray[Any]:
        """Return an array of :class:`StepArrays` for all time steps, ``[steps, num_envs, ...]``."""
        return self._joined([getattr(chunk.whole, name) for chunk in self._chunks])

    def _observation(self, name: str, key: Key) -> NDArray[Any]:
        """Return observations of all time steps, ``[steps, num_envs, ...]``.

        Args:
            name: ``acted_on`` or ``next_observation``.
            key: of the observation.
        """
        chunks = self._chunks
        if name == "acted_on":
            return self._joined([chunk.acted_on[key] for chunk in chunks])
        return self._joined([chunk.whole.next_observation[key] for chunk in chunks])

    def _joined(self, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return (parts[0] if len(parts) == 1 else np.concatenate(parts))[: self.steps]

    def acted_on(self) -> Arrays:
        """Return the observations acted on, ``[steps, num_envs, ...]``."""
        keys = [leaf.key for leaf in self.env.observation_leaves]
        return {key: self._observation("acted_on", key) for key in keys}

    def episodes(self, spans: Sequence[Span]) -> list[Episode]:
        """Return the episode columns of the batch."""
        rewards = self._whole("raw_reward" if self.env.needs_raw_reward else "reward")
        env_steps, terminated = self._whole("env_steps"), self._whole("terminated")
        infos = self.env.take_infos()
        return [
            Episode(
                env=span.env,
                episode_return=float(rewards[span.steps, span.env].sum(dtype=np.float64)),
                length=span.end - span.start,
                env_steps=int(env_steps[span.steps, span.env].sum()),
                terminated=bool(terminated[span.end - 1, span.env]),
                info=infos.get((span.end - 1, span.env), {}),
            )
            for span in spans
        ]

    def check_finite(self, name: str, spans: Sequence[Span]) -> None:
        """Refuse NaN, naming environment and step.

        Raises:
            EnvironmentFault: if an observation or reward of an episode is NaN.
        """
        arrays: dict[Any, NDArray[Any]] = {"reward": self._whole("reward")}
        for leaf in self.env.observation_leaves:
            arrays[leaf.key] = self._observation("next_observation", leaf.key)
        for what, values in arrays.items():
            if _first_nan(values) is None:  # most often; idle environments may hold NaN
                continue
            for span in spans:
                found = _first_nan(values[span.steps, span.env, None])
                if found is not None:
                    text = f"returned NaN as {what}, {found[0]} policy steps into its episode"
                    raise EnvironmentFault(name, span.env, text)

    def tensordict(
        self, spans: Sequence[Span], outputs: Tensors, layout: str, first: int
    ) -> TensorDictBase:
        """Return the episodes as a batch.

        Args:
            spans: where they are.
            outputs: of the policy, ``[num_envs, steps, ...]``.
            layout: ``padded`` or ``flat``.
            first: number of the first episode.
        """
        place = _Places(spans, layout)
        batch = TensorDict({}, place.numbers.shape)
        for leaf in self.env.observation_leaves:
            path: Any = leaf.key if isinstance(leaf.key, tuple) else (leaf.key,)
            for name, key in (("acted_on", path), ("next_observation", ("next", *path))):
                batch[key] = place.of(torch.from_numpy(self._observation(name, leaf.key)))
        for name in ("reward", "terminated", "truncated"):
            batch["next", name] = place.of(torch.from_numpy(self._whole(name))).unsqueeze(-1)
        batch["next", "done"] = batch["next", "terminated"] | batch["next", "truncated"]
        for key, value in outputs.items():
            batch[key] = place.of(value.transpose(0, 1))
        batch["collector", "traj_ids"] = place.numbers + first
        if place.mask is not None:
            batch["collector", "mask"] = place.mask
        return batch


class _Places:
    """Which step of which environment is where in a batch of episodes."""

    def __init__(self, spans: Sequence[Span], layout: str) -> None:
        lengths = torch.tensor([span.end - span.start for span in spans])
        starts = torch.tensor([span.start for span in spans])
        envs = torch.tensor([span.env for span in spans])
        offsets = torch.arange(int(lengths.max())).expand(len(spans), -1)
        mask = offsets < lengths.unsqueeze(-1)
        numbers = torch.arange(len(spans)).unsqueeze(-1).expand_as(mask)
        steps = torch.where(mask, starts.unsqueeze(-1) + offsets, 0)
        envs = envs.unsqueeze(-1).expand_as(mask)
        self.mask: Tensor | None = mask if layout == "padded" else None
        if self.mask is None:
            numbers, steps, envs = numbers[mask], steps[mask], envs[mask]
        self.numbers, self._steps, self._envs = numbers.clone(), steps, envs

    def of(self, values: Tensor) -> Tensor:
        """Pick from values ``[steps, num_envs, ...]``; zero in the padding."""
        device = values.device
        picked = values[self._steps.to(device), self._envs.to(device)]
        if self.mask is not None:
            picked[~self.mask.to(device)] = 0
        return picked


# ---------------------------------------------------------------------- arrays
def _aligned(count: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array ``[count, *shape]`` whose blocks lie as if each were an array of its own.

    At multiples of 16 bytes: elsewhere MKL's products of matrices round differently.
    """
    size = int(np.prod(shape))
    padded = -(-size * dtype.itemsize // 16) * 16 // dtype.itemsize
    return np.empty((count, padded), dtype)[:, :size].reshape(count, *shape)


def _view(array: NDArray[Any]) -> Tensor:
    """Return a tensor ``[batches, num_envs, steps, ...]`` of an array with steps before envs."""
    return torch.from_numpy(array).transpose(1, 2)


def _some(flags: Mask) -> bool:
    """Whether a flag is set; a tenth of the time of NumPy's ``any`` where there are few."""
    return b"\x01" in flags.tobytes()


def may_be_nan(values: NDArray[Any]) -> bool:
    """Whether an entry is NaN: then the product with itself is, which is a call of BLAS."""
    if values.dtype.kind != "f":
        return False
    product = np.vdot(values, values)
    return bool(product != product)


def _first_nan(values: NDArray[Any]) -> tuple[int, int] | None:
    """Step and environment of the first NaN in ``[steps, num_envs, ...]``, if there is one."""
    if not may_be_nan(values):
        return None
    found = np.argwhere(np.isnan(values))
    return (int(found[0][0]), int(found[0][1])) if len(found) else None
