"""The side of a trainer that saves and loads: the whole run, or its policy alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from torch.optim import Optimizer
from torchrl.collectors import MultiCollector
from torchrl.data import ReplayBufferEnsemble

from kit.buffers import ReplayBatches
from kit.collectors.asynchronous import AsyncCollector
from kit.hooks.evaluation import Evaluator
from kit.hooks.policy import BestPolicy
from kit.steps import RunSchedule, SettingError, StepLedger, StepPlan
from kit.trainer.batches import CountedBatches
from kit.trainer.checkpoint import (
    NORMALIZATION,
    Checkpoints,
    PolicyState,
    normalization_of,
    saved_in,
    stateful_parts,
)
from kit.trainer.checks import Refusal, refuse
from kit.trainer.pieces import check_state
from kit.trainer.process import OwnNumbers
from kit.trainer.torchrl_protocol import TorchRLProtocol
from kit.update import Update


class ResumableTrainer(TorchRLProtocol):
    """Writes checkpoints of a run between two iterations, and continues from them.

    Attributes:
        folder: where checkpoints are written, below ``checkpoints``; ``None`` writes none.
    """

    schedule: RunSchedule
    batches: CountedBatches
    advantage: Any
    evaluate: Evaluator | None
    numbers: OwnNumbers
    folder: Path | None
    _transforms: dict[str, Any]
    _phase: Any  # the UpdatePhase, which imports this class
    _checkpoints: Checkpoints | None = None
    _saved_at = 0
    """iterations."""
    _is_loaded = False
    """Whether a checkpoint was loaded since stage ``load`` ran."""
    _left_out: Sequence[str] = ()
    """Parts of the checkpoint from which the run was resumed, of hooks that it did not have."""

    # ------------------------------------------------------------------ registration
    def add(self, hook: Any, name: str | None = None) -> Self:
        """Register a hook object; to a run that was just resumed, with its state there.

        Raises:
            SettingError: if another hook has this name, or it is no hook object.
        """
        before = set(self.registered_modules)
        super().add(hook, name)
        added = {f"hook {one}" for one in self.registered_modules.keys() - before}
        if found := added.intersection(self._left_out):
            self._load_left_out(found)
        return self

    def _load_left_out(self, names: set[str]) -> None:
        """Give hooks their states, unless the run has gone on, and optimisers theirs again.

        A scheduler of learning rates has set that of its first step.
        """
        if self.last_checkpoint is None or self.ledger.iterations != self._saved_at:
            return
        optimisers = {"update", "optimizer"}
        parts = {one: part for one, part in self._parts().items() if one in names | optimisers}
        Checkpoints(self.last_checkpoint.parent, parts).load(self.last_checkpoint)

    # ------------------------------------------------------------------ the run
    def save(self) -> Path | None:
        """Write a checkpoint now, between two iterations.

        Raises:
            NotSaved: if it could not be written; earlier ones are untouched.
            SettingError: within an iteration.
        """
        self._save_requested = False
        if self.folder is None:
            return None
        refuse(in_saving(self.batches.iteration, self.ledger))
        self.stages.fire("save")
        self.batches.count_environment(self.ledger)
        if self._checkpoints is None:
            folder, last = self.folder / "checkpoints", self.last_checkpoint
            self._checkpoints = Checkpoints(folder, self._parts(), last=last)
            self._say_what_hooks_lose()
        metadata = {"counters": self.ledger.counters()}
        self.last_checkpoint = self._checkpoints.save(self.schedule.progress, metadata)
        self._saved_at, self._left_out = self.ledger.iterations, ()
        self.stages.fire("post_save", self.last_checkpoint)
        return self.last_checkpoint

    def load(self, checkpoint: Path | str) -> Self:
        """Continue from a checkpoint of a trainer that was built in the same way.

        Raises:
            SettingError: if it does not fit, or was written under another plan.
        """
        self.last_checkpoint = Path(checkpoint)
        checkpoints = Checkpoints(self.last_checkpoint.parent, self._parts())
        checkpoints.load(self.last_checkpoint, whole=True)
        self._left_out = checkpoints.left_out
        self._saved_at = self.ledger.iterations
        refuse(in_resumed(self.plan, self.ledger, checkpoint))
        if not self.batches.exact_resume:
            self._say_what_is_lost(self.batches.not_resumable() or "nothing gives its state")
            # A batch of whole episodes leaves none open.
            if hasattr(self.buffer, "close_open_episodes") and not self.plan.collects_episodes:
                self.buffer.close_open_episodes(self.plan.num_envs)
        self._phase.take_over()
        self._is_loaded = True
        return self

    def check_states(self) -> None:
        """Check that checkpoints can hold the states of hooks, loggers and other parts.

        Raises:
            SettingError: naming the first that they cannot hold.
        """
        for name, part in self._parts().items():
            if name not in _LARGE:
                check_state(part, name)

    def _say_what_is_lost(self, reason: str) -> None:
        """Say why a resumed run is not the one that it would have been."""
        if reason:
            what = "the state of the environments is not in checkpoints"
            then = "a resumed run closes their open episodes and is not bit-exact"
            warnings.warn(f"{what}: {reason}; {then}", stacklevel=3)

    def _say_what_hooks_lose(self) -> None:
        """Say which hooks train with an optimiser of their own that no checkpoint has."""
        saved = [self.optimizer, *getattr(self.update, "optimizers", {}).values()]
        for hook in self.registered_modules.values():
            held = [one for one in vars(hook).values() if isinstance(one, Optimizer)]
            if not all(one in saved for one in held) and not hook.state_dict():
                what = (
                    f"hook {type(hook).__name__} has an optimiser, and nothing in its state_dict()"
                )
                then = "a resumed run begins it anew and is not bit-exact"
                warnings.warn(f"{what}: {then}", stacklevel=4)

    def _parts(self) -> dict[str, Any]:
        """Everything with a state that a resumed run needs, by name."""
        # A stepper of TorchRL is among the registered modules; its optimiser need not be its own.
        own = "update" if isinstance(self.update, Update) else "optimizer"
        names = ("ledger", "schedule", "batches", "buffer", "journal", "loss_module", own)
        parts = {name: getattr(self, name) for name in (*names, "advantage")}
        parts |= {"random_numbers": self.numbers, **self._transforms}
        return stateful_parts(parts, self.collector, self.evaluate, self.registered_modules)

    # ------------------------------------------------------------------ the policy alone
    def policy_parts(self) -> dict[str, Any]:
        """Objects with the state that a policy acts by, by name: weights and normalisation."""
        parts = {} if self.loss_module is None else {"loss_module": self.loss_module}
        own = PolicyState(self.collector, self.evaluate, self.loss_module, with_noise=False)
        parts |= {"policies": own} if own.state_dict() else {}
        return {**parts, **normalization_of(self.collector, self.evaluate), **self._transforms}

    def load_policy(self, checkpoint: Path | str, best: bool = False) -> dict[str, int]:
        """Load weights and normalisation alone, to evaluate; the run folder is only read.

        Args:
            checkpoint: of a trainer that was built in the same way.
            best: whether they are those of the best evaluation, which ``BestPolicy`` has kept.

        Returns:
            ``policy_steps`` and ``gradient_steps`` after which they were measured, or the
            checkpoint was written.

        Raises:
            SettingError: if the best were not kept, there has been no evaluation, or there is a
                normalisation that this process does not have.
        """
        path = Path(checkpoint)
        refuse(in_saved_policies(self.collector))
        if not best:
            checkpoints = Checkpoints(path.parent, self.policy_parts())
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

    def save_policy(self, folder: Path | str) -> Path:
        """Write what :meth:`load_policy` reads: weights, normalisation, those of the best.

        Args:
            folder: which gets the checkpoint, below ``checkpoints``. With ``config.yaml`` it is a
                run folder for ``kit.evaluate`` and ``start_from``; a run cannot go on from it.

        Raises:
            NotSaved: if it could not be written.
        """
        parts = {**self.policy_parts(), **self._best_policies()}
        checkpoints = Checkpoints(Path(folder) / "checkpoints", parts, keep=1)
        return checkpoints.save(self.schedule.progress, {"counters": self.ledger.counters()})

    def _best_policies(self) -> dict[str, BestPolicy]:
        """The hooks that keep the best policy, by the names of their parts in checkpoints."""
        hooks = self.registered_modules.items()
        return {f"hook {name}": hook for name, hook in hooks if isinstance(hook, BestPolicy)}


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
    if folder is None or not isinstance(buffer, ReplayBatches):
        return
    if isinstance(buffer.buffer, ReplayBufferEnsemble):
        why = "keeps rows in several storages, which no checkpoint holds"
        works = "use one and let a hook mix the minibatches, or folder=None (in a recipe runs=null)"
        yield "buffer", type(buffer.buffer).__name__, why, works
    for field in ("writer", "sampler"):
        part = getattr(buffer.buffer, field)
        try:
            part.state_dict()
        except NotImplementedError:
            why = "gives no state, which checkpoints need"
            works = f"use another {field}, or folder=None (in a recipe runs=null): no checkpoints"
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
