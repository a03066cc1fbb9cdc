"""Writing whole episodes as a data set, in Minari's format."""

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
    """Writes the episodes of an environment as a data set, which is there completely or not at all.

    What it cannot write is refused when it is made, before anything is played. It is a context, in
    which :meth:`write` is called once.

    Args:
        folder: of the data set; its name is the data set's.
        env: environment that is played: its spaces, its arguments and its time limit are part of
            the metadata.

    Raises:
        SettingError: if the folder exists or has a name that Minari does not take, the environment
            cannot be described, its observations or actions are not one array, or a package is
            missing.
    """

    def __init__(self, folder: Path, env: VectorEnv) -> None:
        self.folder, self.env = folder, env
        _check_folder(folder)
        self._seen = _only_array(env, env.observation_leaves, "observations")
        self._acted = _only_array(env, env.action_leaves, "actions")
        self._spec = _described(env)
        self._minari = import_minari("to", str(folder), "h5py")

    def __enter__(self) -> DatasetWriter:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.TemporaryDirectory(prefix=".", dir=self.folder.parent)
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def write(self, transitions: TensorDictBase, algorithm: str) -> int:
        """Write the whole episodes of one environment; return their number.

        Args:
            transitions: ``[steps]``, in the order of time; steps after the last end are left out.
            algorithm: that made the policy, part of the metadata.
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
        """An episode in Minari's words, with the numbers that the environment itself has."""
        seen = torch.cat([rows["observation"], rows["next", "observation"][-1:]]).numpy()
        converted = ActionConverter(self._acted.space, [self._acted], 1)  # clips, too
        flags = {name: rows["next", name].squeeze(-1) for name in ("terminated", "truncated")}
        return self._minari.data_collector.EpisodeBuffer(
            id=number,
            observations=_as_seen(seen, self._seen),
            actions=converted({"action": rows["action"].numpy()}),
            rewards=rows["next", "reward"].squeeze(-1).numpy(),
            terminations=flags["terminated"].numpy(),
            truncations=(flags["truncated"] & ~flags["terminated"]).numpy(),
        )

    def _create(self, episodes: list[Any], algorithm: str) -> None:
        create = self._minari.create_dataset_from_buffers
        # Pictures would be kept as JPEG, which changes them, and refuses some of them.
        exact = {"jpeg_encoding": False}
        spaces = {"observation_space": self._seen.space, "action_space": self._acted.space}
        with _minari_in(self._scratch.name), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an author and an address that are not given
            name = self.folder.name
            made = create(name, episodes, algorithm_name=algorithm, **spaces, **exact)
            if self._spec is not None:  # given before, Minari would make the environment
                text = self._spec.to_json()
                made.storage.update_metadata({"env_spec": text, "eval_env_spec": text})


@contextlib.contextmanager
def _minari_in(folder: str) -> Iterator[None]:
    """Have Minari write to a folder."""
    name = "MINARI_DATASETS_PATH"
    before = os.environ.get(name)
    os.environ[name] = str(Path(folder).resolve())
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _as_seen(stored: NDArray[Any], leaf: Leaf) -> NDArray[Any]:
    """Observations of the kit as the environment itself gives them."""
    assert leaf.space is not None
    values = stored.astype(leaf.space.dtype)
    return values if leaf.start is None else np.asarray(values + leaf.start)


# ---------------------------------------------------------------------- what is refused
def _check_folder(folder: Path) -> None:
    if not re.fullmatch(r"[-\w]+-v\d+", folder.name):
        words = re.sub(r"[^-\w]+", "-", folder.name).strip("-") or "dataset"
        why = "has a name that Minari does not take: letters, digits, - and _, and a version"
        raise SettingError("to", str(folder), why, [str(folder.parent / f"{words}-v0")])
    if folder.exists() or folder.is_symlink():
        raise SettingError("to", str(folder), "exists already", "name another folder")


def _only_array(env: VectorEnv, leaves: list[Leaf], what: str) -> Leaf:
    leaf, *more = leaves
    if more or leaf.path or leaf.space is None:
        why = f"has {what} that are not one array, and a data set of the kit holds only such"
        raise SettingError("env.id", env.name, why, f"train in one whose {what} are one array")
    return leaf


def _described(env: VectorEnv) -> EnvSpec | None:
    """What Minari needs to make the environment again; ``None`` where it is none of Gymnasium's."""
    if not isinstance(env.backend, SerialBackend):
        return None
    one = env.backend.envs[0]
    spec: EnvSpec | None = one.spec
    if spec is None:
        return None
    spec = _by_name(spec)
    repeats = [layer.repeat for layer in layers(one) if isinstance(layer, ActionRepeat)]
    if repeats:
        spec = _with_repeat(spec, repeats[0], isinstance(one, gym.wrappers.TimeLimit))
    try:
        EnvSpec.from_json(spec.to_json())
    except (TypeError, ValueError) as error:
        why = f"cannot be named in the metadata of a data set: {error}".rstrip(".")
        works = "register it with entry_point='module:Class' and arguments of plain values"
        raise SettingError("env.id", env.name, why, works) from None
    return spec


def _by_name(spec: EnvSpec) -> EnvSpec:
    """The entry with what makes the environment by its name, if it can be imported by it."""
    make = spec.entry_point
    name = getattr(make, "__qualname__", "<")
    if isinstance(make, str) or "<" in name or make.__module__ == "__main__":
        return spec
    return dataclasses.replace(spec, entry_point=f"{make.__module__}:{name}")


def _with_repeat(spec: EnvSpec, repeat: int, limited: bool) -> EnvSpec:
    """The entry with the arguments of the action repeat, its limit in env steps as Gymnasium's."""

    def known(wrapper: WrapperSpec) -> WrapperSpec:
        ours = wrapper.name == ActionRepeat.__name__
        return dataclasses.replace(wrapper, kwargs={"repeat": repeat}) if ours else wrapper

    changed: EnvSpec = dataclasses.replace(spec)
    changed.additional_wrappers = tuple(map(known, spec.additional_wrappers))
    if limited and spec.max_episode_steps is not None:
        changed.max_episode_steps = spec.max_episode_steps * repeat
    return changed
