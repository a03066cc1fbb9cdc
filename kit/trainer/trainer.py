"""The loop: collect, update, log, evaluate, save."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.trainers import OptimizationStepper, TrainerHookBase

from kit.buffers import Minibatches, ReplayMinibatches, as_minibatches
from kit.buffers.n_step import close
from kit.collectors import plan_fit
from kit.collectors.base import KitCollector
from kit.envs.backends.torchrl_layers import normalization_of_transforms
from kit.hooks.console import Console
from kit.hooks.evaluation import Evaluator
from kit.hooks.guards import NaNGuard
from kit.hooks.policy import BestPolicy, SavePolicy
from kit.logging.files import as_folder
from kit.logging.loggers import RowLogger
from kit.steps import Due, RunSchedule, SettingError, StepLedger, StepPlan
from kit.trainer import checks, compatibility
from kit.trainer.checkpoint import (
    PolicyState,
    make_parts_when_loaded,
    normalization_of,
    normalizer_of,
    stateful_parts,
)
from kit.trainer.rng import IsolatedRNG, isolated_rng
from kit.trainer.run_checkpoints import (
    RunCheckpoints,
    in_checkpoints,
    in_folder,
    in_resumed,
    in_saved_policies,
    in_saving,
    warn_of_lost_environments,
    warn_of_lost_optimizers,
)
from kit.trainer.torchrl_batches import counted
from kit.trainer.torchrl_protocol import TorchRLProtocol
from kit.trainer.update_phase import UpdatePhase
from kit.update import Update


class Trainer(TorchRLProtocol):
    """Runs a plan: in each iteration one collection, then the gradient steps that are due.

    The plan decides the counts, the buffer the minibatches, the update the gradient step; the loop
    is the same for every algorithm. It speaks TorchRL's hook protocol, so TorchRL's hook
    objects register unchanged.

    What a run draws from the global random numbers of the process comes from numbers of its own,
    which begin where the global ones stand when the trainer is made: trainers in one process do not
    disturb each other, nor the process. Runs in several threads at the same time are refused.

    Args:
        plan: counts of the run. A collector of the kit that was given no ``init_random_frames``,
            an evaluator without ``episodes`` and a buffer without a minibatch size take the plan's.
        collector: where batches come from; the kit's or TorchRL's. ``None`` where the plan is
            offline (``steps_per_env=0``).
        update: makes gradient steps; the kit's :class:`~kit.update.Update` or one of TorchRL's
            steppers. ``None`` trains nothing, or leaves it to a hook at stage ``optimizer``
            (then a ``loss_module`` is given). The policies that collect and are evaluated, and the
            critic of ``advantage``, are networks of its loss or frozen (``requires_grad_(False)``).
        buffer: where minibatches come from; a TorchRL replay buffer is taken as it is, ``None``
            makes passes over the last batch.
        advantage: adds advantages and value targets to each batch that is trained on.
        evaluate: measures the policy when the plan says so.
        logger: takes one row of metrics per log point; several may be given.
        hooks: objects with ``register(trainer, name)``; the kit's or TorchRL's.
        folder: where checkpoints are written, below ``checkpoints``; ``None`` writes none.
        log_every: policy steps (offline: gradient steps) between rows; ``None``: a hundredth of
            the run.
        checkpoint_every: policy steps (offline: gradient steps) between checkpoints; ``None``: a
            tenth of the run.
        loss_module: found by TorchRL's hooks and steppers; the update's by default.
        optimizer: found by TorchRL's hooks and steppers; the update's by default.
        config: settings of the run, for loggers: plain values.
        resume_from: checkpoint of a trainer that was built in the same way.
        progress: whether plan, progress and ledger are shown in the terminal; a text is their
            title.
        nan_guard: whether a metric of training that is not finite ends the run.

    Attributes:
        ledger: counts so far.
        stop_reason: why the run ended before its plan; ``None`` otherwise.

    Raises:
        SettingError: if parts contradict each other or the plan.
    """

    def __init__(
        self,
        plan: StepPlan,
        *,
        collector: BaseCollector | None,
        update: Update | OptimizationStepper | None = None,
        buffer: Minibatches | ReplayBuffer | None = None,
        advantage: Callable[[TensorDictBase], TensorDictBase] | None = None,
        evaluate: Evaluator | None = None,
        logger: RowLogger | Sequence[RowLogger] = (),
        hooks: Iterable[TrainerHookBase] = (),
        folder: Path | str | None = None,
        log_every: int | None = None,
        checkpoint_every: int | None = None,
        loss_module: Any = None,
        optimizer: Any = None,
        config: dict[str, Any] | None = None,
        resume_from: Path | str | None = None,
        progress: bool | str = True,
        nan_guard: bool = True,
    ) -> None:
        minibatches = as_minibatches(buffer)
        if isinstance(evaluate, Evaluator) and evaluate.follows_plan:
            evaluate.episodes = plan.evaluation_episodes
        if isinstance(collector, KitCollector) and plan.is_exact:
            collector.act_at_random(
                plan.random_steps_until(plan.policy_steps_after(plan.iterations))
            )
        joins = getattr(minibatches, "joins_steps", False)
        self.schedule = RunSchedule(plan, log_every=log_every, checkpoint_every=checkpoint_every)
        checks.refuse(
            compatibility.in_collection(plan, collector),
            compatibility.in_buffer(plan, minibatches),
            () if collector is None else plan_fit.in_collector(plan, collector, joins_steps=joins),
            compatibility.in_evaluation(plan, evaluate, collector),
            in_checkpoints(folder, minibatches),
        )
        raw = compatibility.stores_raw(plan, minibatches, advantage)
        checks.refuse(compatibility.in_raw_batches(collector, raw))
        if raw:
            minibatches.normalize_by(normalizer_of(collector))  # type: ignore[attr-defined]
        super().__init__(
            plan, collector, update, minibatches,
            logger=logger, loss_module=loss_module, optimizer=optimizer,
        )  # fmt: skip
        self.advantage, self.evaluate = advantage, evaluate
        self.batches = counted(collector, plan)
        self.batches.evaluate = evaluate
        self.config = config or {}
        self.folder = None if folder is None else as_folder(folder)
        # Now, as collectors of TorchRL drop their environments at the end.
        self._transforms = normalization_of_transforms(collector=collector, evaluate=evaluate)
        self._released = self._complete = self._started = False
        self._prefill: TensorDictBase | None = None
        self.checkpoints = RunCheckpoints(self._parts, self.policy_parts)
        self._is_loaded = False  # since stage load ran
        self._phase = UpdatePhase(self)
        if isinstance(update, Update):
            vary = not (plan.is_exact if plan.on_policy else plan.offline)
            update.shapes_vary = vary and plan.minibatch_size is None
            update.begin_run()
        elif isinstance(update, OptimizationStepper):
            update.register(self)
        given = list(hooks)
        if nan_guard and not any(isinstance(hook, NaNGuard) for hook in given):
            self.add(NaNGuard())  # before hooks that save
        for hook in given:
            self.add(hook)
        if progress and not any(isinstance(hook, Console) for hook in given):
            self.add(Console(progress if isinstance(progress, str) else ""))
        checks.refuse(
            compatibility.in_updates(plan, update, self.loss_module, advantage, self.stages),
            compatibility.in_networks(update, collector, evaluate, advantage, self.stages),
            compatibility.in_priorities(self.buffer, self.loss_module),
            compatibility.in_rewards(self.buffer, self.stages),
            compatibility.in_discounts(
                self.loss_module, advantage, normalizer_of(collector), self.buffer, self.stages
            ),
        )
        saving = (BestPolicy, SavePolicy)
        if any(isinstance(hook, saving) for hook in self.registered_modules.values()):
            checks.refuse(in_saved_policies(collector))
        self.numbers = IsolatedRNG()
        make_parts_when_loaded(self.loss_module)
        if resume_from is not None:
            self.load(resume_from)

    # ------------------------------------------------------------------ the loop
    @isolated_rng
    def run(self) -> StepLedger:
        """Run the rest of the plan and return the ledger.

        Raises:
            SettingError: if the run has ended before its plan: its environments are closed.
            PlanMismatchError: if counts differ from the plan.
            HookError: if a hook raises.
            EnvError: if an environment fails.
        """
        checks.refuse(
            compatibility.in_learning_rates(self.update, self.registered_modules),
            compatibility.in_hooks(self.plan, self.update, self.buffer, self.stages),
            compatibility.in_targets(self.plan, self.update, self.loss_module, self.stages),
            compatibility.in_rewards(self.buffer, self.stages),
            plan_fit.in_counts(self.collector, self.ledger),
        )
        # A run that was interrupted in its last iteration has nothing left to collect, either.
        if self._released and not self._complete:
            why = f"has ended after {self.ledger.policy_steps:,} policy steps and closed its envs"
            last = self.last_checkpoint
            again = "" if last is None else f" with resume_from={str(last)!r}"
            raise SettingError("trainer", "Trainer", why, f"build another one{again}")
        self.batches.share_memory(self._nothing_keeps_a_batch)
        with self._lifecycle():
            if self.ledger.iterations == 0:
                if not self._stop_training:  # at stage setup
                    self.begin()
                if self._stop_training:  # there is no iteration yet to go on from
                    return self.ledger
            while not (self.schedule.done or self._stop_training):
                batch = self.collect()
                due = self.schedule.advance(self.batches.collected)
                self.train(batch, due.gradient_steps)
                self.finish_iteration(batch, due)
                if self.ledger.iterations == 1 and self.folder is not None:
                    warn_of_lost_environments(self.batches.not_resumable())
            if self.ledger.iterations != self.checkpoints.saved_at:
                self.save()
                if self.journal.latest.get("iterations") != self.ledger.iterations:
                    self.write_row()  # a resumed run drops it
        self.ledger.verify(self.plan)
        self._complete = self.schedule.done
        return self.ledger

    def _nothing_keeps_a_batch(self) -> bool:
        own = self.advantage is None and isinstance(self.buffer, ReplayMinibatches)
        copied = own and self.buffer.copies
        hook = getattr(self.collector, "post_collect_hook", None)
        return copied and hook is None and not self.stages.keeps_batches

    @isolated_rng
    def begin(self) -> None:
        """Collect the prefill and make the evaluations that come before the first iteration.

        The collector begins episodes: those that a buffer filled before has open do not go on.
        """
        self._start()
        if not self.plan.offline:
            self._close_open_episodes()
        if self.plan.prefill_steps and not self.plan.prefill_is_iteration:
            batch = self.collect()
            self.schedule.prefilled(self.policy_steps)
            if self.plan.prefill_in_first_batch:
                self._prefill = batch
            else:
                self._phase.store(batch)
        if self.schedule.initial_evaluations and not self._stop_training:
            self.evaluations(self.schedule.initial_evaluations)
            self.write_row()

    @isolated_rng
    def collect(self) -> TensorDictBase:
        """Collect the batch of an iteration; offline, an empty one."""
        self._start()  # a loop that goes on from a checkpoint has no begin()
        self.stages.fire("pre_collect")
        began = time.perf_counter()
        batch = self.batches.next()
        continues_episodes = getattr(self.collector, "continues_episodes", True)
        if not continues_episodes:
            self._close_open_episodes()
        self.journal.spent("collect", began)
        random = self.batches.collected_at_random
        self.ledger.collected(self.batches.collected, 0, 0, random_policy_steps=random)
        batch = self._phase.processed("batch_process", batch)
        self.log("pre_steps_log", batch)
        if self.stages["episodes"] and (episodes := self.batches.new_episodes()):
            self.stages.fire("episodes", episodes)
        if self._prefill is not None:
            if not continues_episodes:
                close(self._prefill[..., -1])
            batch = torch.cat([self._prefill, batch], dim=-1)
            self._prefill = None
        return batch

    def _close_open_episodes(self) -> None:
        """Let no step in the buffer be joined to those of the next batch: they do not go on."""
        if getattr(self.buffer, "joins_steps", False):
            self.buffer.close_open_episodes(self.plan.num_envs)

    @isolated_rng
    def train(self, batch: TensorDictBase, due: int) -> None:
        """Make the gradient steps that are due, epoch by epoch; without any, store the batch."""
        if not due:
            self._phase.store(batch)
            return
        began = time.perf_counter()
        self._phase.run(batch, due)
        self.journal.spent("update", began)

    @isolated_rng
    def finish_iteration(self, batch: TensorDictBase, due: Due) -> None:
        """Count the iteration; evaluate, log and save if due."""
        self.ledger.iterations += 1
        if isinstance(self.update, Update):
            self.update.advance(self.policy_steps)
        self.stages.fire("post_steps")
        self.log("post_steps_log", batch)
        self.evaluations(due.evaluations)
        if due.row:
            self.write_row()
        if (due.checkpoint or self._save_requested) and not self._stop_training:
            self.save()
            if self._stop_training:  # hooks asked for it, and did not know that it was the last one
                self.checkpoints.saved_at = 0  # run() saves at the end, as after any other stop

    def evaluations(self, times: int) -> None:
        """Evaluate the policy ``times`` times."""
        for _ in range(times):
            assert self.evaluate is not None
            began = time.perf_counter()
            result = self.evaluate(self.ledger.evaluations)
            is_best = self.journal.evaluated(result)
            self.journal.spent("evaluate", began)
            self.ledger.evaluated(self.evaluate.episodes)
            self.stages.fire("evaluation", dict(result), is_best)

    def write_row(self) -> None:
        """Write a row of counters and metrics."""
        checks.refuse(plan_fit.in_random_steps(self.plan, self.ledger, self.collector))
        self.batches.count_environment(self.ledger)
        self.journal.note(self.batches.metrics())
        row = self.journal.write_row(self.ledger.counters(), self.batches.take_episodes())
        self._publish(row)
        self.stages.fire("log_row", row)

    # ------------------------------------------------------------------ hooks and checkpoints
    def add(self, hook: Any, name: str | None = None) -> Self:
        """Register a hook object; in a run that was just resumed, with its saved state.

        Raises:
            SettingError: if another hook has this name.
        """
        before = set(self.registered_modules)
        super().add(hook, name)
        added = self.registered_modules.keys() - before
        self.checkpoints.load_added(added, self.ledger.iterations)
        return self

    def save(self) -> Path | None:
        """Write a checkpoint now, between two iterations.

        Raises:
            WriteError: if it could not be written; earlier ones are untouched.
            SettingError: within an iteration.
        """
        self._save_requested = False
        if self.folder is None:
            return None
        checks.refuse(in_saving(self.batches.iteration, self.ledger))
        self.stages.fire("save")
        self.batches.count_environment(self.ledger)
        if self.last_checkpoint is None:
            optimizers = [self.optimizer, *getattr(self.update, "optimizers", {}).values()]
            warn_of_lost_optimizers(self.registered_modules.values(), optimizers)
        folder, counters = self.folder / "checkpoints", self.ledger.counters()
        self.last_checkpoint = self.checkpoints.save(folder, self.schedule.progress, counters)
        self.stages.fire("post_save", self.last_checkpoint)
        return self.last_checkpoint

    def load(self, checkpoint: Path | str) -> Self:
        """Continue from a checkpoint of a trainer that was built in the same way.

        Raises:
            SettingError: if it does not fit, or was written under another plan.
        """
        self.last_checkpoint = Path(checkpoint)
        self.checkpoints.load(self.last_checkpoint)
        checks.refuse(in_resumed(self.plan, self.ledger, checkpoint))
        if not getattr(self.batches.collector, "exact_resume", False):
            warn_of_lost_environments(self.batches.not_resumable() or "nothing gives its state")
            # A batch of whole episodes leaves none open.
            if hasattr(self.buffer, "close_open_episodes") and not self.plan.collects_episodes:
                self.buffer.close_open_episodes(self.plan.num_envs)
        self._phase.take_over()
        self._is_loaded = True
        return self

    def _parts(self) -> dict[str, Any]:
        """Everything with a state that a resumed run needs, by name."""
        # A stepper of TorchRL is among the registered modules; its optimiser need not be its own.
        own = "update" if isinstance(self.update, Update) else "optimizer"
        names = ("ledger", "schedule", "batches", "buffer", "journal", "loss_module", own)
        parts = {name: getattr(self, name) for name in (*names, "advantage")}
        parts |= {"random_numbers": self.numbers, **self._transforms}
        return stateful_parts(parts, self.collector, self.evaluate, self.registered_modules)

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
        checks.refuse(in_saved_policies(self.collector))
        return self.checkpoints.load_policy(Path(checkpoint), best)

    def save_policy(self, folder: Path | str) -> Path:
        """Write what :meth:`load_policy` reads: weights, normalisation, those of the best.

        Args:
            folder: which gets the checkpoint, below ``checkpoints``. With ``config.yaml`` it is a
                run folder for ``kit.evaluate`` and ``init_from``; a run cannot go on from it.

        Raises:
            WriteError: if it could not be written.
        """
        below, counters = Path(folder) / "checkpoints", self.ledger.counters()
        return self.checkpoints.save_policy(below, self.schedule.progress, counters)

    # ------------------------------------------------------------------ begin and end
    @contextlib.contextmanager
    def _lifecycle(self) -> Iterator[None]:
        """Start loggers and hooks; release everything at the end, whatever happens."""
        try:
            self._start()
            yield
        except BaseException as error:
            for end in (functools.partial(self.stages.fire, "error", error), self.shutdown):
                try:
                    end()
                except Exception as another:  # the first error is the one to see
                    error.add_note(f"shutting down then raised {type(another).__name__}: {another}")
            raise
        self.shutdown()

    def _start(self) -> None:
        """Start loggers and hooks, unless they are: a loop of the caller's own does not say it."""
        if not self._started:
            checks.refuse(in_folder(self.folder, self.last_checkpoint))
            self._started = True
            done = getattr(self.ledger, self.plan.axis)
            self.journal.start(done, self.config, self.plan.table())
            self.stages.fire("setup")
            if self.folder is not None:
                self.checkpoints.check_states()
        if self._is_loaded:
            self._is_loaded = False
            self.stages.fire("load", self.last_checkpoint)

    def shutdown(self) -> None:
        """Release everything, even if something raises on the way."""
        self._released, self._started = True, False
        with contextlib.ExitStack() as last_first:
            if self.evaluate is not None:
                last_first.callback(self.evaluate.close)
            last_first.callback(self.batches.shutdown)
            last_first.callback(lambda: self.journal.close(self.plan.table(self.ledger)))
            last_first.callback(self.stages.fire, "shutdown")
            last_first.callback(self.batches.count_environment, self.ledger)
            if isinstance(self.update, Update):  # whoever calls it now may read them
                self.update.writes_to_minibatch = True
