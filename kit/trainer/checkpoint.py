"""Saving and resuming, on ``torchrl.checkpoint``: atomic, with checksums, free of code."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import tempfile
import textwrap
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchrl import checkpoint as torchrl_checkpoint
from torchrl.objectives import LossModule

from kit.collectors.base import KitCollector
from kit.envs.backends.torchrl_layers import base_env_of
from kit.envs.normalize import Normalizer
from kit.envs.vector_env import VectorEnv
from kit.hooks.annealing import scales_of
from kit.hooks.base import Hook
from kit.logging.files import WriteError
from kit.steps import SettingError
from kit.trainer.chunked_state import StateFile

__all__ = [
    "NORMALIZATION",
    "Checkpoints",
    "CorruptCheckpointError",
    "PolicyState",
    "WriteError",
    "make_parts_when_loaded",
    "normalization_of",
    "normalizer_of",
    "stateful_parts",
]  # fmt: skip

_Read = TypeVar("_Read")
_SUMS = "checksums.txt"
_KEPT = 2  # checkpoints of a run
_BLOCK = 1 << 20  # bytes that are read at a time


class CorruptCheckpointError(SettingError):
    """Files of a checkpoint are not those that were written."""


class Checkpoints:
    """The newest checkpoints of one run, each a folder that is written atomically.

    A checkpoint is rejected before anything is read from it if one of its files has changed, is
    missing or was added. Loading executes no code: PyTorch's restricted unpickler reads tensors and
    plain values.

    Args:
        folder: of the checkpoints.
        parts: objects with ``state_dict`` and ``load_state_dict``, by name.
        keep: number of checkpoints that are kept.
        last: checkpoint that was written or read last. The next one links to its unchanged pieces
            of large tensors, such as rows of a replay buffer.
    """

    def __init__(
        self, folder: Path, parts: Mapping[str, Any], keep: int = _KEPT, last: Path | None = None
    ) -> None:
        self.folder, self.keep = Path(folder), keep
        self.left_out: list[str] = []
        self._checkpoint = torchrl_checkpoint.Checkpoint(format="directory")
        self._last = last
        for name, part in parts.items():
            self._checkpoint.register(name, part, adapter=StateFile(lambda: self._last, name))

    def save(self, steps: int, metadata: Mapping[str, Any]) -> Path:
        """Write a checkpoint, and remove older ones and those of later steps.

        Args:
            steps: policy steps of the run (offline: gradient steps), which name the checkpoint.
            metadata: plain values for its manifest.

        Raises:
            WriteError: if it could not be written; earlier ones are untouched.
            SettingError: if a part has a state that could not be read back.
        """
        path = self.folder / f"{_PREFIX}{steps:012d}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_hidden(self.folder)
            with tempfile.TemporaryDirectory(prefix=_HIDDEN, dir=self.folder) as scratch:
                made = self._checkpoint.save(Path(scratch) / "new", metadata=dict(metadata))
                _write_checksums(made)
                if path.exists():
                    path.rename(Path(scratch) / "before")
                made.rename(path)
                kept = [other for other in saved_in(self.folder) if other <= path][-self.keep :]
                for number, other in enumerate(set(saved_in(self.folder)).difference(kept)):
                    other.rename(Path(scratch) / str(number))
        except (OSError, RuntimeError) as error:
            reason = _why_not_written(error)
            if reason is None:
                raise
            before = [other.name for other in saved_in(self.folder)]
            newest = f"the newest one is {before[-1]}" if before else "there is none yet"
            why = f"{reason}; earlier checkpoints are untouched, {newest}"
            raise WriteError(f"{path.name} was not written to {self.folder}: {why}") from error
        self._last = path
        return path

    def load(
        self, path: Path, *, whole: bool = False, needed: Collection[str] = ()
    ) -> dict[str, Any]:
        """Restore every part from ``path`` and return the metadata of the checkpoint.

        Args:
            path: of the checkpoint.
            whole: whether every state in it has to be loaded; of hooks, a warning is enough.
            needed: names of states that have to be loaded if the checkpoint has them.

        Raises:
            Damaged: if its files are not those that were written.
            SettingError: if it cannot be read, does not fit the parts, or has others.
        """
        _check_named(path)
        check_whole(path)
        try:
            result = self._checkpoint.load(path)
        except Exception as error:
            if isinstance(error.__cause__, (WriteError, SettingError)):
                raise error.__cause__ from None  # of a part, which says what is wrong
            works = "build the trainer as it was built when this was written"
            why = f"cannot be loaded: {_cause_of(error)}"
            if missing := sorted(getattr(getattr(error, "result", None), "missing", ())):
                why = f"has no state of {', '.join(missing)}"
            raise SettingError("checkpoint", str(path), why, works) from error
        self.left_out = sorted(result.unrequested)
        _check_left_out(path, [name for name in self.left_out if whole or name in needed])
        return dict(result.manifest.get("metadata", {}))

    @staticmethod
    def latest(folder: Path) -> Path | None:
        """Return the newest undamaged checkpoint in ``folder``; warn of newer, damaged ones.

        Raises:
            Damaged: if all are damaged.
            SettingError: if files cannot be read.
        """
        damages: list[CorruptCheckpointError] = []
        for path in reversed(saved_in(folder)):
            try:
                check_whole(path)
            except SettingError as error:
                if not path.exists():  # the run has replaced it by a newer one
                    return Checkpoints.latest(folder)
                if not isinstance(error, CorruptCheckpointError):
                    raise
                damages.append(error)
                continue
            for newer in damages:
                text = f"{Path(newer.value).name} {newer.why}; {path.name} is used in its place"
                warnings.warn(text, stacklevel=2)
            return path
        if damages:
            raise damages[0]
        return None

    @staticmethod
    def read_latest(folder: Path, read: Callable[[Path], _Read]) -> _Read | None:
        """Return what ``read`` returns for the newest undamaged checkpoint, if there is one.

        ``read`` is called again if a run in progress has replaced that checkpoint by a newer one.

        Raises:
            SettingError: if none can be read.
        """
        while (path := Checkpoints.latest(folder)) is not None:
            try:
                return read(path)
            except SettingError:
                if path.exists():
                    raise
        return None

    @staticmethod
    def tidy(folder: Path, last: Path | None) -> None:
        """Remove what a killed run has left in ``folder``, and all but the newest up to ``last``.

        Later checkpoints stay until the next one is saved.
        """
        for older in [path for path in saved_in(folder) if last and path <= last][:-_KEPT]:
            older.rename(folder / f".{older.name}")
        _remove_hidden(folder)


def _cause_of(error: BaseException) -> str:
    """Describe the first of a chain of exceptions, with the part of the checkpoint."""
    part = re.search(r"component '([^']+)'", str(error))
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier  # the exceptions around it print whole networks
    reason = textwrap.shorten(str(error).split(". ")[0], 200, placeholder=" ...")
    return f"{f'{part[1]}: ' if part else ''}{type(error).__name__}: {reason}"


def _check_named(path: Path) -> None:
    """Refuse what is no checkpoint, so that a run folder is not taken for a damaged one."""
    with _readable(path):
        if (path.name.startswith(_PREFIX) and path.is_dir()) or (path / _SUMS).exists():
            return
    found = [*saved_in(path.parent), *saved_in(path), *saved_in(path / "checkpoints")][-1:]
    works = [str(one) for one in found] or f"give a folder {_PREFIX}... of a run's checkpoints"
    raise SettingError("checkpoint", str(path), "is no checkpoint, or was dropped since", works)


def _check_left_out(path: Path, names: list[str]) -> None:
    """Refuse to leave out states of a checkpoint; of hooks, say so."""
    for name in names:
        if not name.startswith(_HOOK):
            why = f"has a state of {name}, and the trainer has no such part"
            works = "build the trainer as it was built when this was written"
            raise SettingError("checkpoint", str(path), why, works)
        hook = name.removeprefix(_HOOK)
        why = "its state in the checkpoint is left out, and so is what it would do"
        unless = "unless it is added before the run goes on"
        warnings.warn(f"this trainer has no hook {hook}: {why}, {unless}", stacklevel=5)


_HOOK = "hook "
NORMALIZATION = frozenset({"normalization", "transforms"})
"""Parts without which a policy acts on other observations than it was trained with."""
_PREFIX = "checkpoint-"


_HIDDEN = f".{_PREFIX}"


def _remove_hidden(folder: Path) -> None:
    """Remove checkpoints that a kill has left half-written or half-removed, and nothing else."""
    for left_over in folder.glob(f"{_HIDDEN}*"):
        shutil.rmtree(left_over, ignore_errors=True)  # which follows no links


def saved_in(folder: Path) -> list[Path]:
    """The checkpoints in ``folder``, the newest last."""
    with _readable(folder):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
    found = (folder / name for name in names if name.startswith(_PREFIX))
    return sorted(p for p in found if p.is_dir() and p.name.removeprefix(_PREFIX).isdigit())


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Tell files that the system does not let us read from damaged ones."""
    try:
        yield
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
        works = f"make {error.filename or path} readable, and try again"
        raise SettingError("checkpoint", str(path), why, works) from error


# ---------------------------------------------------------------------- checksums
def _write_checksums(folder: Path) -> None:
    """Write the checksums of all files in ``folder``, and last that of their list."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != _SUMS)
    lines = [f"{_checksum(file)} {file.relative_to(folder).as_posix()}" for file in files]
    (folder / _SUMS).write_text(_sealed(lines), encoding="utf-8")


def _sealed(lines: list[str]) -> str:
    text = "".join(f"{line}\n" for line in lines)
    return f"{text}{zlib.crc32(text.encode()):08x}\n"


def check_whole(path: Path) -> None:
    """Raise ``CorruptCheckpointError`` if a file of a checkpoint differs, is missing, or was added."""
    with _readable(path):
        try:
            text = (path / _SUMS).read_bytes().decode(errors="replace")
        except FileNotFoundError:
            text = ""
        *lines, _ = text.splitlines() or [""]
        if not lines or _sealed(lines) != text:
            raise _damaged(path, _SUMS, "is damaged or missing")
        sums = {name: checksum for checksum, _, name in (line.partition(" ") for line in lines)}
        for entry in sorted(path.rglob("*")):
            name = entry.relative_to(path).as_posix()
            if entry.is_symlink() or not (entry.is_dir() or name in sums or name == _SUMS):
                raise _damaged(path, name, "was not written with it")
        for name, checksum in sums.items():
            there = (path / name).is_file()
            if not there or _checksum(path / name) != checksum:
                raise _damaged(path, name, "is not as it was written" if there else "is missing")


def _damaged(path: Path, name: str, what: str) -> CorruptCheckpointError:
    works = "use another checkpoint, or begin a new run; this folder can be removed"
    return CorruptCheckpointError(
        "checkpoint", str(path), f"is damaged: its file {name} {what}", works
    )


def _checksum(file: Path) -> str:
    """CRC-32 of a file: notices every change within 32 bits of each other, faster than hashes."""
    checksum, block = 0, memoryview(bytearray(_BLOCK))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(block):  # type: ignore[attr-defined, unused-ignore]
            checksum = zlib.crc32(block[:count], checksum)
    return f"{checksum:08x}"


# ---------------------------------------------------------------------- what cannot be written
def _why_not_written(error: BaseException) -> str | None:
    """The reason that the system gave; ``None`` if it is no error of writing."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    writers = ("inline_container", "PytorchStreamWriter", "Parent directory")
    if not any(writer in str(error) for writer in writers):
        return None
    # PyTorch says that it could not write, but not why.
    before = error.__context__
    return _why_not_written(before) if isinstance(before, OSError) else "is the disk full?"


def stateful_parts(
    parts: Mapping[str, Any], collector: Any, evaluate: Any, hooks: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the components of a trainer with a state that a resumed run needs, by name.

    Args:
        parts: of the trainer, with and without state.
        collector: its normalisation and policies have states of their own.
        evaluate: its normalisation counts where there is no collector.
        hooks: registered modules; those without a state may differ in a resumed run.
    """
    found = {name: part for name, part in parts.items() if hasattr(part, "load_state_dict")}
    found |= normalization_of(collector, evaluate)
    found["policies"] = PolicyState(collector, evaluate, parts["loss_module"])
    for name, hook in hooks.items():
        stateless = getattr(type(hook), "state_dict", None) is Hook.state_dict and not hook.saved
        if hasattr(hook, "load_state_dict") and not stateless:
            found[f"{_HOOK}{name}"] = hook
    return found


def make_parts_when_loaded(loss_module: Any) -> None:
    """Have losses create the parts that they otherwise create in their first call.

    PyTorch would reject the states of a value estimator, a target entropy or lazy layers.
    """
    modules = loss_module.modules() if isinstance(loss_module, nn.Module) else ()
    for one in (module for module in modules if isinstance(module, LossModule)):
        one.register_load_state_dict_pre_hook(_make_parts)


def _make_parts(loss: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if any(name.startswith(f"{prefix}_value_estimator.") for name in state_dict):
        _ = loss.value_estimator  # makes it
    elif loss._value_estimator is not None:  # which older checkpoints of actor-critics do not have
        for name, value in loss._value_estimator.state_dict().items():
            state_dict.setdefault(f"{prefix}_value_estimator.{name}", value)
    if f"{prefix}target_entropy_buffer" in state_dict:
        _ = loss.target_entropy
    for name, one in itertools.chain(loss.named_parameters(), loss.named_buffers()):
        if is_lazy(one) and f"{prefix}{name}" in state_dict:
            one.materialize(state_dict[f"{prefix}{name}"].shape)
    for name in _views_of_parameters(loss):  # PyTorch cannot write to them
        state_dict.pop(f"{prefix}{name}", None)


def _views_of_parameters(loss: Any) -> list[str]:
    """Return names of buffers that repeat a parameter (``separate_losses=True``)."""
    trained = {one.data_ptr() for one in loss.parameters() if not is_lazy(one)}
    named = [(name, one) for name, one in loss.named_buffers() if not is_lazy(one)]
    return [name for name, one in named if one.data_ptr() in trained and 0 in one.stride()]


class PolicyState:
    """State of the policies of collector and evaluator that is not in the loss module.

    ``with_noise`` includes epsilon and other scales that a run changes.
    """

    def __init__(
        self, collector: Any, evaluate: Any, loss_module: Any, *, with_noise: bool = True
    ) -> None:
        given = [getattr(collector, name, None) for name in ("policy", "exploration_policy")]
        given.append(getattr(evaluate, "policy", None))
        own = {id(policy): policy for policy in given if isinstance(policy, nn.Module)}
        self._policies = nn.ModuleList(own.values())
        self._loss_module = loss_module if isinstance(loss_module, nn.Module) else nn.Module()
        named = self._policies.named_modules()
        noise = () if with_noise else [f"{name}." for name, module in named if scales_of(module)]
        self._left_out = tuple(noise)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and extra states, by number of the policy and name."""
        of_loss = itertools.chain(self._loss_module.parameters(), self._loss_module.buffers())
        trained, own = set(map(_memory, of_loss)), self._policies.state_dict()
        left = {name: value for name, value in own.items() if _memory(value) not in trained}
        return {name: value for name, value in left.items() if not name.startswith(self._left_out)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`, in place."""
        own = {name: state_dict[name] for name in self.state_dict()}
        self._policies.load_state_dict(own, strict=False)


def _memory(value: Any) -> Any:
    known = isinstance(value, Tensor) and not is_lazy(value)
    return (value.data_ptr(), value.shape) if known else id(value)


def normalization_of(collector: Any, evaluate: Any) -> dict[str, Any]:
    """Return the running normalisation of training, offline that of the evaluation."""
    normalizer = normalizer_of(evaluate if collector is None else collector)
    return {} if normalizer is None else {"normalization": normalizer}


def normalizer_of(part: Any) -> Normalizer | None:
    """The running normalisation of what a collector or an evaluator steps, below transforms too."""
    if isinstance(part, KitCollector):
        return part.normalizer
    # TorchRL's ask those that they consist of for what they lack, and closed ones do not end.
    env = base_env_of(getattr(part, "env", None))
    return env.normalizer if isinstance(env, VectorEnv) else None
