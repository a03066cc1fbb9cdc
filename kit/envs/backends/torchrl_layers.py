"""What a TorchRL environment consists of: transforms, and what is below them; the state of both."""

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
    """Yield all transforms of an environment in this process, one by one, the outermost last.

    Those of a ``SerialEnv`` that has not been reset are not made yet.
    """
    if isinstance(env, TransformedEnv):
        yield from transforms_of(env.base_env)
        yield from _one_by_one(env.transform)
    elif isinstance(env, SerialEnv) and not env.is_closed:
        for inner in env._envs:
            yield from transforms_of(inner)


def _one_by_one(transform: Transform) -> Iterator[Transform]:
    if isinstance(transform, Compose):  # whose state leaves out some of its transforms'
        for inner in transform:
            yield from _one_by_one(inner)
    else:
        yield transform


def frame_skip_of(env: EnvBase) -> int:
    """Env steps of one policy step: the product of all frame skips.

    Of a batch of environments one more is made to find out.

    Raises:
        SettingError: if actions are held above an environment of the kit, whose episodes begin
            anew within a step.
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
            why = "would step past the end of an episode, into the next one"
            works = "give make_env(..., action_repeat=...) below in its place"
            raise SettingError("FrameSkipTransform", held, why, works)
        return 1
    if not getattr(type(below), "_has_frame_skip", False):  # GymEnv has, for one
        return held
    return held * int(below.frame_skip)


# ---------------------------------------------------------------------- transforms
class Normalization:
    """What observations are normalised by in environments of TorchRL, which a policy acts by.

    The state of ``VecNorm``, ``VecNormV2`` and ``ObservationNorm``, running or fixed, and of
    transforms that are not TorchRL's; other ones of TorchRL begin anew with an episode, or hold
    settings. Of environments in other processes it is all that their transforms hold.

    Args:
        envs: environments by name, which may share statistics.
    """

    def __init__(self, envs: Mapping[str, EnvBase]) -> None:
        self.envs = envs

    def state_dict(self) -> dict[str, Any]:
        """The states of each environment's transforms; none of those that have not begun."""
        found = {name: self._of(env) for name, env in self.envs.items()}
        return {n: [copied(part.state_dict()) for part in parts] for n, parts in found.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`, in place; environments that it needs begin.

        Raises:
            SettingError: if it is of other transforms, or of another number of environments.
        """
        works = "make the same environments with the same transforms"
        for name, env in self.envs.items():
            states = state_dict.get(name) or []
            if len(self._of(env)) < len(states):
                env.reset()  # which makes those of SerialEnv and ParallelEnv
            parts = self._of(env) if states else []
            present = [part.state_dict() for part in parts]
            if len(parts) != len(states) or not all(map(_fits, present, states)):
                names = [type(part).__name__ for part in parts]
                raise SettingError("transforms", names, "have other statistics than saved", works)
            for part, own, state in zip(parts, present, states):
                part.load_state_dict(filled(own, state))

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
    """The normalisation of what steps environments that may have transforms of TorchRL."""
    envs = {name: getattr(part, "env", None) for name, part in parts.items()}
    for name, env in envs.items():
        envs[name] = getattr(env.backend, "env", env) if isinstance(env, VectorEnv) else env
    kinds = (TransformedEnv, BatchedEnvBase)
    found = {name: env for name, env in envs.items() if isinstance(env, kinds)}
    return {"transforms": Normalization(found)} if found else {}


def copied(value: Any) -> Any:
    """A state with tensors of its own, without an entry of ``Hash`` that it cannot load."""
    if isinstance(value, dict):
        return {name: copied(inner) for name, inner in value.items() if name != "_repertoire"}
    return value.clone() if isinstance(value, Tensor) else value


def _fits(present: Any, saved: Any) -> bool:
    """Whether tensors that both states have are of the same shape."""
    if isinstance(present, dict) and isinstance(saved, dict):
        return all(_fits(present[name], saved[name]) for name in present.keys() & saved.keys())
    both = isinstance(present, Tensor) and isinstance(saved, Tensor) and not is_lazy(present)
    return not both or present.shape == saved.shape


def filled(present: Any, saved: Any) -> Any:
    """A saved state in the tensors of the present one."""
    if isinstance(saved, dict):
        now = present if isinstance(present, dict) else {}
        return {name: filled(now.get(name), inner) for name, inner in saved.items()}
    if not isinstance(saved, Tensor):
        return saved
    fits = isinstance(present, Tensor) and present.shape == saved.shape
    return present.copy_(saved) if fits else saved.clone()


def processes_of(env: EnvBase) -> list[ParallelEnv]:
    """Environments in other processes, where there are any."""
    below = base_env_of(env)
    return [below] if isinstance(below, ParallelEnv) and not below.is_closed else []


# ---------------------------------------------------------------------- below transforms
def base_env_of(env: Any) -> Any:
    """The environment below all transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def state_below(env: EnvBase) -> dict[str, Any]:
    """The states of what is stepped below the transforms, and what ``SerialEnv`` has seen of it.

    Raises:
        StateCaptureError: if it is neither Gymnasium's, in this process, nor the kit's.
    """
    parts, serial = [_state_of(part) for part in _below(env)], _serial(env)
    shown = [plain_entries(one.shared_tensordict_parent) for one in serial]
    return {"parts": parts, "shown": shown}


def load_state_below(env: EnvBase, state: dict[str, Any]) -> None:
    """Restore a state of :func:`state_below`.

    Raises:
        StateCaptureError: if an environment has nothing of that kind where an object was.
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
    """Return the environments of Gymnasium or of the kit that ``env`` steps in this process."""
    below = base_env_of(env)
    if isinstance(below, VectorEnv):
        return [below]
    if isinstance(below, SerialEnv):
        return [one for inner in below._envs for one in _below(inner)]
    if isinstance(below, GymWrapper):
        return [below._env]
    raise StateCaptureError(f"{type(below).__name__} does not give the state of its environments")


def seed_spaces_below(env: EnvBase, seed: int) -> None:
    """Seed the spaces of Gymnasium's environments in this process, which TorchRL does not."""
    with contextlib.suppress(StateCaptureError):  # there are others, too
        for number, part in enumerate(_below(env)):
            if not isinstance(part, VectorEnv):  # which has seeded them
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
    """Copies of all entries by name."""
    return {text_of(key): value.clone() for key, value in tensordict.items(True, True)}


def from_entries(entries: dict[str, Tensor], env: EnvBase) -> TensorDictBase:
    """The TensorDict of :func:`plain_entries`, with the batch size and the device of ``env``."""
    nested = {tuple(name.split("/")): value for name, value in entries.items()}
    return TensorDict(nested, env.batch_size, device=env.device)


def text_of(key: Key) -> str:
    """A key as one text."""
    return key if isinstance(key, str) else "/".join(key)
