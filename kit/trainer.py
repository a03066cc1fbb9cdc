"""The loop: collect, update, log, evaluate, save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.trainers import OptimizationStepper, TrainerHookBase

from kit.buffers import Minibatches, as_minibatches
from kit.checkpoint import Checkpoints
from kit.collectors.source import Source
from kit.hooks.evaluation import Evaluator
from kit.journal import Journal
from kit.loggers import RowLogger
from kit.stages import Stages
from kit.steps import Difference, SettingError, StepLedger, StepPlan
from kit.steps.every import multiples_crossed
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


class Trainer:
    """Runs a plan: in each iteration one collection, then the gradient steps that are due.

    The plan says what is due, the buffer what a minibatch is, the update what a gradient step is;
    the loop is the same for every algorithm. It speaks TorchRL's hook protocol, so TorchRL's hook
    objects register unchanged, and has TorchRL's attribute names where hooks read them.

    Args:
        plan: what will be done.
        collector: where batches come from; the kit's or TorchRL's.
        update: makes gradient steps; the kit's :class:`~kit.update.Update` or one of TorchRL's
            steppers. ``None`` trains nothing, or leaves it to a hook at stage ``optimizer``.
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
    """

    clip_grad_norm = True
    clip_norm: float | None = None

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
        self.plan = plan
        self.collector = collector
        self.source = Source(collector, plan)
        self.update = self.optimization_stepper = update
        self.loss_module = loss_module or getattr(update, "loss_module", None)
        self.optimizer = optimizer or next(iter(getattr(update, "optimizers", {}).values()), None)
        self.buffer = as_minibatches(buffer)
        self.replay_buffer = getattr(self.buffer, "buffer", None)
        self.advantage = advantage
        self.evaluate = evaluate
        self.config = config or {}
        self.folder = None if folder is None else Path(folder)
        self.ledger = StepLedger(plan.world_size)
        self.clock = plan.clock()
        total = plan.total_policy_steps or 1
        self.log_every = log_every or max(total // 100, 1)
        self.checkpoint_every = checkpoint_every or max(total // 10, 1)
        loggers = logger if isinstance(logger, Sequence) else [logger]
        self.journal = Journal(self, loggers)
        self.logger = loggers[0] if loggers else None
        self.stages = Stages(updates=self._trains)
        self.stop_reason: str | None = None
        self._stop_training = False
        self._skip_phase = False
        self._log_dict: defaultdict[str, list[Any]] = defaultdict(list)
        self._modules: dict[str, Any] = {}
        self._prefill: TensorDictBase | None = None
        self.checkpoints: Checkpoints | None = None
        self.last_checkpoint: Path | None = None
        self.last_metrics: TensorDictBase | None = None
        _check_fits(self)
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
        self.journal.start()
        try:
            self.stages.fire("setup")
            if self.ledger.iterations == 0:
                self._before_the_first_iteration()
            while self.ledger.iterations < self.plan.iterations and not self._stop_training:
                self._iterate()
            self.save()
        finally:
            self._shut_down()
        differences = self.ledger.compare(self.plan)
        if differences:
            raise PlanNotKept(differences)
        return self.ledger

    def _iterate(self) -> None:
        before = self.ledger.policy_steps
        batch = self._collect()
        due = self.clock.advance(self.source.collected)
        if due and self._trains:
            self._update(batch, due)
        else:
            self.buffer.extend(batch)
        self.ledger.iterations += 1
        self.stages.fire("post_steps")
        self.journal.log("post_steps_log", batch)
        evaluated = self._evaluate_if_due(before)
        last = self.ledger.iterations == self.plan.iterations or self._stop_training
        save = not last and multiples_crossed(self.checkpoint_every, before, self.policy_steps) > 0
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
        self._skip_phase = False
        with self.journal.timed("update"):
            self.stages.fire("pre_optim_steps")
            if self.advantage is not None:
                batch = self.advantage(batch)
            filled = False
            while due and not self._skip_phase:
                self.journal.log("pre_epoch_log", batch)
                processed = self.stages.pipe("pre_epoch", batch)
                if not filled or processed is not batch or self.stages["pre_epoch"]:
                    self.buffer.extend(processed)
                    filled = True
                due -= self._update_epoch(due)
                self.journal.log("post_epoch_log", batch)
                self.stages.fire("post_epoch")
            self.ledger.skipped(self._samples_of(due), due)
            self.journal.log_summary(self.ledger.local_gradient_steps)

    def _update_epoch(self, due: int) -> int:
        """Make the gradient steps of one update epoch, at most ``due``; return how many."""
        made = 0
        for minibatches in self.buffer.epoch(self.plan, due):
            minibatches = [self.stages.pipe("process_optim_batch", m) for m in minibatches]
            self.last_metrics = self._gradient_step(minibatches)
            self.journal.metrics.add(self.last_metrics)
            self.ledger.updated(sum(minibatch.numel() for minibatch in minibatches))
            made += 1
            self.stages.fire("post_optim")
            self.journal.log("post_optim_log", minibatches[-1])
        if made == 0:
            raise SettingError("buffer", type(self.buffer).__name__, "has no minibatch to train on")
        self.ledger.update_epochs += int(self.plan.on_policy)
        return made

    def _gradient_step(self, minibatches: list[TensorDictBase]) -> Any:
        if self.stages["process_loss"] or self.stages["optimizer"]:
            return self._open_gradient_step(minibatches)
        if isinstance(self.update, Update):
            metrics = self.update(*minibatches)
        else:
            assert self.update is not None
            metrics = self.update.step(self, minibatches[0])
        for minibatch in minibatches:
            self.stages.pipe("post_loss", minibatch)
        return metrics

    def _open_gradient_step(self, minibatches: list[TensorDictBase]) -> Any:
        """A gradient step whose inside is open to hooks: eager, one minibatch at a time."""
        losses = self.compute_loss(minibatches[0])
        self.stages.pipe("post_loss", minibatches[0])
        losses = self.stages.losses(minibatches[0], losses)
        if self.stages["optimizer"]:
            return self.stages.optimize(losses, self.clip_grad_norm, self.clip_norm)
        assert isinstance(self.update, Update)
        return self.update.minimize(losses)

    def _before_the_first_iteration(self) -> None:
        if self.plan.prefill_steps and not self.plan.prefill_is_iteration:
            batch = self._collect()
            if self.plan.prefill_in_first_batch:
                self._prefill = batch
            else:
                self.buffer.extend(batch)
        for _ in range(self.plan.initial_evaluations):
            self._evaluate()
        if self.plan.initial_evaluations:
            self.journal.write_row()

    # ------------------------------------------------------------------ evaluation
    def _evaluate_if_due(self, before: int) -> int:
        iteration = self.ledger.iterations
        if self.plan.is_exact:
            due = self.plan.evaluations(iteration)
        else:
            crossed = multiples_crossed(self.plan.evaluation_every, before, self.policy_steps)
            ends = self.plan.final_evaluation and iteration == self.plan.iterations
            due = int(crossed > 0 or ends)
        for _ in range(due):
            self._evaluate()
        return due

    def _evaluate(self) -> None:
        assert self.evaluate is not None
        with self.journal.timed("evaluate"):
            self.journal.note(self.evaluate(self.ledger.evaluations))
        self.ledger.evaluated(self.evaluate.episodes)

    # ------------------------------------------------------------------ TorchRL's hook protocol
    def add(self, hook: Any, name: str | None = None) -> Trainer:
        """Register a hook object under ``name``, or under its own."""
        own = name or getattr(hook, "name", None) or _snake(type(hook).__name__)
        hook.register(self, own)
        return self

    def register_op(self, dest: str, op: Callable[..., Any], **kwargs: Any) -> None:
        """Register a function at a stage; see ``kit.stages.STAGES`` and docs/hooks.md.

        Raises:
            SettingError: if the stage does not exist or never runs, or if the function cannot be
                called as it does.
        """
        self.stages.register(dest, op, **kwargs)

    register_hook = register_op

    def register_module(self, module_name: str, module: Any) -> None:
        """Keep ``module``'s state in checkpoints.

        Raises:
            SettingError: if the name is used already.
        """
        if module_name in self._modules:
            raise SettingError("hook", module_name, "is registered already", "choose another name")
        self._modules[module_name] = module

    def request_stop(self, reason: str | None = None) -> None:
        """End the run after this iteration."""
        self._stop_training = True
        self.stop_reason = reason or "a hook asked for it"

    def skip_rest_of_update(self) -> None:
        """End this update phase after this epoch; what was due is counted as skipped."""
        self._skip_phase = True

    def compute_loss(self, sub_batch: TensorDictBase) -> TensorDictBase:
        """Return the losses of a minibatch."""
        return self.loss_module(sub_batch)  # type: ignore[no-any-return]

    @property
    def policy_steps(self) -> int:
        """Policy steps so far, in all processes."""
        return self.ledger.policy_steps

    @property
    def collected_frames(self) -> int:
        """Policy steps so far, under the name that TorchRL's hooks read."""
        return self.ledger.policy_steps

    @property
    def _optim_count(self) -> int:
        """Gradient steps of this process so far, under the name that TorchRL's hooks read."""
        return self.ledger.local_gradient_steps

    # ------------------------------------------------------------------ save and resume
    def _parts(self) -> dict[str, Any]:
        parts = {
            "ledger": self.ledger,
            "clock": self.clock,
            "source": self.source,
            "buffer": self.buffer,
            "journal": self.journal,
        }
        for name in ("loss_module", "update", "advantage"):
            if hasattr(getattr(self, name), "load_state_dict"):
                parts[name] = getattr(self, name)
        parts |= self._normalization()
        with_state = {n: m for n, m in self._modules.items() if hasattr(m, "load_state_dict")}
        return parts | {f"hook {name}": module for name, module in with_state.items()}

    def _normalization(self) -> dict[str, Any]:
        """The running normalisation of the environments; apart, so that it can be loaded alone."""
        normalizer = getattr(getattr(self.collector, "env", None), "normalizer", None)
        return {} if normalizer is None else {"normalization": normalizer}

    def save(self) -> Path | None:
        """Write a checkpoint now, between two iterations.

        Raises:
            NotSaved: if it could not be written; earlier ones are untouched.
        """
        if self.folder is None:
            return None
        self.source.count_environment(self.ledger)
        if self.checkpoints is None:
            self.checkpoints = Checkpoints(self.folder / "checkpoints", self._parts())
        self.last_checkpoint = self.checkpoints.save(
            self.policy_steps, {"counters": self.ledger.counters()}
        )
        return self.last_checkpoint

    def load(self, checkpoint: Path | str) -> Trainer:
        """Go on from a checkpoint of a trainer that was built in the same way."""
        self.last_checkpoint = Path(checkpoint)
        Checkpoints(self.last_checkpoint.parent, self._parts()).load(self.last_checkpoint)
        if not self.source.exact_resume and hasattr(self.buffer, "close_open_episodes"):
            self.buffer.close_open_episodes(self.plan.num_envs)
        return self

    def load_policy(self, checkpoint: Path | str) -> int:
        """Load weights and normalisation alone, to evaluate; the run folder is only read.

        Returns:
            Policy steps after which the checkpoint was written.
        """
        parts = {"loss_module": self.loss_module, **self._normalization()}
        checkpoints = Checkpoints(Path(checkpoint).parent, parts, random_numbers=False)
        return int(checkpoints.load(Path(checkpoint))["counters"]["policy_steps"])

    # ------------------------------------------------------------------ ends
    @property
    def _trains(self) -> bool:
        rules = (
            self.plan.update_epochs,
            self.plan.replay_ratio,
            self.plan.gradient_steps_per_iteration,
        )
        return any(rule is not None for rule in rules)

    def _samples_of(self, gradient_steps: int) -> int:
        """Transitions that gradient steps of this iteration would still have seen."""
        if not gradient_steps:
            return 0
        group = self.plan.minibatches_per_gradient_step or 1
        sizes = self.plan.minibatch_sizes(self.ledger.iterations + 1)
        return sum(sizes[-gradient_steps * group :]) * (self.plan.sequence_length or 1)

    def _shut_down(self) -> None:
        """Release everything, whatever happened before."""
        try:
            self.source.count_environment(self.ledger)
            self.stages.fire("shutdown")
        finally:
            self.journal.close()
            self.collector.shutdown(raise_on_error=False)
            if self.evaluate is not None:
                self.evaluate.close()

    shutdown = _shut_down


def _check_fits(trainer: Trainer) -> None:
    """Refuse parts that contradict the plan."""
    plan = trainer.plan
    evaluations = plan.evaluation_every or plan.initial_evaluations or plan.final_evaluation
    if trainer.evaluate is None and evaluations:
        raise SettingError(
            "evaluate",
            None,
            "leaves the evaluations of the plan undone",
            "give an Evaluator, or a plan with evaluation_every=None and final_evaluation=False",
        )
    if trainer.evaluate is not None and trainer.evaluate.episodes != plan.evaluation_episodes:
        raise SettingError(
            "evaluate",
            trainer.evaluate.episodes,
            "episodes are not those of the plan",
            [plan.evaluation_episodes],
        )
    trained = trainer._trains and trainer.update is None and trainer.loss_module is None
    if trained:
        raise SettingError("update", None, "leaves the plan's gradient steps undone", "give it")


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")
