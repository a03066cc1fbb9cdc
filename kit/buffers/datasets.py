"""Read datasets of complete episodes in Minari's format from local files."""

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

_loading_disabled: ContextVar[bool] = ContextVar("loading_disabled", default=False)


@contextlib.contextmanager
def without_dataset_loading() -> Iterator[None]:
    """Disable dataset loading while a trainer is built only to play its policy.

    Observation normalisation statistics then come from the run's checkpoint.
    """
    before = _loading_disabled.set(True)
    try:
        yield
    finally:
        _loading_disabled.reset(before)


def dataset_loading_disabled() -> bool:
    """Return whether :func:`without_dataset_loading` is active."""
    return _loading_disabled.get()


class DatasetMinibatches(ReplayMinibatches):
    """Samples minibatches from a dataset uniformly with replacement.

    Checkpoints store a checksum of the dataset instead of its contents.

    Args:
        transitions: Dataset ``[transitions]``. If ``None``, training is not possible.
        minibatch_size: Transitions per minibatch.
        normalizer: Normalises the observations with its statistics at the start of training. A run
            that starts from another run uses that run's statistics, which match its weights.
    """

    def __init__(
        self,
        transitions: TensorDictBase | None,
        minibatch_size: int | None,
        normalizer: Normalizer | None = None,
    ) -> None:
        self._normalizer = normalizer
        # The checksum is computed before the observations are normalised.
        self._checksum = 0 if transitions is None else _checksum(transitions)
        count = 1 if transitions is None else len(transitions)
        storage = LazyTensorStorage(count, device="auto", compilable=True)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=minibatch_size)
        if transitions is not None:
            buffer.extend(transitions)
        super().__init__(buffer)

    def epoch(self, plan: StepPlan, limit: int) -> Iterator[MinibatchGroup]:
        """Yield the minibatches of one epoch, grouped by gradient step."""
        if self._normalizer is not None:
            self._normalize(self._normalizer)
            self._normalizer = None
        return super().epoch(plan, limit)

    def _normalize(self, normalizer: Normalizer) -> None:
        rows = leaves(self._rows(slice(len(self.buffer))))
        for path, values in normalizer.minibatch(rows).items():
            rows[path].copy_(values)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of transitions and a checksum of their contents."""
        return {"transitions": len(self.buffer), "contents": self._checksum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the checkpoint's run was trained on this dataset.

        Raises:
            SettingError: If the transitions differ.
        """
        count = int(state_dict["transitions"])
        same = state_dict.get("contents", self._checksum) == self._checksum
        if count != len(self.buffer) or not same:
            reason = f"The run was trained on a different dataset, of {count} transitions"
            raise SettingError("dataset", "this one", reason, "Resume with the run's dataset")


def _checksum(transitions: TensorDictBase) -> int:
    """Return a CRC-32 checksum of all entries in the order of their names."""
    entries, checksum = transitions.flatten_keys("."), 0
    for name in sorted(entries.keys()):
        checksum = zlib.crc32(entries[name].cpu().contiguous().numpy(), checksum)
    return checksum


def folder_of(name: str) -> Path:
    """Return a dataset's folder: ``name``, or Minari's local folder if it is ``minari:ID``."""
    prefix, _, dataset_id = name.partition(":")
    if prefix != "minari" or not dataset_id:
        return Path(name)
    root = os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets"
    return Path(root) / dataset_id


def read_datasets(names: Sequence[str]) -> TensorDict:
    """Read and concatenate datasets in Minari's format.

    Args:
        names: Folders of the datasets, or ``minari:ID``; see :func:`folder_of`.

    Returns:
        ``[transitions]`` with TorchRL's keys: ``observation``, ``action`` and, under ``next``,
        ``observation``, ``reward``, ``terminated``, ``truncated``, ``done``. Floats are converted
        to float32. Integers are converted to int64, except for uint8. An episode without an end
        flag is marked as truncated at its last transition.

    Raises:
        SettingError: If ``names`` is empty, a folder contains no dataset, observations or actions
            are not a single array, an episode lacks its last observation or does not have exactly
            one reward per action, a value is not finite, or ``minari`` is not installed.
    """
    if not names:
        raise SettingError("dataset", "", "No dataset is given", "Record a dataset with kit record")
    return torch.cat([_read(folder_of(name)) for name in names])


def _read(folder: Path) -> TensorDict:
    check_metadata(folder)
    episodes: list[TensorDict] = []
    minari = import_minari("dataset", str(folder))
    for episode in minari.MinariDataset(folder / "data").iterate_episodes():
        arrays = (episode.observations, episode.actions)
        if not all(isinstance(array, np.ndarray) for array in arrays):
            reason = "Observations and actions must be single arrays"
            raise SettingError("dataset", str(folder), reason, "Flatten them into arrays")
        _check_lengths(folder, episode)
        observation, action = map(_tensor, arrays)
        terminated = torch.tensor(episode.terminations, dtype=torch.bool).unsqueeze(-1)
        truncated = torch.tensor(episode.truncations, dtype=torch.bool).unsqueeze(-1)
        truncated[-1:] |= ~terminated[-1:]  # Minari also stores episodes without an end flag
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
            reason = f"The dataset contains {name}s that are NaN or infinite in float32"
            raise SettingError("dataset", str(folder), reason, "Remove these episodes")
    return joined


def _check_lengths(folder: Path, episode: Any) -> None:
    """Raise an error if an episode lacks its last observation or a reward for an action."""
    steps = len(episode.actions)
    expected = dict.fromkeys(("rewards", "terminations", "truncations"), (steps,))
    expected["observations"] = (steps + 1, *episode.observations.shape[1:])
    for name, shape in expected.items():
        if (found := np.shape(getattr(episode, name))) != shape:
            reason = f"Episode {episode.id} has {steps} actions, but {name} of shape {[*found]}"
            raise SettingError("dataset", str(folder), reason, f"Use the shape {[*shape]}")


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    """Convert floats to float32 and integers to int64, but leave uint8 unchanged."""
    if array.dtype.kind == "f":
        return torch.as_tensor(array, dtype=torch.float32)
    if array.dtype == np.uint8:  # as int64, images would need eight times as much memory
        return torch.as_tensor(array)
    return torch.as_tensor(array.astype(np.int64))


def cast_to_env_specs(rows: TensorDictBase, env: VectorEnv) -> TensorDictBase:
    """Convert transitions to the dtypes and bounds of the environment's specs.

    Discrete values are shifted to start at 0. Actions are clipped to their bounds.

    Args:
        rows: Dataset ``[transitions]`` of this environment; modified in place.
        env: Environment whose specs are used.
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
    """Reject a dataset without stored spaces.

    Minari would build the environment to obtain missing spaces, which may import a module that the
    dataset names.
    """
    hint = "Use a folder written by kit record or Minari"
    try:
        metadata = json.loads((folder / "data" / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        reason = "The folder contains no readable dataset"
        raise SettingError("dataset", str(folder), reason, hint) from None
    for name in ("observation_space", "action_space"):
        if not isinstance(metadata, dict) or not isinstance(metadata.get(name), str):
            reason = f"The metadata lack {name}, so Minari would build the environment to obtain it"
            raise SettingError("dataset", str(folder), reason, hint)


def import_minari(field: str, value: str, *others: str) -> Any:
    """Import Minari.

    Args:
        field: Setting that requires Minari, named in the error.
        value: Value of the setting.
        *others: Additional packages to import.

    Raises:
        SettingError: If a package is missing.
    """
    try:
        for name in ("minari", "minari.data_collector", *others):
            importlib.import_module(name)
        return importlib.import_module("minari")
    except ImportError as error:
        reason = f"A required package is missing ({error.name or error})"
        raise SettingError(field, value, reason, "Run pip install 'torchrl-kit[offline]'") from None
