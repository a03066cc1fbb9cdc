"""Atomic, checksummed checkpoints based on ``torchrl.checkpoint``. Loading runs no code."""

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchrl import checkpoint as torchrl_checkpoint
from torchrl.objectives import LossModule

from kit.collectors.base import KitCollector
from kit.distributed import Ranks
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
_KEPT = 2  # number of checkpoints kept per run
_BLOCK = 1 << 20  # bytes read per block
SHARED = frozenset({"loss_module", "update", "optimizer", "advantage"})
"""Names of the parts that are the same on all ranks, so that only rank 0 writes them."""


class CorruptCheckpointError(SettingError):
    """Raised when checkpoint files have changed since they were written."""


class Checkpoints:
    """Newest checkpoints of a run, each in a folder that is written atomically.

    A checkpoint is not loaded if any of its files were changed, removed or added. Loading executes
    no code, because PyTorch's restricted unpickler reads only tensors and plain values.

    Args:
        folder: folder that contains the checkpoints.
        parts: objects with ``state_dict`` and ``load_state_dict``, keyed by name.
        keep: number of checkpoints to keep.
        last: checkpoint that was written or loaded last. The next checkpoint hard-links unchanged
            pieces of large tensors, such as replay buffer rows, from this checkpoint.
        ranks: processes that train together; ``None``: only this process. Rank 0 writes all of its
            parts. Every other rank writes the parts that are not in :data:`SHARED` to a subfolder.
    """

    def __init__(
        self,
        folder: Path,
        parts: Mapping[str, Any],
        keep: int = _KEPT,
        last: Path | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.folder, self.keep, self.ranks = Path(folder), keep, ranks or Ranks()
        self.left_out: list[str] = []
        self._parts = dict(parts)
        self._last = last
        own = [name for name in parts if self.ranks.is_first or name not in SHARED]
        self._checkpoint = self._of(own)

    def _of(self, names: Iterable[str]) -> Any:
        """Return TorchRL's checkpoint of some of the parts."""
        checkpoint = torchrl_checkpoint.Checkpoint(format="directory")

        def last() -> Path | None:
            return None if self._last is None else self._own(self._last)

        for name in names:
            checkpoint.register(name, self._parts[name], adapter=StateFile(last, name))
        return checkpoint

    def _own(self, path: Path) -> Path:
        """Return the folder for this rank's parts in a checkpoint."""
        return path if self.ranks.is_first else path / f"rank-{self.ranks.rank:05d}"

    def save(self, steps: int, metadata: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then remove later checkpoints and all but the newest ``keep``.

        Args:
            steps: number of policy steps (offline: gradient steps) so far, used in the folder name.
            metadata: plain values to store in the checkpoint's manifest.

        Raises:
            WriteError: if the checkpoint cannot be written. Earlier checkpoints are left unchanged.
            SettingError: if a component has state that could not be loaded again.
        """
        path = self.folder / f"{_PREFIX}{steps:012d}"
        metadata = dict(metadata)
        try:
            with self._scratch() as scratch:
                written = Path(scratch) / "new"
                if self.ranks.is_first:
                    self._checkpoint.save(written, metadata=metadata)
                self.ranks.wait("saving rank 0")
                if not self.ranks.is_first:
                    self._checkpoint.save(self._own(written), metadata=metadata)
                self.ranks.wait("saving")
                if self.ranks.is_first:
                    self._publish(written, path)
                self.ranks.wait("saved")
        except (OSError, RuntimeError) as error:
            reason = _why_not_written(error)
            if reason is None:
                raise
            before = [other.name for other in saved_in(self.folder)]
            newest = (
                f"Earlier checkpoints are unchanged; the newest checkpoint is {before[-1]}"
                if before
                else "There is no earlier checkpoint"
            )
            what = f"{path.name} was not written to {self.folder}: {reason}"
            raise WriteError(f"{what}. {newest}.") from error
        self._last = path
        return path

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[str]:
        """Yield the temporary folder of rank 0 on all ranks; rank 0 removes it."""
        if not self.ranks.is_first:
            yield str(self.ranks.gather_objects(None, "scratch")[0])
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        _remove_hidden(self.folder)
        with tempfile.TemporaryDirectory(prefix=_HIDDEN, dir=self.folder) as scratch:
            self.ranks.gather_objects(scratch, "scratch")
            yield scratch

    def _publish(self, written: Path, path: Path) -> None:
        """Rename a complete checkpoint to its final name, and remove older ones."""
        _write_checksums(written)
        if path.exists():
            path.rename(written.with_name("before"))
        written.rename(path)
        kept = [other for other in saved_in(self.folder) if other <= path][-self.keep :]
        for number, other in enumerate(set(saved_in(self.folder)).difference(kept)):
            other.rename(written.with_name(str(number)))

    def load(
        self, path: Path, *, whole: bool = False, needed: Collection[str] = ()
    ) -> dict[str, Any]:
        """Restore all components from a checkpoint and return its metadata.

        Args:
            path: folder of the checkpoint.
            whole: whether to reject a checkpoint that has state for a missing component. State for
                a missing hook only causes a warning.
            needed: names of states that must be loaded if the checkpoint contains them.

        Raises:
            CorruptCheckpointError: if files have changed since the checkpoint was written.
            SettingError: if the checkpoint cannot be read or does not match the components.
        """
        _check_named(path)
        check_whole(path)
        try:
            result = self._checkpoint.load(self._own(path))
            if not self.ranks.is_first:
                self._of([name for name in self._parts if name in SHARED]).load(path)
        except Exception as error:
            if isinstance(error.__cause__, (WriteError, SettingError)):
                raise error.__cause__ from None  # the component's error is more specific
            hint = "build the trainer as in the run that wrote the checkpoint"
            reason = f"cannot be loaded: {_cause_of(error)}"
            if missing := sorted(getattr(getattr(error, "result", None), "missing", ())):
                reason = f"has no state for {', '.join(missing)}"
            raise SettingError("checkpoint", str(path), reason, hint) from error
        self.left_out = sorted(result.unrequested)
        _check_left_out(path, [name for name in self.left_out if whole or name in needed])
        return dict(result.manifest.get("metadata", {}))

    @staticmethod
    def latest(folder: Path) -> Path | None:
        """Return the newest intact checkpoint in ``folder``, and warn about newer corrupt ones.

        Raises:
            CorruptCheckpointError: if all checkpoints are corrupt.
            SettingError: if files cannot be read.
        """
        corrupt: list[CorruptCheckpointError] = []
        for path in reversed(saved_in(folder)):
            try:
                check_whole(path)
            except SettingError as error:
                if not path.exists():  # a running trainer replaced the checkpoint
                    return Checkpoints.latest(folder)
                if not isinstance(error, CorruptCheckpointError):
                    raise
                corrupt.append(error)
                continue
            for newer in corrupt:
                text = f"{Path(newer.value).name} {newer.why}; using {path.name} instead"
                warnings.warn(text, stacklevel=2)
            return path
        if corrupt:
            raise corrupt[0]
        return None

    @staticmethod
    def read_latest(folder: Path, read: Callable[[Path], _Read]) -> _Read | None:
        """Return ``read(path)`` for the newest intact checkpoint, or ``None`` if there is none.

        ``read`` is called again if a running trainer replaces the checkpoint in the meantime.

        Raises:
            SettingError: if no checkpoint can be read.
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
        """Remove a killed run's temporary files, and old checkpoints that exceed the number kept.

        Checkpoints later than ``last`` are removed when the next checkpoint is saved.
        """
        for older in [path for path in saved_in(folder) if last and path <= last][:-_KEPT]:
            older.rename(folder / f".{older.name}")
        _remove_hidden(folder)


def _cause_of(error: BaseException) -> str:
    """Describe the root cause of an exception and name the affected component."""
    part = re.search(r"component '([^']+)'", str(error))
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier  # messages of outer exceptions contain whole networks
    reason = textwrap.shorten(str(error).split(". ")[0], 200, placeholder=" ...")
    return f"{f'{part[1]}: ' if part else ''}{type(error).__name__}: {reason}"


def _check_named(path: Path) -> None:
    """Raise an error if ``path`` is not a checkpoint folder, for example if it is a run folder."""
    with _readable(path):
        if (path.name.startswith(_PREFIX) and path.is_dir()) or (path / _SUMS).exists():
            return
    found = [*saved_in(path.parent), *saved_in(path), *saved_in(path / "checkpoints")][-1:]
    hint = [str(one) for one in found] or f"pass one of a run's {_PREFIX}... folders"
    raise SettingError("checkpoint", str(path), "is not a checkpoint or was removed", hint)


def _check_left_out(path: Path, names: list[str]) -> None:
    """Raise an error for state without a matching component. For a missing hook, only warn."""
    for name in names:
        if not name.startswith(_HOOK):
            reason = f"has state for {name}, but the trainer has no such component"
            hint = "build the trainer as in the run that wrote the checkpoint"
            raise SettingError("checkpoint", str(path), reason, hint)
        hook = name.removeprefix(_HOOK)
        missing = f"this trainer has no hook {hook}, so its state in the checkpoint is not loaded"
        hint = "Add the hook before the run continues."
        warnings.warn(f"{missing}. {hint}", stacklevel=5)


_HOOK = "hook "
NORMALIZATION = frozenset({"normalization", "transforms"})
"""Names of the components that normalise or transform a policy's observations."""
_PREFIX = "checkpoint-"


_HIDDEN = f".{_PREFIX}"


def _remove_hidden(folder: Path) -> None:
    """Remove partly written or partly removed checkpoints left by a killed run."""
    for left_over in folder.glob(f"{_HIDDEN}*"):
        shutil.rmtree(left_over, ignore_errors=True)  # does not follow symbolic links


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, from oldest to newest."""
    with _readable(folder):
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
    found = (folder / name for name in names if name.startswith(_PREFIX))
    return sorted(p for p in found if p.is_dir() and p.name.removeprefix(_PREFIX).isdigit())


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert ``OSError`` to ``SettingError``. A checkpoint that cannot be read may be intact."""
    try:
        yield
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        hint = f"make {error.filename or path} readable and try again"
        raise SettingError("checkpoint", str(path), reason, hint) from error


# ---------------------------------------------------------------------- checksums
def _write_checksums(folder: Path) -> None:
    """Write the checksums of all files in ``folder``, followed by a checksum of this list."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != _SUMS)
    lines = [f"{_checksum(file)} {file.relative_to(folder).as_posix()}" for file in files]
    (folder / _SUMS).write_text(_sealed(lines), encoding="utf-8")


def _sealed(lines: list[str]) -> str:
    text = "".join(f"{line}\n" for line in lines)
    return f"{text}{zlib.crc32(text.encode()):08x}\n"


def check_whole(path: Path) -> None:
    """Raise ``CorruptCheckpointError`` if a checkpoint file was changed, removed or added."""
    with _readable(path):
        try:
            text = (path / _SUMS).read_bytes().decode(errors="replace")
        except FileNotFoundError:
            text = ""
        *lines, _ = text.splitlines() or [""]
        if not lines or _sealed(lines) != text:
            raise _corrupt(path, _SUMS, "is damaged or missing")
        sums = {name: checksum for checksum, _, name in (line.partition(" ") for line in lines)}
        for entry in sorted(path.rglob("*")):
            name = entry.relative_to(path).as_posix()
            if entry.is_symlink() or not (entry.is_dir() or name in sums or name == _SUMS):
                raise _corrupt(path, name, "was added later")
        for name, checksum in sums.items():
            exists = (path / name).is_file()
            if not exists or _checksum(path / name) != checksum:
                raise _corrupt(path, name, "has changed" if exists else "is missing")


def _corrupt(path: Path, name: str, what: str) -> CorruptCheckpointError:
    reason = f"is damaged: its file {name} {what}"
    hint = "use another checkpoint or start a new run; this folder can be removed"
    return CorruptCheckpointError("checkpoint", str(path), reason, hint)


def _checksum(file: Path) -> str:
    """Return a file's CRC-32, which is faster than a hash and detects short error bursts."""
    checksum, block = 0, memoryview(bytearray(_BLOCK))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(block):  # type: ignore[attr-defined, unused-ignore]
            checksum = zlib.crc32(block[:count], checksum)
    return f"{checksum:08x}"


# ---------------------------------------------------------------------- write errors
def _why_not_written(error: BaseException) -> str | None:
    """Return the operating system's reason for a write error, or ``None`` for other errors."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    writers = ("inline_container", "PytorchStreamWriter", "Parent directory")
    if not any(writer in str(error) for writer in writers):
        return None
    # PyTorch reports that writing failed, but not why.
    before = error.__context__
    return _why_not_written(before) if isinstance(before, OSError) else "is the disk full?"


def stateful_parts(
    parts: Mapping[str, Any], collector: Any, evaluate: Any, hooks: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the trainer components whose state a resumed run needs, keyed by name.

    Args:
        parts: components of the trainer, with or without state.
        collector: collector whose policies and normalisation statistics are included.
        evaluate: evaluator whose policy is included. Its normalisation statistics are included if
            there is no collector.
        hooks: registered modules. Modules without state are omitted.
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
    """Register hooks that create a loss's lazy parts before the loss's state is loaded.

    Otherwise, PyTorch would reject the state of value estimators, target entropies or lazy layers.
    """
    modules = loss_module.modules() if isinstance(loss_module, nn.Module) else ()
    for loss in (module for module in modules if isinstance(module, LossModule)):
        loss.register_load_state_dict_pre_hook(_make_parts)


def _make_parts(loss: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if any(name.startswith(f"{prefix}_value_estimator.") for name in state_dict):
        _ = loss.value_estimator  # creates the estimator
    elif loss._value_estimator is not None:  # missing from older checkpoints
        for name, value in loss._value_estimator.state_dict().items():
            state_dict.setdefault(f"{prefix}_value_estimator.{name}", value)
    if f"{prefix}target_entropy_buffer" in state_dict:
        _ = loss.target_entropy
    for name, one in itertools.chain(loss.named_parameters(), loss.named_buffers()):
        if is_lazy(one) and f"{prefix}{name}" in state_dict:
            one.materialize(state_dict[f"{prefix}{name}"].shape)
    for name in _views_of_parameters(loss):  # PyTorch cannot write to these views
        state_dict.pop(f"{prefix}{name}", None)


def _views_of_parameters(loss: Any) -> list[str]:
    """Return the names of buffers that are views of parameters (``separate_losses=True``)."""
    trained = {one.data_ptr() for one in loss.parameters() if not is_lazy(one)}
    named = [(name, one) for name, one in loss.named_buffers() if not is_lazy(one)]
    return [name for name, one in named if one.data_ptr() in trained and 0 in one.stride()]


class PolicyState:
    """State of the collector's and evaluator's policies, except for state in the loss module.

    Exploration noise scales, such as epsilon, are included if ``with_noise`` is true.
    """

    def __init__(
        self, collector: Any, evaluate: Any, loss_module: Any, *, with_noise: bool = True
    ) -> None:
        policies = [getattr(collector, name, None) for name in ("policy", "exploration_policy")]
        policies.append(getattr(evaluate, "policy", None))
        unique = {id(policy): policy for policy in policies if isinstance(policy, nn.Module)}
        self._policies = nn.ModuleList(unique.values())
        self._loss_module = loss_module if isinstance(loss_module, nn.Module) else nn.Module()
        named = self._policies.named_modules()
        noise = () if with_noise else [f"{name}." for name, module in named if scales_of(module)]
        self._left_out = tuple(noise)

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and extra states, keyed by policy index and state name."""
        of_loss = itertools.chain(self._loss_module.parameters(), self._loss_module.buffers())
        trained, state = set(map(_memory, of_loss)), self._policies.state_dict()
        rest = {name: value for name, value in state.items() if _memory(value) not in trained}
        return {name: value for name, value in rest.items() if not name.startswith(self._left_out)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        state = {name: state_dict[name] for name in self.state_dict()}
        self._policies.load_state_dict(state, strict=False)


def _memory(value: Any) -> Any:
    has_memory = isinstance(value, Tensor) and not is_lazy(value)
    return (value.data_ptr(), value.shape) if has_memory else id(value)


def normalization_of(collector: Any, evaluate: Any) -> dict[str, Any]:
    """Return the normaliser of the collector or, if there is none, of the evaluator."""
    normalizer = normalizer_of(evaluate if collector is None else collector)
    return {} if normalizer is None else {"normalization": normalizer}


def normalizer_of(part: Any) -> Normalizer | None:
    """Return the normaliser of a collector's or evaluator's environments, wrapped or not."""
    if isinstance(part, KitCollector):
        return part.normalizer
    # Reading an unknown attribute of a closed TorchRL environment would recurse endlessly.
    env = base_env_of(getattr(part, "env", None))
    return env.normalizer if isinstance(env, VectorEnv) else None
