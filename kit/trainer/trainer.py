"""The training loop: collect, update, evaluate, log and save."""

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
from kit.distributed import Ranks
from kit.envs.backends.torchrl_layers import normalization_of_transforms
from kit.envs.state import seed_process
from kit.hooks.base import Hook
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
from kit.trainer.meeting import Meeting, updates_of
from kit.trainer.restart import in_restarted, restart_parts
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
    """Runs a step plan. Each iteration collects one batch and takes the due gradient steps.

    The plan determines the counts, the buffer provides minibatches and the update takes gradient
    steps. The loop is the same for every algorithm. The trainer implements TorchRL's hook protocol,
    so TorchRL's hook objects can be registered unchanged.

    Each run has its own copy of the global RNG state, so trainers in one process do not affect each
    other. Concurrent runs in several threads are not supported.

    Args:
        plan: step counts of the run. They override the defaults of kit's components: a collector's
            ``init_random_frames``, an evaluator's ``episodes`` and a buffer's minibatch size.
        collector: kit or TorchRL collector; ``None`` if the plan is offline (``steps_per_env=0``).
        update: :class:`~kit.update.Update` or TorchRL stepper that takes the gradient steps.
            ``None`` if nothing is trained or a hook at stage ``optimizer`` takes the gradient steps
            (``loss_module`` is then required). The policies in ``collector`` and ``evaluate``,
            and the critic in ``advantage``, must either belong to the update's loss or be frozen
            with ``requires_grad_(False)``.
        buffer: source of minibatches, such as a TorchRL replay buffer. If ``None``, train on the
            last batch only.
        advantage: function that adds advantages and value targets to each batch before training.
        evaluate: evaluator that is called whenever the plan contains an evaluation.
        logger: logger or loggers that receive each row of metrics.
        hooks: kit or TorchRL hook objects, which define ``register(trainer, name)``.
        folder: run folder. Checkpoints are written to its subfolder ``checkpoints``. If ``None``,
            none are written.
        log_every: policy steps (offline: gradient steps) between rows of metrics. ``None`` means
            1% of the run.
        checkpoint_every: policy steps (offline: gradient steps) between checkpoints. ``None`` means
            10% of the run.
        loss_module: loss module for TorchRL's hooks and steppers; default: the update's loss.
        optimizer: optimiser for TorchRL's hooks and steppers; default: the update's optimiser.
        config: config of the run as plain values, passed to loggers.
        resume_from: checkpoint to resume from, written by a trainer that was built in the same way.
        progress: whether to print the plan, progress and ledger. A string is printed as the title.
        nan_guard: whether a non-finite training metric stops the run.
        ranks: processes that train together (:meth:`Ranks.from_environment
            <kit.distributed.Ranks.from_environment>`); ``None``: only this process. Hooks with
            ``kind = "observer"``, loggers and evaluations run on rank 0.

    Attributes:
        ledger: step counts so far.
        stop_reason: reason why the run stopped early, or ``None``.

    Raises:
        SettingError: if the components are incompatible with each other or with the plan.
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
        ranks: Ranks | None = None,
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
        checks.raise_first(
            compatibility.in_collection(plan, collector, 1 if ranks is None else ranks.size),
            compatibility.in_buffer(plan, minibatches),
            () if collector is None else plan_fit.in_collector(plan, collector, joins_steps=joins),
            compatibility.in_evaluation(plan, evaluate, collector),
            in_checkpoints(folder, minibatches),
        )
        raw = compatibility.stores_raw(plan, minibatches, advantage)
        checks.raise_first(compatibility.in_raw_batches(collector, raw))
        if raw:
            minibatches.normalize_by(normalizer_of(collector))  # type: ignore[attr-defined]
        super().__init__(
            plan, collector, update, minibatches,
            logger=logger, loss_module=loss_module, optimizer=optimizer, ranks=ranks,
        )  # fmt: skip
        self.advantage, self.evaluate = advantage, evaluate
        self.batches = counted(collector, plan)
        self.batches.evaluate = evaluate
        self.config = config or {}
        self.folder = None if folder is None else as_folder(folder)
        # Read the transforms now, because TorchRL's collectors drop their environments on shutdown.
        self._transforms = normalization_of_transforms(collector=collector, evaluate=evaluate)
        self._released = self._complete = self._started = False
        self._prefill: TensorDictBase | None = None
        self.checkpoints = RunCheckpoints(self._parts, self.policy_parts, self.ranks)
        self._is_loaded = False  # whether stage "load" has yet to run
        self.meeting = Meeting(self)
        self._phase = UpdatePhase(self)
        if isinstance(update, Update):
            vary = not (plan.is_exact if plan.on_policy else plan.offline)
            update.shapes_vary = vary and plan.minibatch_size is None
            update.begin_run()
        elif isinstance(update, OptimizationStepper):
            update.register(self)
        requested = list(hooks)
        if nan_guard and not any(isinstance(hook, NaNGuard) for hook in requested):
            self.add(NaNGuard())  # must run before hooks that save checkpoints
        for hook in requested:
            self.add(hook)
        if progress and not any(isinstance(hook, Console) for hook in requested):
            self.add(Console(progress if isinstance(progress, str) else ""))
        checks.raise_first(
            compatibility.in_updates(plan, update, self.loss_module, advantage, self.stages),
            compatibility.in_ranks(ranks, plan, update, self.loss_module, self.stages, collector),
            compatibility.in_networks(update, collector, evaluate, advantage, self.stages),
            compatibility.in_priorities(self.buffer, self.loss_module),
            compatibility.in_rewards(self.buffer, self.stages),
            compatibility.in_discounts(
                self.loss_module, advantage, normalizer_of(collector), self.buffer, self.stages
            ),
        )
        saving = (BestPolicy, SavePolicy)
        if any(isinstance(hook, saving) for hook in self.registered_modules.values()):
            checks.raise_first(in_saved_policies(collector))
        self.numbers = IsolatedRNG()
        make_parts_when_loaded(self.loss_module)
        for one in updates_of(self).values() if self.ranks.size > 1 else ():
            one.ranks = self.ranks
        if resume_from is not None:
            self.load(resume_from)

    # ------------------------------------------------------------------ the loop
    @isolated_rng
    def run(self) -> StepLedger:
        """Run the rest of the plan and return the ledger.

        Raises:
            SettingError: if components are incompatible, or the run stopped early and its
                environments are closed.
            PlanMismatchError: if step counts differ from the plan.
            HookError: if a hook raises.
            EnvError: if an environment fails.
        """
        checks.raise_first(
            compatibility.in_learning_rates(self.update, self.registered_modules),
            compatibility.in_hooks(self.plan, self.update, self.buffer, self.stages),
            compatibility.in_targets(self.plan, self.update, self.loss_module, self.stages),
            compatibility.in_rewards(self.buffer, self.stages),
            plan_fit.in_counts(self.collector, self.ledger),
        )
        # Calling run() after the run has completed is allowed: it does nothing.
        if self._released and not self._complete:
            reason = f"stopped after {self.policy_steps:,} policy steps and closed its environments"
            last = self.last_checkpoint
            resume = "" if last is None else f" with resume_from={str(last)!r}"
            raise SettingError("trainer", "Trainer", reason, f"create another Trainer{resume}")
        self.batches.share_memory(self._can_reuse_batches)
        with self._lifecycle():
            if self.ledger.iterations == 0:
                self.meeting.agree("setup")
                if not self._stop_training:  # a hook may stop the run at stage "setup"
                    self.begin()
                    self.meeting.agree("begin")
                if self._stop_training:  # no iteration was run, so nothing is saved
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
                    self.write_row()  # a resumed run drops this row
        self.ledger.verify(self.plan)
        self._complete = self.schedule.done
        return self.ledger

    def _can_reuse_batches(self) -> bool:
        replays = self.advantage is None and isinstance(self.buffer, ReplayMinibatches)
        copied = replays and self.buffer.copies
        hook = getattr(self.collector, "post_collect_hook", None)
        return copied and hook is None and not self.stages.keeps_batches

    @isolated_rng
    def begin(self) -> None:
        """Collect the prefill and run the evaluations that precede the first iteration.

        Open episodes already in the buffer are closed, because the collector starts new episodes.
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
        """Collect the next batch. In an offline run, return an empty batch."""
        self._start()  # a custom loop that resumes from a checkpoint does not call begin()
        self.stages.fire("pre_collect")
        began = time.perf_counter()
        batch = self.batches.next()
        self.meeting.merge("normalization")
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
        """Close open episodes in the buffer so that the next batch does not continue them."""
        if getattr(self.buffer, "joins_steps", False):
            self.buffer.close_open_episodes(self.plan.num_envs)

    @isolated_rng
    def train(self, batch: TensorDictBase, due: int) -> None:
        """Take the gradient steps that are due. If none are due, only store the batch."""
        if not due:
            self._phase.store(batch)
            return
        began = time.perf_counter()
        self._phase.run(batch, due)
        self.journal.spent("update", began)

    @isolated_rng
    def finish_iteration(self, batch: TensorDictBase, due: Due) -> None:
        """Count the iteration, then evaluate, log and save if due."""
        self.ledger.iterations += 1
        if isinstance(self.update, Update):
            self.update.advance(self.policy_steps)
        self.meeting.end_update(due.gradient_steps)
        self.stages.fire("post_steps")
        self.log("post_steps_log", batch)
        self.evaluations(due.evaluations)
        if due.row:
            self.write_row()
        self.meeting.agree()
        if (due.checkpoint or self._save_requested) and not self._stop_training:
            self.save()
            if self._stop_training:  # a hook stopped the run while saving
                self.checkpoints.saved_at = 0  # makes run() save again at the end

    def evaluations(self, times: int) -> None:
        """Evaluate the policy ``times`` times."""
        for _ in range(times):
            assert self.evaluate is not None
            began = time.perf_counter()
            found: tuple[dict[str, Any], bool] = {}, False
            if self.ranks.is_first:
                result = self.evaluate(self.ledger.evaluations)
                found = dict(result), self.journal.evaluated(result)
            result, is_best = self.ranks.gather_objects(found, "evaluation")[0]
            self.journal.spent("evaluate", began)
            self.ledger.evaluated(self.evaluate.episodes)
            self.stages.fire("evaluation", result, is_best)

    def write_row(self) -> None:
        """Log a row of counters and metrics."""
        checks.raise_first(plan_fit.in_random_steps(self.plan, self.ledger, self.collector))
        self.batches.count_environment(self.ledger)
        self.meeting.sum_counts()
        self.journal.note(self.batches.metrics())
        row = self.journal.write_row(self.ledger.counters(), self.batches.take_episodes())
        self._publish(row)
        self.stages.fire("log_row", row)

    # ------------------------------------------------------------------ hooks and checkpoints
    def add(self, hook: Any, name: str | None = None) -> Self:
        """Register a hook object. If a run was just resumed, also restore the hook's saved state.

        Observers are registered on rank 0 only.

        Raises:
            SettingError: if another hook has the same name.
        """
        if isinstance(hook, Hook) and hook.kind == "observer" and not self.ranks.is_first:
            return self
        before = set(self.registered_modules)
        super().add(hook, name)
        added = self.registered_modules.keys() - before
        self.checkpoints.load_added(added, self.ledger.iterations)
        return self

    def save(self) -> Path | None:
        """Write a checkpoint now. This method may only be called between iterations.

        Raises:
            WriteError: if the checkpoint cannot be written. Earlier checkpoints are left unchanged.
            SettingError: if called during an iteration.
        """
        self._save_requested = False
        if self.folder is None:
            return None
        checks.raise_first(in_saving(self.batches.iteration, self.ledger))
        self.stages.fire("save")
        self.batches.count_environment(self.ledger)
        self.meeting.compare()
        if self.last_checkpoint is None:
            optimizers = [self.optimizer, *getattr(self.update, "optimizers", {}).values()]
            warn_of_lost_optimizers(self.registered_modules.values(), optimizers)
        folder, counters = self.folder / "checkpoints", self.ledger.counters()
        self.last_checkpoint = self.checkpoints.save(folder, self.schedule.progress, counters)
        self.stages.fire("post_save", self.last_checkpoint)
        return self.last_checkpoint

    def load(self, checkpoint: Path | str) -> Self:
        """Load a checkpoint from a trainer that was built in the same way, to continue its run.

        Raises:
            SettingError: if the checkpoint does not match this trainer or its plan.
        """
        self.last_checkpoint = Path(checkpoint)
        self.checkpoints.load(self.last_checkpoint)
        checks.raise_first(in_resumed(self.plan, self.ledger, checkpoint))
        if not getattr(self.batches.collector, "exact_resume", False):
            lost = self.batches.not_resumable() or "the collector does not save it"
            warn_of_lost_environments(lost)
            # Batches of whole episodes contain no open episodes.
            if hasattr(self.buffer, "close_open_episodes") and not self.plan.collects_episodes:
                self.buffer.close_open_episodes(self.plan.num_envs)
        self._phase.take_over()
        self._is_loaded = True
        return self

    def _parts(self) -> dict[str, Any]:
        """Return the components whose state a resumed run needs, keyed by name."""
        # TorchRL's steppers are registered modules, but do not save the optimiser.
        optimizer = "update" if isinstance(self.update, Update) else "optimizer"
        names = ("ledger", "schedule", "batches", "buffer", "journal", "loss_module", optimizer)
        parts = {name: getattr(self, name) for name in (*names, "advantage")}
        parts |= {"random_numbers": self.numbers, **self._transforms}
        return stateful_parts(parts, self.collector, self.evaluate, self.registered_modules)

    def policy_parts(self) -> dict[str, Any]:
        """Return the components with policy weights or normalisation statistics, keyed by name."""
        parts = {} if self.loss_module is None else {"loss_module": self.loss_module}
        state = PolicyState(self.collector, self.evaluate, self.loss_module, with_noise=False)
        parts |= {"policies": state} if state.state_dict() else {}
        return {**parts, **normalization_of(self.collector, self.evaluate), **self._transforms}

    def load_policy(self, checkpoint: Path | str, best: bool = False) -> dict[str, int]:
        """Load only weights and normalisation statistics, for evaluation.

        Args:
            checkpoint: checkpoint of a trainer that was built in the same way.
            best: whether to load the policy with the best evaluation, as saved by ``BestPolicy``.

        Returns:
            Dictionary with ``policy_steps`` and ``gradient_steps`` at which the policy was saved.

        Raises:
            SettingError: if the best policy was not saved, no evaluation has run, or normalisation
                statistics are stored in another process.
        """
        checks.raise_first(in_saved_policies(self.collector))
        return self.checkpoints.load_policy(Path(checkpoint), best)

    def save_policy(self, folder: Path | str) -> Path:
        """Write a checkpoint of the last and the best policy for :meth:`load_policy`.

        Args:
            folder: folder in which ``checkpoints`` is created. If you add a ``config.yaml``,
                ``kit evaluate`` and ``init_from`` accept the folder as a run folder. The folder
                cannot be used to resume a run.

        Raises:
            WriteError: if the checkpoint cannot be written.
        """
        below, counters = Path(folder) / "checkpoints", self.ledger.counters()
        return self.checkpoints.save_policy(below, self.schedule.progress, counters)

    # ------------------------------------------------------------------ start and shutdown
    @isolated_rng
    def reset(self, seed: int | None = None, *, prefill_random: bool | None = None) -> Self:
        """Prepare another run of the plan with the trained networks.

        Step counts and schedules restart, and the replay buffer is emptied.
        Weights, optimisers and normalisation statistics are kept. Environments that the last run
        closed are created again.

        Args:
            seed: new seed for the RNG state and the environments. ``None``: the RNG state
                continues, and provides the seed of the environments.
            prefill_random: whether the actions of the new prefill are random. ``None``: as planned.

        Raises:
            SettingError: if the run has a folder, or its environments cannot be created again.
        """
        checks.raise_first(in_restarted(self.folder, self.collector))
        if self._started:
            self.shutdown()
        if seed is not None:
            seed_process(seed)
            torch.manual_seed(seed)
        if prefill_random is not None:
            self.plan = self.plan.replace(prefill_random=prefill_random)
        restart_parts(self, int(torch.randint(2**31, ())) if seed is None else seed)
        self._released = self._complete = self._started = self._stop_training = False
        self._prefill, self.stop_reason = None, None
        self._phase = UpdatePhase(self)
        return self

    @contextlib.contextmanager
    def _lifecycle(self) -> Iterator[None]:
        """Start loggers and hooks, and release all resources at the end, even after an error."""
        try:
            self._start()
            yield
        except BaseException as error:
            for end in (functools.partial(self.stages.fire, "error", error), self.shutdown):
                try:
                    end()
                except Exception as later:  # report the first error
                    error.add_note(f"shutdown then raised {type(later).__name__}: {later}")
            raise
        self.shutdown()

    def _start(self) -> None:
        """Start loggers and hooks, unless a custom training loop has already started them."""
        if not self._started:
            checks.raise_first(in_folder(self.folder, self.last_checkpoint))
            self._started = True
            self.meeting.begin()
            done = getattr(self.ledger, self.plan.axis)
            self.journal.start(done, self.config, self.plan.table())
            self.stages.fire("setup")
            if self.folder is not None:
                self.checkpoints.check_states()
        if self._is_loaded:
            self._is_loaded = False
            self.stages.fire("load", self.last_checkpoint)

    def shutdown(self) -> None:
        """Release all resources, even if releasing some of them raises an error."""
        self._released, self._started = True, False
        with contextlib.ExitStack() as last_first:
            if self.evaluate is not None:
                last_first.callback(self.evaluate.close)
            last_first.callback(self.batches.shutdown)
            last_first.callback(lambda: self.journal.close(self.plan.table(self.ledger)))
            last_first.callback(self.stages.fire, "shutdown")
            last_first.callback(self.batches.count_environment, self.ledger)
            if isinstance(self.update, Update):  # later callers may read the minibatch
                self.update.writes_to_minibatch = True
