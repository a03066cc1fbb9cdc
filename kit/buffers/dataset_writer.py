"""Write complete episodes to a dataset in Minari's format."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec, WrapperSpec
from numpy.typing import NDArray
from tensordict import TensorDictBase

from kit.buffers.datasets import import_minari
from kit.envs.backends.serial import SerialBackend
from kit.envs.single_env import ActionRepeat
from kit.envs.spaces import ActionConverter, Leaf
from kit.envs.state import layers
from kit.envs.vector_env import VectorEnv
from kit.steps import SettingError


class DatasetWriter:
    """Writes the episodes of an environment to a dataset atomically.

    Unsupported environments raise an error in the constructor, before any step is taken. Use the
    writer as a context manager and call :meth:`write` once.

    Args:
        folder: Dataset folder; its name is the dataset's name.
        env: Environment of the episodes; its spec and spaces are stored as metadata.

    Raises:
        SettingError: If the folder exists, Minari does not allow its name, the environment's spec
            cannot be stored, its observations or actions are not a single array, or a package is
            missing.
    """

    def __init__(self, folder: Path, env: VectorEnv) -> None:
        self.folder, self.env = folder, env
        _check_folder(folder)
        self._observation_leaf = _only_array(env, env.observation_leaves, "observations")
        self._action_leaf = _only_array(env, env.action_leaves, "actions")
        self._spec = _env_spec(env)
        self._minari = import_minari("to", str(folder), "h5py")

    def __enter__(self) -> DatasetWriter:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.TemporaryDirectory(prefix=".", dir=self.folder.parent)
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def write(self, transitions: TensorDictBase, algorithm: str) -> int:
        """Write all complete episodes of one environment and return their number.

        Args:
            transitions: Transitions ``[steps]`` in time order. Steps after the last episode end are
                omitted.
            algorithm: Name of the algorithm that trained the policy, written to the metadata.
        """
        ends = transitions["next", "done"].squeeze(-1).nonzero().squeeze(-1).tolist()
        firsts = [0, *(end + 1 for end in ends)]
        episodes = [
            self._episode(number, transitions[first : last + 1])
            for number, (first, last) in enumerate(zip(firsts, ends))
        ]
        self._create(episodes, algorithm)
        (Path(self._scratch.name) / self.folder.name).rename(self.folder)
        return len(episodes)

    def _episode(self, number: int, rows: TensorDictBase) -> Any:
        """Return a Minari episode with values as the environment returned them."""
        seen = torch.cat([rows["observation"], rows["next", "observation"][-1:]]).numpy()
        converted = ActionConverter(
            self._action_leaf.space, [self._action_leaf], 1
        )  # also clips actions
        flags = {name: rows["next", name].squeeze(-1) for name in ("terminated", "truncated")}
        return self._minari.data_collector.EpisodeBuffer(
            id=number,
            observations=_to_env_values(seen, self._observation_leaf),
            actions=converted({"action": rows["action"].numpy()}),
            rewards=rows["next", "reward"].squeeze(-1).numpy(),
            terminations=flags["terminated"].numpy(),
            truncations=(flags["truncated"] & ~flags["terminated"]).numpy(),
        )

    def _create(self, episodes: list[Any], algorithm: str) -> None:
        create = self._minari.create_dataset_from_buffers
        # JPEG is lossy and does not support every image shape.
        exact = {"jpeg_encoding": False}
        leaves = (("observation", self._observation_leaf), ("action", self._action_leaf))
        spaces = {f"{name}_space": leaf.space for name, leaf in leaves}
        with _minari_in(self._scratch.name), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Minari warns about missing author metadata
            name = self.folder.name
            dataset = create(name, episodes, algorithm_name=algorithm, **spaces, **exact)
            if self._spec is not None:  # if given a spec, create() would build the environment
                text = self._spec.to_json()
                dataset.storage.update_metadata({"env_spec": text, "eval_env_spec": text})


@contextlib.contextmanager
def _minari_in(folder: str) -> Iterator[None]:
    name = "MINARI_DATASETS_PATH"
    before = os.environ.get(name)
    os.environ[name] = str(Path(folder).resolve())
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _to_env_values(stored: NDArray[Any], leaf: Leaf) -> NDArray[Any]:
    """Convert stored observations back to the environment's dtype and offset."""
    assert leaf.space is not None
    values = stored.astype(leaf.space.dtype)
    return values if leaf.start is None else np.asarray(values + leaf.start)


# ---------------------------------------------------------------------- checks
def _check_folder(folder: Path) -> None:
    if not re.fullmatch(r"[-\w]+-v\d+", folder.name):
        words = re.sub(r"[^-\w]+", "-", folder.name).strip("-") or "dataset"
        reason = (
            "Minari dataset names must consist of letters, digits, - and _, and end in a version"
        )
        raise SettingError("to", str(folder), reason, [str(folder.parent / f"{words}-v0")])
    if folder.exists() or folder.is_symlink():
        raise SettingError("to", str(folder), "The folder already exists", "Use another folder")


def _only_array(env: VectorEnv, leaves: list[Leaf], kind: str) -> Leaf:
    leaf, *more = leaves
    if more or leaf.path or leaf.space is None:
        reason = f"Datasets require {kind} to be a single array, but they have several parts"
        raise SettingError(
            "env.id", env.name, reason, f"Use an environment with single-array {kind}"
        )
    return leaf


def _env_spec(env: VectorEnv) -> EnvSpec | None:
    """Return the EnvSpec for Minari's metadata; ``None`` if it is not a Gymnasium environment."""
    if not isinstance(env.backend, SerialBackend):
        return None
    one = env.backend.envs[0]
    spec: EnvSpec | None = one.spec
    if spec is None:
        return None
    spec = _with_importable_entry_point(spec)
    repeats = [layer.repeat for layer in layers(one) if isinstance(layer, ActionRepeat)]
    if repeats:
        spec = _with_repeat(spec, repeats[0], isinstance(one, gym.wrappers.TimeLimit))
    try:
        EnvSpec.from_json(spec.to_json())
    except (TypeError, ValueError) as error:
        reason = f"The environment's spec cannot be written as JSON: {error}".rstrip(".")
        hint = "Register the environment with entry_point='module:Class' and plain arguments"
        raise SettingError("env.id", env.name, reason, hint) from None
    return spec


def _with_importable_entry_point(spec: EnvSpec) -> EnvSpec:
    """Return the spec with a ``module:name`` entry point, if the original is importable."""
    make = spec.entry_point
    name = getattr(make, "__qualname__", "<")
    if isinstance(make, str) or "<" in name or make.__module__ == "__main__":
        return spec
    return dataclasses.replace(spec, entry_point=f"{make.__module__}:{name}")


def _with_repeat(spec: EnvSpec, repeat: int, limited: bool) -> EnvSpec:
    """Return the spec with the action repeat added and the time limit given in env steps."""

    def with_arguments(wrapper: WrapperSpec) -> WrapperSpec:
        is_repeat = wrapper.name == ActionRepeat.__name__
        return dataclasses.replace(wrapper, kwargs={"repeat": repeat}) if is_repeat else wrapper

    changed: EnvSpec = dataclasses.replace(spec)
    changed.additional_wrappers = tuple(map(with_arguments, spec.additional_wrappers))
    if limited and spec.max_episode_steps is not None:
        changed.max_episode_steps = spec.max_episode_steps * repeat
    return changed
