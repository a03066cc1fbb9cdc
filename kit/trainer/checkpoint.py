"""Saving and resuming, on ``torchrl.checkpoint``: atomic, rotated, free of code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchrl import checkpoint as torchrl_checkpoint

from kit.collectors.base import KitCollector
from kit.hooks.base import Hook
from kit.logging.files import NotSaved
from kit.steps import SettingError

__all__ = ["Checkpoints", "NotSaved", "normalization_of", "stateful_parts"]


class Checkpoints:
    """The checkpoints of one run: the newest few, each a folder that is complete or not there.

    Loading one executes no code from it: PyTorch reads the files with its restricted unpickler,
    which knows tensors and plain values only.

    Args:
        folder: where they are.
        parts: objects with ``state_dict`` and ``load_state_dict``, by name.
        keep: how many of the newest are kept.
        random_numbers: whether the state of the global random numbers is a part.
    """

    def __init__(
        self, folder: Path, parts: Mapping[str, Any], keep: int = 2, *, random_numbers: bool = True
    ) -> None:
        self.folder = folder
        self._rotation = torchrl_checkpoint.CheckpointRotation(folder, keep_last=keep)
        self._checkpoint = torchrl_checkpoint.Checkpoint(format="directory")
        adapter = torchrl_checkpoint.StateDictCheckpointAdapter(payload_format="torch")
        if random_numbers:
            parts = {**parts, "random_numbers": torchrl_checkpoint.GlobalRNGState()}
        for name, part in parts.items():
            self._checkpoint.register(name, part, adapter=adapter)

    def save(self, policy_steps: int, metadata: Mapping[str, Any]) -> Path:
        """Write a checkpoint and drop the oldest.

        Args:
            policy_steps: of the run, which name the checkpoint.
            metadata: kept in its manifest: plain values.

        Raises:
            NotSaved: if it could not be written; earlier ones are untouched.
        """
        try:
            saved = self._rotation.save(
                self._checkpoint, step=policy_steps, metadata=dict(metadata)
            )
            return Path(saved)
        except (OSError, RuntimeError) as error:
            reason = _why_not_written(error)
            if reason is None:
                raise
            latest = self.latest(self.folder)
            kept = f"the newest one is {latest.name}" if latest else "there is none yet"
            what = f"the checkpoint at {policy_steps} policy steps was not written to {self.folder}"
            why = f"{reason}; earlier checkpoints are untouched, {kept}"
            raise NotSaved(f"{what}: {why}") from error

    def load(self, path: Path) -> dict[str, Any]:
        """Restore every part from ``path`` and return the metadata of the checkpoint.

        Raises:
            SettingError: if it cannot be read or does not fit the parts.
        """
        try:
            result = self._checkpoint.load(path)
        except Exception as error:
            reason = " ".join(str(error).split(". ")[0].split())
            why = f"cannot be loaded: {type(error).__name__}: {reason}"
            works = "remove this folder to continue from the checkpoint before it, if there is one"
            raise SettingError("checkpoint", str(path), why, works) from error
        return dict(result.manifest.get("metadata", {}))

    @staticmethod
    def latest(folder: Path) -> Path | None:
        """The newest complete checkpoint in ``folder``, if there is one."""
        if not folder.is_dir():
            return None
        rotation = torchrl_checkpoint.CheckpointRotation(folder, keep_last=1)
        return rotation.latest()  # type: ignore[no-any-return]


def _why_not_written(error: BaseException) -> str | None:
    """The reason that the system gave; ``None`` if it is no error of writing."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if not any(writer in str(error) for writer in ("inline_container", "PytorchStreamWriter")):
        return None
    # PyTorch says that it could not write, but not why.
    before = error.__context__
    return _why_not_written(before) if isinstance(before, OSError) else "is the disk full?"


def stateful_parts(
    parts: Mapping[str, Any], collector: Any, hooks: Mapping[str, Any]
) -> dict[str, Any]:
    """The components of a trainer with a state that a resumed run needs, by name.

    Args:
        parts: of the trainer, with and without state.
        collector: whose normalisation and policies have states of their own.
        hooks: registered modules; those without a state, such as observers, may differ in a
            resumed run.
    """
    found = {name: part for name, part in parts.items() if hasattr(part, "load_state_dict")}
    found |= normalization_of(collector)
    policies = [getattr(collector, name, None) for name in _POLICIES]
    found["policies"] = PolicyState(policies, parts["loss_module"])
    for name, hook in hooks.items():
        stateless = getattr(type(hook), "state_dict", None) is Hook.state_dict
        if hasattr(hook, "load_state_dict") and not stateless:
            found[f"hook {name}"] = hook
    return found


_POLICIES = ("policy", "exploration_policy")


class PolicyState:
    """What policies hold besides the weights that a loss trains: epsilon and other noise scales.

    Args:
        policies: those that act; no modules are left out.
        loss_module: whose parameters and buffers are saved elsewhere.
    """

    def __init__(self, policies: Iterable[Any], loss_module: Any) -> None:
        self._policies = nn.ModuleList(p for p in policies if isinstance(p, nn.Module))
        self._loss_module = loss_module if isinstance(loss_module, nn.Module) else nn.Module()

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors, by number of the policy and name."""
        trained = set(map(_memory, self._loss_module.state_dict().values()))
        own = self._policies.state_dict().items()
        return {name: value for name, value in own if _memory(value) not in trained}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore a state of :meth:`state_dict`, in place."""
        with torch.no_grad():
            for name, value in self.state_dict().items():
                value.copy_(state_dict[name])


def _memory(value: Any) -> Any:
    known = isinstance(value, Tensor) and not is_lazy(value)
    return (value.data_ptr(), value.shape) if known else None


def normalization_of(collector: Any) -> dict[str, Any]:
    """The running normalisation of the environments; it can be loaded without the rest."""
    env = collector if isinstance(collector, KitCollector) else getattr(collector, "env", None)
    normalizer = getattr(env, "normalizer", None)
    return {} if normalizer is None else {"normalization": normalizer}
