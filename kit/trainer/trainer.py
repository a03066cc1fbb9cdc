"""The loop: collect, update, log, evaluate, save."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.trainers import OptimizationStepper, TrainerHookBase

from kit.buffers import Minibatches, RolloutBatches, as_minibatches
from kit.hooks.evaluation import Evaluator
from kit.logging.journal import Journal
from kit.logging.loggers import RowLogger
from kit.logging.metrics import weighted_mean
from kit.steps import Difference, SettingError, StepLedger, StepPlan
from kit.steps.errors import whole_number
from kit.steps.every import multiples_crossed
from kit.trainer.batches import CountedBatches
from kit.trainer.checkpoint import Checkpoints, normalization_of, parts_of
from kit.trainer.checks import check_hooks, check_parts
from kit.trainer.torchrl_protocol import TorchRLProtocol
from kit.update import Update

Advantage = Callable[[TensorDictBase], TensorDictBase]


class PlanNotKept(RuntimeError):
    """What was counted is not what was planned.

    Args:
        differences: the counts that differ.
    """

    def __init__(self, differences: Sequence[Difference]) -> None:
        self.differences = list(differences)
        super().__init__("the run did not do what was planned: " + "; ".join(map(str, differences)))


class Trainer(TorchRLProtocol):
    """Runs a plan: in each iteration one collection, then the gradient steps that are due.

    The plan says what is due, the buffer what a minibatch is, the update what a gradient step is;
    the loop is the same for every algorithm. It speaks TorchRL's hook protocol, so TorchRL's hook
    objects register unchanged, and has TorchRL's attribute names where hooks read them.

    Args:
        plan: what will be done.
        collector: where batches come from; the kit's or TorchRL's.
        update: makes gradient steps; the kit's :class:`~kit.update.Update` or one of TorchRL's
            steppers. ``None`` trains nothing, or leaves it to a hook at stage ``optimizer``
            (then a ``loss_module`` is given).
        buffer: where minibatches come from; a TorchRL replay buffer is taken as it is, ``None``
            makes passes over the last batch.
        advantage: adds what the loss needs to each batch that is trained on: advantages, targets.
        evaluate: measures the policy when the plan says so.
        logger: takes one row of metrics per log point; several may be given.
        hooks: objects with ``register(trainer, name)``; the kit's or TorchRL's.
        folder: where checkpoints are written, below ``checkpoints``; ``None`` writes none.
        log_every: policy steps between log points; ``None``: a hundredth of the run.
        checkpoint_every: policy steps between checkpoints; ``None``: a tenth of the run.
        loss_module: what TorchRL's hooks and steppers find under this name; the update's by
            default.
        optimizer: likewise.
        config: settings of the run, for loggers: plain values.
        resume_from: checkpoint to go on from, of a trainer that was built in the same way.

    Attributes:
        ledger: what has happened.
        stop_reason: why the run ended before its plan; ``None`` otherwise.
        clip_norm: at what TorchRL's steppers and optimiser hooks clip gradients: the update's by
            default.
        clip_grad_norm: whether it is the norm of the gradients that they clip.
    """

    def __init__(
        self,
        plan: StepPlan,
        *,
        collector: BaseCollector,
        update: Update | OptimizationStepper | None = None,
        buffer: Minibatches | ReplayBuffer | None = None,
        advantage: Advantage | None = None,
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
    ) -> None:
        loss_module = loss_module or getattr(update, "loss_module", None)
        self.trains = _trains(plan)
        super().__init__(StepLedger(plan.world_size), loss_module, updates=self.trains)
        self.plan = plan
        self.collector = collector
        self.source = CountedBatches(collector, plan)
        self.update = self.optimization_stepper = update
        self.optimizer = optimizer or next(iter(getattr(update, "optimizers", {}).values()), None)
        self.clip_norm = getattr(update, "clip_norm", None) or getattr(update, "clip_value", None)
        self.clip_grad_norm = getattr(update, "clip_value", None) is None
        self.buffer = as_minibatches(buffer)
        self.replay_buffer = getattr(self.buffer, "buffer", None)
        self.advantage = advantage
        self.evaluate = evaluate
        self.config = config or {}
        self.folder = None if folder is None else Path(folder)
        self.clock = plan.clock()
        self.log_every = _period("log_every", log_every, plan, 100)
        self.checkpoint_every = _period("checkpoint_every", checkpoint_every, plan, 10)
        loggers = logger if isinstance(logger, Sequence) else [logger]
        self.journal = Journal(self, loggers)
        self.logger = loggers[0] if loggers else None
        self._prefill: TensorDictBase | None = None
        self.checkpoints: Checkpoints | None = None
        self.last_checkpoint: Path | None = None
        self.last_metrics: TensorDictBase | None = None
        self._drawn = 0
        check_parts(self)
        if isinstance(update, OptimizationStepper) and not isinstance(update, Update):
            update.register(self)
        for hook in hooks:
            self.add(hook)
        if resume_from is not None:
            self.load(resume_from)

    # ------------------------------------------------------------------ the loop
    def run(self) -> StepLedger:
        """Do what is left of the plan and return what was counted.

        Raises:
            PlanNotKept: if counts differ from the plan.
            HookError: if a hook raises.
            EnvironmentFault: if an environment fails.
        """
        check_hooks(self)
        try:
            self.journal.start()
            self.stages.fire("setup")
            if self.ledger.iterations == 0:
                self._before_the_first_iteration()
            while not (self._is_done or self._stop_training):
                self._iterate()
            self.save()
        except BaseException as error:
            self._shut_down_after(error)
            raise
        self.shutdown()
        differences = self.ledger.compare(self.plan)
        if differences:
            raise PlanNotKept(differences)
        return self.ledger

    @property
    def _is_done(self) -> bool:
        """Whether the plan is done: its iterations, or its steps where only these are known."""
        if self.plan.iterations is not None:
            return self.ledger.iterations >= self.plan.iterations
        return self.policy_steps >= self.plan.total_policy_steps

    def _iterate(self) -> None:
        before = self.ledger.policy_steps
        batch = self._collect()
        due = self.clock.advance(self.source.collected)
        if due:
            self._update(batch, due)
        else:
            self.buffer.extend(batch)
        self.ledger.iterations += 1
        self.stages.fire("post_steps")
        self.journal.log("post_steps_log", batch)
        evaluated = self._evaluate_if_due(before)
        last = self._is_done or self._stop_training
        save = self.folder is not None and not last
        save &= multiples_crossed(self.checkpoint_every, before, self.policy_steps) > 0
        log = multiples_crossed(self.log_every, before, self.policy_steps) > 0
        if log or evaluated or last or save:
            self.journal.write_row()
        if save:
            self.save()

    def _collect(self) -> TensorDictBase:
        with self.journal.timed("collect"):
            batch = self.source.next()
        self.ledger.collected(
            self.source.collected, 0, 0, random_policy_steps=self.source.collected_at_random
        )
        if self._prefill is not None:
            batch = torch.cat([self._prefill, batch], dim=-1)
            self._prefill = None
        batch = self.stages.pipe("batch_process", batch)
        self.journal.log("pre_steps_log", batch)
        return batch

    def _update(self, batch: TensorDictBase, due: int) -> None:
        """Make ``due`` gradient steps, epoch by epoch."""
        self._skip_phase, self._drawn = False, 0
        with self.journal.timed("update"):
            self.stages.fire("pre_optim_steps")
            if self.advantage is not None:
                batch = self.advantage(batch)
            filled, made = False, 1
            while due and not self._skip_phase:
                self.journal.log("pre_epoch_log", batch)
                processed = self.stages.pipe("pre_epoch", batch)
                if not filled or self.stages["pre_epoch"]:
                    self.buffer.extend(self._trained_on(processed))
                    filled = True
                before, made = made, self._update_epoch(due)
                if not before and not made:
                    name = type(self.buffer).__name__
                    raise SettingError("buffer", name, "has no minibatch to train on")
                due -= made
                self.journal.log("post_epoch_log", batch)
                self.stages.fire("post_epoch")
            self.ledger.skipped(self._skipped_samples(due), due)
            self.journal.log_summary(self.ledger.local_gradient_steps)

    def _trained_on(self, batch: TensorDictBase) -> TensorDictBase:
        """Leave out, before minibatches are cut, what neither the loss nor a hook will read."""
        read = getattr(self.update, "keys_read", None)
        stages = ("process_optim_batch", "process_loss", "optimizer", "post_loss", "post_optim_log")
        if (
            not read
            or not isinstance(self.buffer, RolloutBatches)
            or any(self.stages[s] for s in stages)
        ):
            return batch
        return batch.select(*read, ("collector", "mask"), strict=False)

    def _update_epoch(self, due: int) -> int:
        """Make the gradient steps of one update epoch, at most ``due``; return how many."""
        made = 0
        for drawn in self.buffer.epoch(self.plan, due):
            try:
                minibatches = [self.stages.pipe("process_optim_batch", m) for m in drawn]
            except StopIteration:  # how TorchRL's replay buffer hook says that a pass has ended
                break
            self._gradient_step(minibatches)
            self.ledger.updated(sum(minibatch.numel() for minibatch in minibatches))
            self._drawn += len(minibatches)
            made += 1
            self.stages.fire("post_optim")
            self.journal.log("post_optim_log", minibatches[-1])
        self.ledger.update_epochs += int(self.plan.on_policy and made > 0)
        return made

    def _gradient_step(self, minibatches: list[TensorDictBase]) -> None:
        if self.stages["process_loss"] or self.stages["optimizer"]:
            self._note_losses(self._open_gradient_step(minibatches))
        elif isinstance(self.update, Update):
            self._note_losses(self.update(*minibatches))
            for minibatch in minibatches:
                self._after_loss(minibatch)
        else:  # TorchRL's steppers take one minibatch at a time and accumulate by themselves
            assert self.update is not None
            for minibatch in minibatches:
                self._note_losses(self.update.step(self, minibatch))
                self._after_loss(minibatch)

    def _open_gradient_step(self, minibatches: list[TensorDictBase]) -> TensorDictBase:
        """Make a gradient step whose inside is open to hooks: eagerly."""
        own = self.update if isinstance(self.update, Update) else None
        parts = []
        for minibatch in minibatches:
            losses = self.compute_loss(minibatch) if own is None else own.losses(minibatch)
            self._after_loss(minibatch)
            parts.append(self.stages.losses(minibatch, losses))
        losses = weighted_mean(parts, [minibatch.numel() for minibatch in minibatches])
        if not self.stages["optimizer"]:
            assert own is not None
            return own.minimize(losses)
        metrics = self.stages.optimize(losses, self.clip_grad_norm, self.clip_norm)
        if own is not None:
            own.stepped()
        return metrics

    def _after_loss(self, minibatch: TensorDictBase) -> None:
        self.stages.pipe("post_loss", minibatch)
        self.buffer.update_priority(minibatch)

    def _note_losses(self, metrics: TensorDictBase) -> None:
        self.last_metrics = metrics
        self.journal.metrics.add(metrics)

    def _before_the_first_iteration(self) -> None:
        if self.plan.prefill_steps and not self.plan.prefill_is_iteration:
            batch = self._collect()
            if self.plan.prefill_in_first_batch:
                self._prefill = batch
            else:
                self.buffer.extend(batch)
        due = self.plan.evaluations(0) if self.plan.is_exact else self.plan.initial_evaluations
        for _ in range(due):
            self._evaluate()
        if due:
            self.journal.write_row()

    # ------------------------------------------------------------------ evaluation
    def _evaluate_if_due(self, before: int) -> int:
        plan, iteration = self.plan, self.ledger.iterations
        if plan.is_exact or (plan.evaluation_every_iterations and plan.iterations is not None):
            due = plan.evaluations(iteration)
        else:
            crossed = multiples_crossed(plan.evaluation_every, before, self.policy_steps)
            due = int(crossed > 0 or (plan.final_evaluation and self._is_done))
        for _ in range(due):
            self._evaluate()
        return due

    def _evaluate(self) -> None:
        assert self.evaluate is not None
        with self.journal.timed("evaluate"):
            self.journal.note(self.evaluate(self.ledger.evaluations))
        self.ledger.evaluated(self.evaluate.episodes)

    # ------------------------------------------------------------------ save and resume
    def save(self) -> Path | None:
        """Write a checkpoint now, between two iterations.

        Raises:
            NotSaved: if it could not be written; earlier ones are untouched.
        """
        if self.folder is None:
            return None
        self.source.count_environment(self.ledger)
        if self.checkpoints is None:
            self.checkpoints = Checkpoints(self.folder / "checkpoints", parts_of(self))
        self.last_checkpoint = self.checkpoints.save(
            self.policy_steps, {"counters": self.ledger.counters()}
        )
        return self.last_checkpoint

    def load(self, checkpoint: Path | str) -> Trainer:
        """Go on from a checkpoint of a trainer that was built in the same way."""
        self.last_checkpoint = Path(checkpoint)
        Checkpoints(self.last_checkpoint.parent, parts_of(self)).load(self.last_checkpoint)
        if not self.source.exact_resume and hasattr(self.buffer, "close_open_episodes"):
            self.buffer.close_open_episodes(self.plan.num_envs)
        return self

    def load_policy(self, checkpoint: Path | str) -> int:
        """Load weights and normalisation alone, to evaluate; the run folder is only read.

        Returns:
            Policy steps after which the checkpoint was written.
        """
        parts = {"loss_module": self.loss_module, **normalization_of(self)}
        checkpoints = Checkpoints(Path(checkpoint).parent, parts, random_numbers=False)
        return int(checkpoints.load(Path(checkpoint))["counters"]["policy_steps"])

    # ------------------------------------------------------------------ ends
    def _skipped_samples(self, due: int) -> int:
        """Transitions that ``due`` gradient steps would still have seen in this iteration."""
        if not due or not self.plan.is_exact:
            return 0
        sizes = self.plan.minibatch_sizes(self.ledger.iterations + 1)
        return sum(sizes[self._drawn :]) * (self.plan.sequence_length or 1)

    def shutdown(self) -> None:
        """Release everything, even if something raises on the way."""
        with contextlib.ExitStack() as last_first:
            if self.evaluate is not None:
                last_first.callback(self.evaluate.close)
            last_first.callback(self.collector.shutdown, raise_on_error=False)
            last_first.callback(self.journal.close)
            last_first.callback(self.stages.fire, "shutdown")
            last_first.callback(self.source.count_environment, self.ledger)

    def _shut_down_after(self, error: BaseException) -> None:
        """Release everything after ``error``, which is what the user is to see."""
        try:
            self.shutdown()
        except Exception as another:
            error.add_note(f"shutting down then raised {type(another).__name__}: {another}")


def _trains(plan: StepPlan) -> bool:
    rules = (plan.update_epochs, plan.replay_ratio, plan.gradient_steps_per_iteration)
    return any(rule is not None for rule in rules)


def _period(field: str, period: int | None, plan: StepPlan, share: int) -> int:
    """Return the policy steps between two log points or checkpoints."""
    if period is None:
        return max((plan.total_policy_steps or 1) // share, 1)
    return whole_number(field, period, at_least=1)
