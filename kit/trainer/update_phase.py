"""The update of an iteration: its batch goes to the buffer, and gradient steps follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tensordict import TensorDict, TensorDictBase

from kit.buffers import ReplayBatches
from kit.fast.nested import entry, leaves
from kit.logging.metrics import MetricMeans
from kit.steps import SettingError
from kit.trainer import checks
from kit.trainer.batches import size_of
from kit.trainer.torchrl_protocol import TorchRLProtocol
from kit.trainer.updates import Undisturbed, entries_may_be_left_out, gradient_step

_WRITERS: WeakKeyDictionary[Any, object] = WeakKeyDictionary()
"""By what joins steps to those that follow: the trainer that has written to it last."""


class UpdatePhase:
    """Fills the buffer of a trainer and makes the gradient steps that are due, epoch by epoch.

    Args:
        trainer: its plan, buffer, update, stages and counts.
    """

    def __init__(self, trainer: TorchRLProtocol) -> None:
        self.trainer = trainer
        self._metrics = MetricMeans()
        self._undisturbed = Undisturbed(trainer)
        self._drawn = 0
        self._writer = object()  # stands for the trainer, and keeps nothing alive

    def store(self, batch: TensorDictBase) -> None:
        """Give a batch to the buffer of which nothing is trained on now."""
        trainer = self.trainer
        self._fill(batch if trainer.plan.on_policy else self.processed("pre_epoch", batch))

    def run(self, batch: TensorDictBase, due: int) -> None:
        """Make the gradient steps that are due.

        Args:
            batch: of the iteration.
            due: gradient steps of this process, at least 1.

        Raises:
            SettingError: if the buffer has nothing to train on.
        """
        trainer = self.trainer
        trainer.skips_rest_of_update, self._drawn = False, 0
        if trainer.stages["post_optim_complete_log"]:
            self._metrics = MetricMeans()
        trainer.stages.fire("pre_optim_steps")
        if trainer.advantage is not None:
            batch = self._estimated(batch)
        made: int | None = None
        while due and not trainer.skips_rest_of_update:
            trainer.log("pre_epoch_log", batch)
            if made is None or trainer.stages["pre_epoch"]:
                self._fill(self.processed("pre_epoch", batch))
            before, made = made, self._epoch(due)
            if before == made == 0:
                name = type(trainer.buffer).__name__
                raise SettingError("buffer", name, "has no minibatch to train on")
            due -= made
            trainer.log("post_epoch_log", batch)
            trainer.stages.fire("post_epoch")
        if due:
            unseen = trainer.plan.unseen_samples(trainer.ledger.iterations + 1, self._drawn)
            trainer.ledger.skipped(unseen, due)
            self._pass_over(due)
        if trainer.stages["post_optim_complete_log"]:
            steps, means = trainer.ledger.local_gradient_steps, self._metrics.peek()
            trainer.log("post_optim_complete_log", steps, TensorDict(means))

    def _estimated(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch with advantages."""
        trainer = self.trainer
        estimated: TensorDictBase = trainer.advantage(batch)
        parts = (estimated, batch, trainer.advantage, trainer.loss_module, trainer.stages)
        checks.refuse(checks.in_estimated(*parts))
        return estimated

    def processed(self, stage: str, batch: TensorDictBase) -> TensorDictBase:
        """The batch as the hooks of a stage return it, before it is stored or trained on."""
        trainer = self.trainer
        if not trainer.stages[stage]:
            return batch
        before, paths = size_of(batch), leaves(batch)
        processed: TensorDictBase = trainer.stages.pipe(stage, batch)
        checks.refuse(checks.in_processed(stage, before, paths, processed, trainer))
        return processed

    def _fill(self, batch: TensorDictBase) -> None:
        """Give a batch to the buffer; of one that is used up now, the keys that will be read."""
        trainer = self.trainer
        if trainer.plan.offline:
            return
        keys: Sequence[Any] = ()
        if trainer.plan.on_policy and entries_may_be_left_out(trainer):
            keys = getattr(trainer.update, "keys_read", ())
        self._end_episodes_of_others()
        trainer.buffer.extend(batch, keys)

    def _end_episodes_of_others(self) -> None:
        """Let no step of another trainer that shares the buffer be joined to those of this one."""
        joining = self._joining
        if joining is None or _WRITERS.setdefault(joining, self._writer) is self._writer:
            return
        self.trainer.buffer.close_open_episodes(self.trainer.plan.num_envs)
        self.take_over()

    def take_over(self) -> None:
        """Take the steps in the buffer for those of this trainer, with which it goes on."""
        if (joining := self._joining) is not None:
            _WRITERS[joining] = self._writer

    @property
    def _joining(self) -> Any:
        """What joins steps to those that follow; ``None`` if nothing does."""
        buffer = self.trainer.buffer
        if not getattr(buffer, "joins_steps", False):
            return None
        own = getattr(buffer, "n_step", None) is not None  # steps wait beside TorchRL's buffer
        return buffer if own else getattr(buffer, "buffer", buffer)

    def _epoch(self, due: int) -> int:
        """Make the gradient steps of one update epoch, at most ``due``; return how many."""
        trainer, stages, made = self.trainer, self.trainer.stages, 0
        with self._undisturbed:
            for drawn in trainer.buffer.epoch(trainer.plan, due):
                try:
                    minibatches = [self._minibatch(m) for m in drawn]
                except StopIteration:  # how TorchRL's replay buffer hook says that a pass has ended
                    break
                trainer.last_metrics = gradient_step(trainer, minibatches)
                trainer.journal.metrics.add(trainer.last_metrics)
                if stages["post_optim_complete_log"]:
                    self._metrics.add(trainer.last_metrics)
                trainer.ledger.updated(sum(minibatch.numel() for minibatch in minibatches))
                self._drawn += len(minibatches)
                made += 1
                stages.fire("post_optim")
                trainer.log("post_optim_log", minibatches[-1])
        if trainer.plan.on_policy and made:
            at_once = isinstance(trainer.buffer, ReplayBatches)  # it draws those of all epochs
            share = made * (trainer.plan.update_epochs or 1) / due if at_once else 1
            trainer.ledger.update_epochs += max(round(share), 1)
        return made

    def _minibatch(self, drawn: TensorDictBase) -> TensorDictBase:
        """A minibatch as hooks return it; rows that have priorities keep their places."""
        stages, buffer = self.trainer.stages, self.trainer.buffer
        if not stages["process_optim_batch"]:
            return drawn
        prioritized = isinstance(buffer, ReplayBatches) and buffer.reads_loss_outputs
        places = entry(drawn, "index") if prioritized else None
        if places is not None:
            places = places.clone()  # hooks may change it in place
        paths = leaves(drawn)
        minibatch: TensorDictBase = stages.pipe("process_optim_batch", drawn)
        checks.refuse(checks.in_left_out("process_optim_batch", paths, minibatch, self.trainer))
        if places is not None:
            checks.refuse(checks.in_places(places, entry(minibatch, "index")))
        return minibatch

    def _pass_over(self, due: int) -> None:
        """Draw the minibatches of gradient steps left out: the permutation goes on behind them."""
        trainer = self.trainer
        drawn = due if trainer.plan.last_minibatch == "carry" else 0
        while drawn and due:
            drawn = sum(1 for _ in trainer.buffer.epoch(trainer.plan, due))
            due -= drawn
