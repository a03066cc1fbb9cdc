"""Checkpoints for runs and policies, and warnings about state that checkpoints cannot contain."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torchrl.collectors import MultiCollector
from torchrl.data import ReplayBufferEnsemble

from kit.buffers import ReplayMinibatches
from kit.collectors.asynchronous import AsyncCollector
from kit.collectors.plan_fit import Refusal
from kit.distributed import Ranks
from kit.hooks.policy import BestPolicy
from kit.steps import SettingError, StepLedger, StepPlan
from kit.trainer.checkpoint import NORMALIZATION, Checkpoints, saved_in
from kit.trainer.chunked_state import check_state

Parts = Callable[[], dict[str, Any]]
"""Function that returns objects with ``state_dict`` and ``load_state_dict``, keyed by name."""


class RunCheckpoints:
    """Writes and loads the checkpoints of a run.

    Args:
        parts: function that returns all objects whose state a resumed run needs.
        policy_parts: function that returns the objects whose state determines the policy's actions.
        ranks: processes that train together.

    Attributes:
        last: checkpoint that was written or loaded last, or ``None``.
        saved_at: number of completed iterations in the checkpoint ``last``.
    """

    def __init__(self, parts: Parts, policy_parts: Parts, ranks: Ranks) -> None:
        self._parts, self._policy_parts, self._ranks = parts, policy_parts, ranks
        self._writer: Checkpoints | None = None
        # States in the last checkpoint that belong to hooks not yet registered.
        self._left_out: Sequence[str] = ()
        self.last: Path | None = None
        self.saved_at = 0

    # ------------------------------------------------------------------ run checkpoints
    def save(self, folder: Path, steps: int, counters: Mapping[str, Any]) -> Path:
        """Write a checkpoint and return its path.

        Args:
            folder: folder for the run's checkpoints.
            steps: number of steps so far, used in the checkpoint's name.
            counters: counts from the ledger.

        Raises:
            WriteError: if the checkpoint cannot be written. Earlier checkpoints are left unchanged.
        """
        if self._writer is None:
            self._writer = Checkpoints(folder, self._parts(), last=self.last, ranks=self._ranks)
        self.last = self._writer.save(steps, {"counters": counters})
        self.saved_at, self._left_out = counters["iterations"], ()
        return self.last

    def load(self, path: Path) -> None:
        """Restore the state of all components of the run.

        Raises:
            SettingError: if the checkpoint does not match the components.
        """
        self.last = path
        check_ranks(path, self._ranks.size)
        checkpoints = Checkpoints(path.parent, self._parts(), ranks=self._ranks)
        counters = checkpoints.load(path, whole=True)["counters"]
        self._left_out, self.saved_at = checkpoints.left_out, int(counters["iterations"])

    def load_added(self, hooks: Iterable[str], iterations: int) -> None:
        """Restore hooks that are added after loading a checkpoint and before the run continues.

        Args:
            hooks: names of the added hooks.
            iterations: number of completed iterations.
        """
        found = {f"hook {name}" for name in hooks}.intersection(self._left_out)
        if not found or self.last is None or iterations != self.saved_at:
            return
        found |= {"update", "optimizer"}  # adding a scheduler overwrites the learning rate
        parts = {name: part for name, part in self._parts().items() if name in found}
        Checkpoints(self.last.parent, parts, ranks=self._ranks).load(self.last)

    def check_states(self) -> None:
        """Check that checkpoints can store the state of every component except the large ones.

        Raises:
            SettingError: for the first state that cannot be stored.
        """
        for name, part in self._parts().items():
            if name not in _LARGE:
                check_state(part, name)

    # ------------------------------------------------------------------ policy checkpoints
    def save_policy(self, folder: Path, steps: int, counters: Mapping[str, Any]) -> Path:
        """Write a checkpoint that contains only the last and the best policy."""
        parts = {**self._policy_parts(), **self._best_policies()}
        return Checkpoints(folder, parts, keep=1).save(steps, {"counters": counters})

    def load_policy(self, path: Path, best: bool = False) -> dict[str, int]:
        """Load weights and normalisation statistics, as described in ``Trainer.load_policy``."""
        if not best:
            checkpoints = Checkpoints(path.parent, self._policy_parts())
            counters = checkpoints.load(path, needed=NORMALIZATION)["counters"]
            return {name: int(counters[name]) for name in ("policy_steps", "gradient_steps")}
        best_policies = self._best_policies()
        if not best_policies:
            hint = "omit best, or train with keep_best=true"
            raise SettingError("best", True, "needs a best policy, but this run kept none", hint)
        Checkpoints(path.parent, best_policies).load(path)
        hook = next(iter(best_policies.values()))
        hook.restore()
        return {"policy_steps": hook.policy_steps, "gradient_steps": hook.gradient_steps}

    def _best_policies(self) -> dict[str, BestPolicy]:
        parts = self._parts().items()
        return {name: part for name, part in parts if isinstance(part, BestPolicy)}


def check_ranks(path: Path, size: int) -> None:
    """Raise SettingError if a checkpoint was written by another number of ranks."""
    written = 1 + len([*path.glob("rank-*")])
    if written != size:
        reason = f"was written by {written} processes, but {size} run"
        hint = f"start it with torchrun --nproc-per-node {written}"
        hint = hint if written > 1 else "start it without torchrun"
        raise SettingError("checkpoint", str(path), reason, hint)


def warn_of_lost_environments(reason: str) -> None:
    """Warn that a resumed run will not be bit-exact, unless ``reason`` is empty."""
    if reason:
        what = "Checkpoints do not contain the state of the environments"
        then = "A resumed run ends their open episodes and is not bit-exact."
        warnings.warn(f"{what}: {reason}. {then}", stacklevel=3)


def warn_of_lost_optimizers(hooks: Iterable[Any], saved: Iterable[Any]) -> None:
    """Warn about hooks with an optimiser that is missing from checkpoints.

    Args:
        hooks: registered hook objects.
        saved: optimisers whose state is saved in checkpoints.
    """
    saved_ids = {id(optimizer) for optimizer in saved}
    for hook in hooks:
        used = [value for value in vars(hook).values() if isinstance(value, Optimizer)]
        if any(id(optimizer) not in saved_ids for optimizer in used) and not hook.state_dict():
            name = type(hook).__name__
            what = f"Hook {name} has an optimiser, but its state_dict() is empty"
            then = "A resumed run resets the optimiser and is not bit-exact."
            warnings.warn(f"{what}. {then}", stacklevel=3)


_LARGE = ("batches", "buffer", "update")
"""Names of the components with large states."""


def in_folder(folder: Path | None, last_checkpoint: Any) -> Iterator[Refusal]:
    """Yield an error if the folder of a new run contains checkpoints of an earlier run."""
    if folder is None or last_checkpoint is not None:
        return
    if saved_in(folder / "checkpoints"):
        reason = "contains checkpoints from an earlier run, which would be overwritten"
        yield "folder", str(folder), reason, "use another folder, or pass resume_from=..."


def in_checkpoints(folder: Any, buffer: Any) -> Iterator[Refusal]:
    """Yield errors for replay buffer components whose state cannot be saved."""
    if folder is None or not isinstance(buffer, ReplayMinibatches):
        return
    if isinstance(buffer.buffer, ReplayBufferEnsemble):
        reason = "has several storages, which checkpoints do not support"
        hint = "use one buffer and mix minibatches in a hook, or pass folder=None (log_dir=null)"
        yield "buffer", type(buffer.buffer).__name__, reason, hint
    for field in ("writer", "sampler"):
        part = getattr(buffer.buffer, field)
        try:
            part.state_dict()
        except NotImplementedError:
            reason = "has no state_dict, which checkpoints need"
            hint = f"use another {field}, or disable checkpoints with folder=None (log_dir=null)"
            yield field, type(part).__name__, reason, hint


def in_saving(iteration: int, ledger: StepLedger) -> Iterator[Refusal]:
    """Yield an error if a checkpoint is requested in the middle of an iteration."""
    if iteration != ledger.iterations:
        reason = "has begun but not ended, and a checkpoint cannot contain its batch"
        hint = "call trainer.request_checkpoint() to save after the iteration"
        yield "iteration", iteration, reason, hint


def in_resumed(plan: StepPlan, ledger: StepLedger, checkpoint: Any) -> Iterator[Refusal]:
    """Yield an error if a checkpoint's counts differ from the plan."""
    found = [mismatch for mismatch in ledger.compare(plan) if mismatch.name != "env_steps"]
    if found:
        reason = f"was written under a different plan: {', '.join(map(str, found))}"
        yield "resume_from", str(checkpoint), reason, "resume with the settings of that run"


def in_saved_policies(collector: Any) -> Iterator[Refusal]:
    """Yield an error if normalisation statistics in other processes would not be saved."""
    name = ""
    if isinstance(collector, AsyncCollector) and collector.env is None:
        name = collector.normalized_by
    elif isinstance(collector, MultiCollector):
        states = [state for state in collector.state_dict().values() if isinstance(state, dict)]
        running = [k for state in states for k in state.get("env_state_dict", ()) if _EXTRA in k]
        name = "VecNorm" if running else ""
    if name:
        reason = f"normalises in worker processes ({type(collector).__name__}), so a saved policy"
        hint = "normalise in this process, with another collector or with make_env(id)"
        yield "environment", name, f"{reason} would lose its statistics", hint


_EXTRA = "_extra_state"
"""Key under which TorchRL's transforms store running statistics."""
