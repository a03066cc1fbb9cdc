"""Data sets of whole episodes, in Minari's format, from local files."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from kit.buffers.batches import ReplayMinibatches
from kit.buffers.rollout_batches import MinibatchGroup
from kit.envs.normalize import Normalizer
from kit.envs.vector_env import VectorEnv
from kit.fast.nested import leaves
from kit.steps import SettingError, StepPlan

_left_unread: ContextVar[bool] = ContextVar("left_unread", default=False)


@contextlib.contextmanager
def without_dataset_loading() -> Iterator[None]:
    """Let what is built here have no data: a trainer whose policy is only played needs none.

    The statistics that normalise observations are in the checkpoint of its run.
    """
    before = _left_unread.set(True)
    try:
        yield
    finally:
        _left_unread.reset(before)


def dataset_loading_disabled() -> bool:
    """Whether data sets are not read: see :func:`without_dataset_loading`."""
    return _left_unread.get()


class DatasetMinibatches(ReplayMinibatches):
    """Minibatches of a data set, uniformly with replacement. Checkpoints do not hold the data.

    Args:
        transitions: ``[transitions]``; ``None``: there are none, and nothing can be trained.
        minibatch_size: transitions in a minibatch.
        normalizer: of the observations, with the statistics that it has when training begins: a
            run that starts from another one has those with which its weights were learnt.
    """

    def __init__(
        self,
        transitions: TensorDictBase | None,
        minibatch_size: int | None,
        normalizer: Normalizer | None = None,
    ) -> None:
        self._normalizer = normalizer
        # Of the observations as they are stored, whatever normalises them later.
        self._checksum = 0 if transitions is None else _checksum(transitions)
        count = 1 if transitions is None else len(transitions)
        storage = LazyTensorStorage(count, device="auto", compilable=True)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=minibatch_size)
        if transitions is not None:
            buffer.extend(transitions)
        super().__init__(buffer)

    def epoch(self, plan: StepPlan, limit: int) -> Iterator[MinibatchGroup]:
        """Yield a sample for each gradient step that is due; all of them are one epoch."""
        if self._normalizer is not None:
            self._normalize(self._normalizer)
            self._normalizer = None
        return super().epoch(plan, limit)

    def _normalize(self, normalizer: Normalizer) -> None:
        """Normalise the stored observations, in place."""
        rows = leaves(self._rows(slice(len(self.buffer))))
        for path, values in normalizer.minibatch(rows).items():
            rows[path].copy_(values)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of transitions, and a checksum of their contents."""
        return {"transitions": len(self.buffer), "contents": self._checksum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the data set is that of the run.

        Raises:
            SettingError: if it has another number of transitions, or others.
        """
        count = int(state_dict["transitions"])
        same = state_dict.get("contents", self._checksum) == self._checksum
        if count != len(self.buffer) or not same:
            why = f"has other transitions than the run's data set of {count}, or in another order"
            raise SettingError("dataset", "this one", why, "resume with the data set of the run")


def _checksum(transitions: TensorDictBase) -> int:
    """CRC-32 of all entries, in the order of their names and of their rows."""
    entries, checksum = transitions.flatten_keys("."), 0
    for name in sorted(entries.keys()):
        checksum = zlib.crc32(entries[name].cpu().contiguous().numpy(), checksum)
    return checksum


def folder_of(name: str) -> Path:
    """Return a data set's folder: ``name`` itself, or of ``minari:ID`` where Minari installs it."""
    prefix, _, dataset_id = name.partition(":")
    if prefix != "minari" or not dataset_id:
        return Path(name)
    root = os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets"
    return Path(root) / dataset_id


def read_datasets(names: Sequence[str]) -> TensorDict:
    """Read data sets in Minari's format and join them.

    Args:
        names: their folders, or their IDs as :func:`folder_of` takes them.

    Returns:
        ``[transitions]``, with TorchRL's names: ``observation``, ``action`` and, below ``next``,
        ``observation``, ``reward``, ``terminated``, ``truncated``, ``done``. Real numbers are
        float32, the type of a network; whole numbers are as they are stored. An episode that is
        not terminated is truncated after its last transition, also where no flag says so.

    Raises:
        SettingError: if there is none, a folder holds no data set, observations or actions are
            not one array, an episode is without its last observation or has not one reward for each
            action, a number is not finite, or ``minari`` is missing.
    """
    if not names:
        raise SettingError("dataset", "", "names no folder", "record one: python -m kit record")
    return torch.cat([_read(folder_of(name)) for name in names])


def _read(folder: Path) -> TensorDict:
    check_metadata(folder)
    episodes: list[TensorDict] = []
    minari = import_minari("dataset", str(folder))
    for episode in minari.MinariDataset(folder / "data").iterate_episodes():
        arrays = (episode.observations, episode.actions)
        if not all(isinstance(array, np.ndarray) for array in arrays):
            why = "has observations or actions that are not one array"
            raise SettingError("dataset", str(folder), why, "flatten them")
        _check_lengths(folder, episode)
        observation, action = map(_tensor, arrays)
        terminated = torch.tensor(episode.terminations, dtype=torch.bool).unsqueeze(-1)
        truncated = torch.tensor(episode.truncations, dtype=torch.bool).unsqueeze(-1)
        truncated[-1:] |= ~terminated[-1:]  # Minari writes episodes that no flag ends, too
        ends = {"terminated": terminated, "truncated": truncated}
        reward = torch.as_tensor(episode.rewards, dtype=torch.float32).unsqueeze(-1)
        done = terminated | truncated
        following = {"observation": observation[1:], "reward": reward, **ends, "done": done}
        rows = {"observation": observation[:-1], "action": action, "next": following}
        episodes.append(TensorDict(rows, [len(action)]))
    joined: TensorDict = torch.cat(episodes)
    for key, value in joined.items(True, True):
        if not value.isfinite().all():
            name = key if isinstance(key, str) else key[-1]
            why = f"has {name}s that are NaN or infinite in float32"
            raise SettingError("dataset", str(folder), why, "leave these episodes out")
    return joined


def _check_lengths(folder: Path, episode: Any) -> None:
    """Refuse an episode without its last observation, or not with one reward for each action."""
    steps = len(episode.actions)
    wanted = dict.fromkeys(("rewards", "terminations", "truncations"), (steps,))
    wanted["observations"] = (steps + 1, *episode.observations.shape[1:])
    for name, shape in wanted.items():
        if (found := np.shape(getattr(episode, name))) != shape:
            why = f"has {name} of shape {[*found]} in episode {episode.id} of {steps} actions"
            raise SettingError("dataset", str(folder), why, f"store them with shape {[*shape]}")


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """An array in a type of the kit's environments: of MuJoCo's, Minari has float64."""
    if array.dtype.kind == "f":
        return torch.as_tensor(array, dtype=torch.float32)
    if array.dtype == np.uint8:  # pictures, which would take eight times the memory
        return torch.as_tensor(array)
    return torch.as_tensor(array.astype(np.int64))


def cast_to_env_specs(rows: TensorDictBase, env: VectorEnv) -> TensorDictBase:
    """Bring transitions into the types of an environment of the kit.

    Choices are counted from 0; actions that rounding led beyond their bounds are these bounds.

    Args:
        rows: ``[transitions]`` of this environment, as a data set has them; changed in place.
        env: the environment.
    """
    parts = [(rows, "action", env.action_leaves[0])]
    parts += [(part, "observation", env.observation_leaves[0]) for part in (rows, rows["next"])]
    for part, key, leaf in parts:
        values, dtype = part[key], torch.from_numpy(np.zeros(0, leaf.dtype)).dtype
        if leaf.start is not None:
            values = values - torch.from_numpy(leaf.start)
        part.set(key, values.to(dtype))
    space = env.action_leaves[0].space
    if isinstance(space, gym.spaces.Box):
        low, high = map(torch.as_tensor, (space.low, space.high))
        rows["action"] = rows["action"].clamp(low, high).to(rows["action"].dtype)
    return rows


def check_metadata(folder: Path) -> None:
    """Refuse a data set whose spaces Minari would take from an environment that it names and makes.

    That could be a module from elsewhere, which a data set must not import.
    """
    works = "give a folder that python -m kit record or Minari has written"
    try:
        metadata = json.loads((folder / "data" / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise SettingError("dataset", str(folder), "is no folder of a data set", works) from None
    for name in ("observation_space", "action_space"):
        if not isinstance(metadata, dict) or not isinstance(metadata.get(name), str):
            why = f"does not say its {name}, for which Minari would make the environment"
            raise SettingError("dataset", str(folder), why, works)


def import_minari(field: str, value: str, *others: str) -> Any:
    """Import Minari.

    Args:
        field: setting that needs it, for the error.
        value: of the setting.
        *others: packages that are needed with it.

    Raises:
        SettingError: if one is missing.
    """
    try:
        for name in ("minari", "minari.data_collector", *others):
            importlib.import_module(name)
        return importlib.import_module("minari")
    except ImportError as error:
        why = f"needs a package that is missing ({error.name or error})"
        raise SettingError(field, value, why, "pip install 'torchrl-kit[offline]'") from None
