"""Checkpoints of a run and of its policy alone, and what they cannot hold."""

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
from kit.hooks.policy import BestPolicy
from kit.steps import SettingError, StepLedger, StepPlan
from kit.trainer.checkpoint import NORMALIZATION, Checkpoints, saved_in
from kit.trainer.chunked_state import check_state

Parts = Callable[[], dict[str, Any]]
"""Return objects with ``state_dict`` and ``load_state_dict``, keyed by name."""


class RunCheckpoints:
    """Writes checkpoints of a run, and continues from them.

    Args:
        parts: returns every object with a state that a resumed run needs.
        policy_parts: returns the objects with the state that a policy acts by.

    Attributes:
        last: checkpoint that was written or read last; ``None`` if there is none.
        saved_at: iterations of the run in it.
    """

    def __init__(self, parts: Parts, policy_parts: Parts) -> None:
        self._parts, self._policy_parts = parts, policy_parts
        self._writer: Checkpoints | None = None
        self._left_out: Sequence[str] = ()  # states in the last one of hooks that were not there
        self.last: Path | None = None
        self.saved_at = 0

    # ------------------------------------------------------------------ the whole run
    def save(self, folder: Path, steps: int, counters: Mapping[str, Any]) -> Path:
        """Write a checkpoint and return it.

        Args:
            folder: which gets it.
            steps: progress of the run, which names it.
            counters: of the ledger.

        Raises:
            WriteError: if it could not be written; earlier ones are untouched.
        """
        if self._writer is None:
            self._writer = Checkpoints(folder, self._parts(), last=self.last)
        self.last = self._writer.save(steps, {"counters": counters})
        self.saved_at, self._left_out = counters["iterations"], ()
        return self.last

    def load(self, path: Path) -> None:
        """Restore every part of the run.

        Raises:
            SettingError: if the checkpoint does not fit.
        """
        self.last = path
        checkpoints = Checkpoints(path.parent, self._parts())
        counters = checkpoints.load(path, whole=True)["counters"]
        self._left_out, self.saved_at = checkpoints.left_out, int(counters["iterations"])

    def load_added(self, hooks: Iterable[str], iterations: int) -> None:
        """Restore hooks that were added after a checkpoint was loaded, unless the run continued.

        Args:
            hooks: their names.
            iterations: of the run until now.
        """
        found = {f"hook {name}" for name in hooks}.intersection(self._left_out)
        if not found or self.last is None or iterations != self.saved_at:
            return
        found |= {"update", "optimizer"}  # a scheduler has set the learning rate of its first step
        parts = {name: part for name, part in self._parts().items() if name in found}
        Checkpoints(self.last.parent, parts).load(self.last)

    def check_states(self) -> None:
        """Check that checkpoints can hold the states of hooks, loggers and other parts.

        Raises:
            SettingError: naming the first that they cannot hold.
        """
        for name, part in self._parts().items():
            if name not in _LARGE:
                check_state(part, name)

    # ------------------------------------------------------------------ the policy alone
    def save_policy(self, folder: Path, steps: int, counters: Mapping[str, Any]) -> Path:
        """Write what :meth:`load_policy` reads: weights, normalisation, those of the best."""
        parts = {**self._policy_parts(), **self._best_policies()}
        return Checkpoints(folder, parts, keep=1).save(steps, {"counters": counters})

    def load_policy(self, path: Path, best: bool = False) -> dict[str, int]:
        """Load weights and normalisation; see ``Trainer.load_policy``."""
        if not best:
            checkpoints = Checkpoints(path.parent, self._policy_parts())
            counters = checkpoints.load(path, needed=NORMALIZATION)["counters"]
            return {name: int(counters[name]) for name in ("policy_steps", "gradient_steps")}
        kept = self._best_policies()
        if not kept:
            works = "leave it out, or train with keep_best=true"
            raise SettingError("best", True, "was not kept by this run", works)
        Checkpoints(path.parent, kept).load(path)
        hook = next(iter(kept.values()))
        hook.restore()
        return {"policy_steps": hook.policy_steps, "gradient_steps": hook.gradient_steps}

    def _best_policies(self) -> dict[str, BestPolicy]:
        parts = self._parts().items()
        return {name: part for name, part in parts if isinstance(part, BestPolicy)}


def warn_of_lost_environments(reason: str) -> None:
    """Warn why a resumed run would differ from the uninterrupted one; if there is a reason."""
    if reason:
        what = "the state of the environments is not in checkpoints"
        then = "a resumed run closes their open episodes and is not bit-exact"
        warnings.warn(f"{what}: {reason}; {then}", stacklevel=3)


def warn_of_lost_optimizers(hooks: Iterable[Any], saved: Iterable[Any]) -> None:
    """Warn of hooks that train with an optimizer that no checkpoint has.

    Args:
        hooks: registered hook objects.
        saved: optimizers in checkpoints.
    """
    known = {id(one) for one in saved}
    for hook in hooks:
        held = [one for one in vars(hook).values() if isinstance(one, Optimizer)]
        if any(id(one) not in known for one in held) and not hook.state_dict():
            name = type(hook).__name__
            what = f"hook {name} has an optimiser, and nothing in its state_dict()"
            then = "a resumed run begins it anew and is not bit-exact"
            warnings.warn(f"{what}: {then}", stacklevel=3)


_LARGE = ("batches", "buffer", "update")
"""Parts of the kit whose states are large."""


def in_folder(folder: Path | None, last_checkpoint: Any) -> Iterator[Refusal]:
    """A folder with checkpoints of an earlier run, which those of a new one would replace."""
    if folder is None or last_checkpoint is not None:
        return
    if saved_in(folder / "checkpoints"):
        why = "has checkpoints of an earlier run, which would be lost"
        yield "folder", str(folder), why, "give another folder, or resume_from one of them"


def in_checkpoints(folder: Any, buffer: Any) -> Iterator[Refusal]:
    """Parts of a replay buffer whose state no checkpoint could hold."""
    if folder is None or not isinstance(buffer, ReplayMinibatches):
        return
    if isinstance(buffer.buffer, ReplayBufferEnsemble):
        why = "keeps rows in several storages, which no checkpoint holds"
        works = (
            "use one and let a hook mix the minibatches, or folder=None (in a recipe log_dir=null)"
        )
        yield "buffer", type(buffer.buffer).__name__, why, works
    for field in ("writer", "sampler"):
        part = getattr(buffer.buffer, field)
        try:
            part.state_dict()
        except NotImplementedError:
            why = "gives no state, which checkpoints need"
            works = (
                f"use another {field}, or folder=None (in a recipe log_dir=null): no checkpoints"
            )
            yield field, type(part).__name__, why, works


def in_saving(iteration: int, ledger: StepLedger) -> Iterator[Refusal]:
    """A checkpoint within an iteration, whose batch is collected and in no checkpoint."""
    if iteration != ledger.iterations:
        why = "has begun and not ended, and no checkpoint goes on within it"
        works = "trainer.request_checkpoint() saves after it"
        yield "iteration", iteration, why, works


def in_resumed(plan: StepPlan, ledger: StepLedger, checkpoint: Any) -> Iterator[Refusal]:
    """A checkpoint of a run that had other counts by now than the plan would have."""
    found = [one for one in ledger.compare(plan) if one.name != "env_steps"]
    if found:
        why = f"was written under another plan: {', '.join(map(str, found))}"
        yield "resume_from", str(checkpoint), why, "resume with the settings that it had"


def in_saved_policies(collector: Any) -> Iterator[Refusal]:
    """Statistics in other processes, without which a saved policy would act otherwise."""
    name = ""
    if isinstance(collector, AsyncCollector) and collector.env is None:
        name = collector.normalized_by
    elif isinstance(collector, MultiCollector):
        states = [one for one in collector.state_dict().values() if isinstance(one, dict)]
        running = [key for one in states for key in one.get("env_state_dict", ()) if _EXTRA in key]
        name = "VecNorm" if running else ""
    if name:
        why = f"has statistics in the processes of {type(collector).__name__}, of which a saved"
        works = "normalise in this process: by another collector, or an environment of make_env(id)"
        yield "environment", name, f"{why} policy would have none", works


_EXTRA = "_extra_state"
"""Where TorchRL's transforms with running statistics have them."""
