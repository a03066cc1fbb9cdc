"""Update phase of an iteration: store the batch in the buffer and take gradient steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kit.buffers import ReplayMinibatches
from kit.fast.nested import entry, leaves
from kit.hooks.guards import not_finite
from kit.logging.metrics import MetricMeans, weighted_mean
from kit.steps import SettingError
from kit.trainer import checks
from kit.trainer.batches import size_of
from kit.trainer.stages import HookError, declares
from kit.trainer.torchrl_protocol import TorchRLProtocol
from kit.update import Update

_GIVEN_MINIBATCHES = (
    "process_optim_batch", "process_loss", "optimizer", "post_loss", "post_optim_log",
)  # fmt: skip
"""Stages whose hooks receive minibatches."""
_WITHIN_EPOCHS = (*_GIVEN_MINIBATCHES, "post_backward", "post_optim")
"""Stages that run between the gradient steps of an epoch."""
_WITHIN_PHASES = (*_WITHIN_EPOCHS, "post_epoch_log", "post_epoch", "pre_epoch_log")
"""Stages that run between the gradient steps of an update phase."""


class UpdatePhase:
    """Fills the trainer's buffer and takes the due gradient steps, epoch by epoch."""

    def __init__(self, trainer: TorchRLProtocol) -> None:
        self.trainer = trainer
        self._metrics = MetricMeans()
        self._drawn = 0
        self._writer = object()  # identifies the trainer without referring to it

    def store(self, batch: TensorDictBase) -> None:
        """Store a batch in the buffer without training on it."""
        trainer = self.trainer
        self._fill(batch if trainer.plan.on_policy else self.processed("pre_epoch", batch))

    def run(self, batch: TensorDictBase, due: int) -> None:
        """Take the gradient steps that are due.

        Args:
            batch: batch collected in this iteration.
            due: number of gradient steps due in this process, at least 1.

        Raises:
            SettingError: if the buffer yields no minibatches.
        """
        trainer = self.trainer
        trainer.skips_rest_of_update, self._drawn = False, 0
        if trainer.stages["post_optim_complete_log"]:
            self._metrics = MetricMeans()
        trainer.stages.fire("pre_optim_steps")
        if trainer.advantage is not None:
            estimated: TensorDictBase = trainer.advantage(batch)
            checks.raise_first(checks.in_estimated(estimated, batch, trainer))
            batch = estimated
            trainer.meeting.merge("advantages")
        steps: int | None = None
        while due and not trainer.skips_rest_of_update:
            trainer.log("pre_epoch_log", batch)
            if steps is None or trainer.stages["pre_epoch"]:
                self._fill(self.processed("pre_epoch", batch))
            before, steps = steps, self._epoch(due)
            if before == steps == 0:
                name = type(trainer.buffer).__name__
                raise SettingError("buffer", name, "yields no minibatch to train on")
            due -= steps
            trainer.log("post_epoch_log", batch)
            trainer.stages.fire("post_epoch")
            trainer.meeting.agree_to_skip()
        if due:
            unseen = trainer.plan.unseen_samples(trainer.ledger.iterations + 1, self._drawn)
            trainer.ledger.skipped(unseen, due)
            self._skip_minibatches(due)
        if trainer.stages["post_optim_complete_log"]:
            steps, means = trainer.ledger.local_gradient_steps, self._metrics.peek()
            trainer.log("post_optim_complete_log", steps, TensorDict(means))

    def processed(self, stage: str, batch: TensorDictBase) -> TensorDictBase:
        """Return the batch after the hooks of a stage have processed it."""
        trainer = self.trainer
        if not trainer.stages[stage]:
            return batch
        before, paths = size_of(batch), leaves(batch)
        processed: TensorDictBase = trainer.stages.pipe(stage, batch)
        checks.raise_first(checks.in_processed(stage, before, paths, processed, trainer))
        return processed

    def _fill(self, batch: TensorDictBase) -> None:
        """Store a batch in the buffer. For on-policy plans, omit entries that nothing reads."""
        trainer = self.trainer
        if trainer.plan.offline:
            return
        keys: Sequence[Any] = ()
        if trainer.plan.on_policy and self._loss_alone_reads():
            keys = getattr(trainer.update, "keys_read", ())
        self._separate_trainers()
        trainer.buffer.extend(batch, keys)

    def _separate_trainers(self) -> None:
        """Close open episodes if another trainer has written to this buffer."""
        buffer, memory = self.trainer.buffer, self._memory
        if getattr(buffer, "joins_steps", False):
            if getattr(memory, "written_by", self._writer) is not self._writer:
                buffer.close_open_episodes(self.trainer.plan.num_envs)
            self.take_over()

    def take_over(self) -> None:
        """Mark the steps in the buffer as written by this trainer."""
        self._memory.written_by = self._writer

    @property
    def _memory(self) -> Any:
        """Return kit's buffer if it computes n-step returns, else the TorchRL buffer inside it."""
        buffer = self.trainer.buffer
        # Pending n-step sums are stored in kit's buffer, not in TorchRL's buffer.
        waits = getattr(buffer, "n_step", None) is not None
        return buffer if waits else getattr(buffer, "buffer", buffer)

    def _epoch(self, due: int) -> int:
        """Take at most ``due`` gradient steps in one update epoch, and return their number."""
        trainer, stages, steps = self.trainer, self.trainer.stages, 0
        with self._shortcuts():
            for drawn in trainer.buffer.epoch(trainer.plan, due):
                try:
                    minibatches = [self._minibatch(m) for m in drawn]
                except StopIteration:  # TorchRL's replay buffer hook ends the epoch
                    break
                trainer.last_metrics = gradient_step(trainer, minibatches)
                trainer.journal.metrics.add(trainer.last_metrics)
                if stages["post_optim_complete_log"]:
                    self._metrics.add(trainer.last_metrics)
                trainer.ledger.updated(sum(minibatch.numel() for minibatch in minibatches))
                self._drawn += len(minibatches)
                steps += 1
                stages.fire("post_optim")
                trainer.log("post_optim_log", minibatches[-1])
        if trainer.plan.on_policy and steps:
            at_once = isinstance(trainer.buffer, ReplayMinibatches)  # one call draws all epochs
            share = steps * (trainer.plan.update_epochs or 1) / due if at_once else 1
            trainer.ledger.update_epochs += max(round(share), 1)
        return steps

    # ------------------------------------------------------------------ shortcuts
    def _may(self, capability: str, *stages: str) -> bool:
        """Return whether any hook at these stages has, or may have, a capability."""
        operations = [operation for stage in stages for operation in self.trainer.stages[stage]]
        return any(declares(operation.function, capability) for operation in operations)

    def _loss_alone_reads(self) -> bool:
        """Return whether only the loss reads minibatches, and always reads the same entries.

        Hooks between gradient steps may change the loss and therefore which entries it reads.
        """
        return not (
            getattr(self.trainer.update, "reads_minibatches", True)
            or self._may("reads_minibatches", *_GIVEN_MINIBATCHES)
            or self._may("changes_training", *_WITHIN_PHASES)
        )

    @contextlib.contextmanager
    def _shortcuts(self) -> Iterator[None]:
        """For one epoch, skip work in the update and the buffer that no hook can observe."""
        trainer, update, buffer = self.trainer, self.trainer.update, self.trainer.buffer
        if not isinstance(update, Update):
            yield
            return
        unread = not (
            update.reads_minibatches
            or getattr(buffer, "reads_minibatches", True)
            or self._may("reads_minibatches", *_GIVEN_MINIBATCHES)
        )
        update.writes_to_minibatch = not unread or buffer.reads_loss_outputs
        update.undisturbed = unread and not self._may("changes_training", *_WITHIN_EPOCHS)
        if trainer.stages["post_backward"]:
            update.post_backward = functools.partial(trainer.stages.fire, "post_backward")
        # If minibatch sizes vary, the loss may read entries that the traced graph does not.
        alike = trainer.plan.minibatch_size is not None
        if hasattr(buffer, "keys_read") and unread and alike and self._loss_alone_reads():
            buffer.keys_read = update.keys_read
        try:
            yield
        finally:  # hooks outside the epoch may change the training state
            update.undisturbed = False
            if trainer.stages["post_backward"]:
                update.post_backward = None
            if hasattr(buffer, "keys_read"):
                buffer.keys_read = ()

    def _minibatch(self, drawn: TensorDictBase) -> TensorDictBase:
        """Return a minibatch after hooks have processed it, and check its buffer indices."""
        stages, buffer = self.trainer.stages, self.trainer.buffer
        if not stages["process_optim_batch"]:
            return drawn
        prioritized = isinstance(buffer, ReplayMinibatches) and buffer.reads_loss_outputs
        places = entry(drawn, "index") if prioritized else None
        if places is not None:
            places = places.clone()  # hooks may change the index in place
        paths = leaves(drawn)
        minibatch: TensorDictBase = stages.pipe("process_optim_batch", drawn)
        checks.raise_first(
            checks.in_left_out("process_optim_batch", paths, minibatch, self.trainer)
        )
        if places is not None:
            checks.raise_first(checks.in_places(places, entry(minibatch, "index")))
        return minibatch

    def _skip_minibatches(self, due: int) -> None:
        """Discard the minibatches for skipped steps if a permutation spans iterations."""
        trainer = self.trainer
        drawn = due if trainer.plan.last_minibatch == "carry" else 0
        while drawn and due:
            drawn = sum(1 for _ in trainer.buffer.epoch(trainer.plan, due))
            due -= drawn


# ---------------------------------------------------------------------- a gradient step
def gradient_step(
    trainer: TorchRLProtocol, minibatches: Sequence[TensorDictBase]
) -> dict[str, Tensor]:
    """Take one gradient step with the trainer's update and hooks.

    Args:
        trainer: trainer whose update, stages and buffer are used.
        minibatches: minibatches whose gradients are accumulated. TorchRL's steppers receive them
            one at a time and accumulate internally.

    Returns:
        Scalar metrics as tensors on the training device.

    Raises:
        NonFiniteError: if the step raised an error and a weight is NaN or infinite.
    """
    try:
        return _gradient_step(trainer, minibatches)
    except (RuntimeError, ValueError) as error:
        # Distributions reject NaN parameters before the loss can become NaN.
        if isinstance(error, (HookError, SettingError)) or _is_finite(trainer.loss_module):
            raise
        steps, last = trainer.ledger.gradient_steps, trainer.last_checkpoint
        raise not_finite("a weight is NaN or infinite", steps, last) from error


def _is_finite(module: Any) -> bool:
    weights = module.parameters() if isinstance(module, nn.Module) else ()
    return all(is_lazy(weight) or bool(weight.isfinite().all()) for weight in weights)


def _gradient_step(
    trainer: TorchRLProtocol, minibatches: Sequence[TensorDictBase]
) -> dict[str, Tensor]:
    update = trainer.update
    if trainer.stages["process_loss"] or trainer.stages["optimizer"]:
        return _open_step(trainer, minibatches)
    if isinstance(update, Update):
        metrics = update(*minibatches)
        for minibatch in minibatches:
            _after_loss(trainer, minibatch)
        return metrics
    means = MetricMeans()
    for minibatch in minibatches:
        means.add(update.step(trainer, minibatch))
        _after_loss(trainer, minibatch)
    return means.peek()


def _open_step(
    trainer: TorchRLProtocol, minibatches: Sequence[TensorDictBase]
) -> dict[str, Tensor]:
    """Take an eager gradient step with hooks at ``process_loss`` or ``optimizer``."""
    stages, update = trainer.stages, trainer.update
    compute = trainer.compute_loss
    if isinstance(update, Update):  # an optimizer hook may minimise all losses in every step
        compute = functools.partial(update.losses, due_alone=not stages["optimizer"])
    parts = []
    for minibatch in minibatches:
        losses = compute(minibatch)
        _after_loss(trainer, minibatch)
        parts.append(stages.pipe("process_loss", losses, minibatch))
    losses = TensorDict(weighted_mean(parts, [minibatch.numel() for minibatch in minibatches]))
    if not stages["optimizer"]:
        metrics: dict[str, Tensor] = update.minimize(losses)
        return metrics
    metrics = dict(stages.optimize(losses, trainer.clip_grad_norm, trainer.clip_norm).items())
    if isinstance(update, Update):
        update.stepped()
    return metrics


def _after_loss(trainer: TorchRLProtocol, minibatch: TensorDictBase) -> None:
    trainer.stages.pipe("post_loss", minibatch)
    trainer.buffer.update_priority(minibatch)
