"""Access the transforms and base environments of TorchRL environments, and their state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchrl.envs import (
    Compose,
    EnvBase,
    FrameSkipTransform,
    GymWrapper,
    ObservationNorm,
    ParallelEnv,
    SerialEnv,
    Transform,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from torchrl.envs.batched_envs import BatchedEnvBase

from kit.envs.backends.base import derived_seed
from kit.envs.plain_values import StateCaptureError
from kit.envs.single_env import seed_spaces
from kit.envs.spaces import Key
from kit.envs.state import capture, restore
from kit.envs.vector_env import VectorEnv
from kit.steps.errors import SettingError


def transforms_of(env: EnvBase) -> Iterator[Transform]:
    """Yield all transforms of an environment in this process, innermost first.

    A ``SerialEnv`` creates its transforms on its first reset, so none are found before that.
    """
    if isinstance(env, TransformedEnv):
        yield from transforms_of(env.base_env)
        yield from _one_by_one(env.transform)
    elif isinstance(env, SerialEnv) and not env.is_closed:
        for inner in env._envs:
            yield from transforms_of(inner)


def _one_by_one(transform: Transform) -> Iterator[Transform]:
    if isinstance(transform, Compose):  # Compose's own state_dict is incomplete
        for inner in transform:
            yield from _one_by_one(inner)
    else:
        yield transform


def frame_skip_of(env: EnvBase) -> int:
    """Return the number of env steps per policy step, the product of all frame skips.

    For a batched environment, a temporary environment is created to determine its frame skip.

    Raises:
        SettingError: if a frame skip wraps a VectorEnv, because a VectorEnv resets within a step.
    """
    below = base_env_of(env)
    above = _one_by_one(env.transform) if isinstance(env, TransformedEnv) else ()
    held: int = math.prod(one.frame_skip for one in above if isinstance(one, FrameSkipTransform))
    if isinstance(below, BatchedEnvBase):
        made = below.create_env_fn[0](**below.create_env_kwargs[0])
        try:
            return held * frame_skip_of(made)
        finally:
            made.close(raise_if_closed=False)
    if isinstance(below, VectorEnv):
        if held > 1:
            reason = "FrameSkipTransform would continue into the next episode of a VectorEnv"
            hint = "Use make_env(..., action_repeat=...) instead"
            raise SettingError("FrameSkipTransform", held, reason, hint)
        return 1
    if not getattr(type(below), "_has_frame_skip", False):  # true for GymEnv
        return held
    return held * int(below.frame_skip)


# ---------------------------------------------------------------------- transforms
class Normalization:
    """Normalisation statistics from TorchRL transforms, saved with the policies that need them.

    Includes the state of ``VecNorm``, ``VecNormV2``, ``ObservationNorm`` and custom transforms.
    TorchRL's other transforms are reset in each episode or only store settings. For environments in
    other processes, the state of all transforms is included.

    Args:
        envs: dict of environments, which may share statistics.
    """

    def __init__(self, envs: Mapping[str, EnvBase]) -> None:
        self.envs = envs

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each environment's transforms, if they have been created."""
        found = {name: self._of(env) for name, env in self.envs.items()}
        return {n: [copied(part.state_dict()) for part in parts] for n, parts in found.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict` in place. May reset environments.

        Raises:
            SettingError: if the transforms or the number of environments differ.
        """
        hint = "Create the same environments with the same transforms"
        for name, env in self.envs.items():
            states = state_dict.get(name) or []
            if len(self._of(env)) < len(states):
                env.reset()  # creates the environments of SerialEnv and ParallelEnv
            parts = self._of(env) if states else []
            present = [part.state_dict() for part in parts]
            if len(parts) != len(states) or not all(map(_fits, present, states)):
                names = [type(part).__name__ for part in parts]
                reason = "The saved state has statistics for different transforms"
                raise SettingError("transforms", names, reason, hint)
            for part, present_state, state in zip(parts, present, states):
                part.load_state_dict(filled(present_state, state))

    @staticmethod
    def _of(env: EnvBase) -> list[Any]:
        kinds = (VecNorm, VecNormV2, ObservationNorm)
        found = [
            one
            for one in transforms_of(env)
            if isinstance(one, kinds) or not type(one).__module__.startswith("torchrl.")
        ]
        return [*found, *processes_of(env)]


def normalization_of_transforms(**parts: Any) -> dict[str, Normalization]:
    """Return one :class:`Normalization` for the TorchRL transforms of all environments, if any."""
    envs = {name: getattr(part, "env", None) for name, part in parts.items()}
    for name, env in envs.items():
        envs[name] = getattr(env.backend, "env", env) if isinstance(env, VectorEnv) else env
    kinds = (TransformedEnv, BatchedEnvBase)
    found = {name: env for name, env in envs.items() if isinstance(env, kinds)}
    return {"transforms": Normalization(found)} if found else {}


def copied(value: Any) -> Any:
    """Copy a state without the ``Hash`` transforms' repertoire, which TorchRL cannot load."""
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items() if name != "_repertoire"}
    return value.clone() if isinstance(value, Tensor) else value


def _fits(present: Any, saved: Any) -> bool:
    """Return whether all tensors that occur in both states have the same shape in both."""
    if isinstance(present, dict) and isinstance(saved, dict):
        return all(_fits(present[name], saved[name]) for name in present.keys() & saved.keys())
    both = isinstance(present, Tensor) and isinstance(saved, Tensor) and not is_lazy(present)
    return not both or present.shape == saved.shape


def filled(present: Any, saved: Any) -> Any:
    """Copy a saved state into the tensors of the current state where shapes match."""
    if isinstance(saved, dict):
        now = present if isinstance(present, dict) else {}
        return {name: filled(now.get(name), inner) for name, inner in saved.items()}
    if not isinstance(saved, Tensor):
        return saved
    fits = isinstance(present, Tensor) and present.shape == saved.shape
    return present.copy_(saved) if fits else saved.clone()


def processes_of(env: EnvBase) -> list[ParallelEnv]:
    """Return the ``ParallelEnv`` below the transforms as a list; empty if there is none."""
    below = base_env_of(env)
    return [below] if isinstance(below, ParallelEnv) and not below.is_closed else []


# ---------------------------------------------------------------------- below transforms
def base_env_of(env: Any) -> Any:
    """Return the environment below all transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def state_below(env: EnvBase) -> dict[str, Any]:
    """Return the states of environments below the transforms, and ``SerialEnv``'s shared data.

    Raises:
        StateCaptureError: if an environment is neither a VectorEnv nor a Gymnasium environment in
            this process.
    """
    parts, serial = [_state_of(part) for part in _below(env)], _serial(env)
    shown = [plain_entries(one.shared_tensordict_parent) for one in serial]
    return {"parts": parts, "shown": shown}


def load_state_below(env: EnvBase, state: dict[str, Any]) -> None:
    """Restore a state returned by :func:`state_below`.

    Raises:
        StateCaptureError: if an object in the environment and the saved object differ in type.
    """
    for part, saved in zip(_below(env), state["parts"], strict=True):
        if isinstance(part, VectorEnv):
            if not part.load_full_state(saved):
                raise StateCaptureError(part.not_resumable)
        else:
            restore(part, saved)
    for one, entries in zip(_serial(env), state["shown"], strict=True):
        one.shared_tensordict_parent.update_(from_entries(entries, one))


def _below(env: EnvBase) -> list[Any]:
    """Return the Gymnasium environments or VectorEnvs that ``env`` steps in this process."""
    below = base_env_of(env)
    if isinstance(below, VectorEnv):
        return [below]
    if isinstance(below, SerialEnv):
        return [one for inner in below._envs for one in _below(inner)]
    if isinstance(below, GymWrapper):
        return [below._env]
    raise StateCaptureError(f"{type(below).__name__} cannot capture the state of its environments")


def seed_spaces_below(env: EnvBase, seed: int) -> None:
    """Seed the spaces of Gymnasium environments in this process, because TorchRL does not."""
    with contextlib.suppress(StateCaptureError):  # other environments have no spaces to seed
        for number, part in enumerate(_below(env)):
            if not isinstance(part, VectorEnv):  # a VectorEnv seeds its own spaces
                seed_spaces(part, derived_seed(seed, number))


def _serial(env: EnvBase) -> list[SerialEnv]:
    below = base_env_of(env)
    if not isinstance(below, SerialEnv):
        return []
    return [below, *(one for inner in below._envs for one in _serial(inner))]


def _state_of(part: Any) -> Any:
    if not isinstance(part, VectorEnv):
        return capture(part)
    state = part.full_state()
    if state["envs"] is None:
        raise StateCaptureError(part.not_resumable)
    return state


# ---------------------------------------------------------------------- TensorDicts
def plain_entries(tensordict: TensorDictBase) -> dict[str, Tensor]:
    """Copy all entries of a TensorDict to a flat dict keyed by name."""
    return {text_of(key): value.clone() for key, value in tensordict.items(True, True)}


def from_entries(entries: dict[str, Tensor], env: EnvBase) -> TensorDictBase:
    """Convert a :func:`plain_entries` dict to a TensorDict with ``env``'s batch size and device."""
    nested = {tuple(name.split("/")): value for name, value in entries.items()}
    return TensorDict(nested, env.batch_size, device=env.device)


def text_of(key: Key) -> str:
    """Join the parts of a key with slashes."""
    return key if isinstance(key, str) else "/".join(key)
