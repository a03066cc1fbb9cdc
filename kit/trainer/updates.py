"""A gradient step of the loop: by the kit's update, a stepper of TorchRL, or hooks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kit.buffers import ReplayBatches
from kit.hooks.guards import not_finite
from kit.logging.metrics import MetricMeans, weighted_mean
from kit.steps import SettingError
from kit.trainer.stages import HookError, is_of_the_kit
from kit.trainer.torchrl_protocol import TorchRLProtocol
from kit.update import Update

_SEES_MINIBATCHES = (
    "process_optim_batch", "process_loss", "optimizer", "post_loss", "post_optim_log",
)  # fmt: skip
_BETWEEN_MINIBATCHES = (
    "post_backward", "post_optim", "post_epoch_log", "post_epoch", "pre_epoch_log",
)  # fmt: skip


def minibatches_are_unseen(trainer: TorchRLProtocol) -> bool:
    """Whether no hook is given a minibatch."""
    return not any(map(trainer.stages.__getitem__, _SEES_MINIBATCHES))


def entries_may_be_left_out(trainer: TorchRLProtocol) -> bool:
    """Whether only the loss reads minibatches, and reads the same entries of all that are cut.

    A hook between two gradient steps may change a loss, which may then read something else; an
    update of others may read anything.
    """
    between = [operation for stage in _BETWEEN_MINIBATCHES for operation in trainer.stages[stage]]
    parts = [trainer.update, *(operation.function for operation in between)]
    known = all(map(is_of_the_kit, parts))
    return known and minibatches_are_unseen(trainer)


class Undisturbed:
    """Tells update and buffer, for the gradient steps within, what no hook sees or changes."""

    def __init__(self, trainer: TorchRLProtocol) -> None:
        self.trainer = trainer
        self._seen: tuple[Any, ...] = ()
        self._unseen = self._nothing_between = self._left_out = False

    def __enter__(self) -> None:
        """Leave out what nothing reads, and look for changes once."""
        update, buffer, stages = self.trainer.update, self.trainer.buffer, self.trainer.stages
        if not isinstance(update, Update):
            return
        if (seen := (update, buffer, sum(map(len, stages.values())))) != self._seen:
            self._seen = seen
            self._look()
        update.writes_to_minibatch = not self._unseen or buffer.reads_loss_outputs
        update.undisturbed = self._nothing_between
        if stages["post_backward"]:
            update.post_backward = functools.partial(stages.fire, "post_backward")
        if isinstance(buffer, ReplayBatches):
            buffer.keys_read = update.keys_read if self._left_out else ()

    def _look(self) -> None:
        """Look at what is registered; parts of others may read or change anything."""
        trainer = self.trainer
        known = is_of_the_kit(trainer.update) and is_of_the_kit(trainer.buffer)
        self._unseen = known and minibatches_are_unseen(trainer)
        within = trainer.stages["post_backward"] or trainer.stages["post_optim"]
        self._nothing_between = self._unseen and not within
        # Of minibatches of ever other sizes, a loss may look at more than a program has read.
        alike = trainer.plan.minibatch_size is not None
        self._left_out = known and alike and entries_may_be_left_out(trainer)

    def __exit__(self, *error: object) -> None:
        """Anything may change again."""
        if isinstance(self.trainer.update, Update):
            self.trainer.update.undisturbed = False
            if self.trainer.stages["post_backward"]:
                self.trainer.update.post_backward = None
        if isinstance(self.trainer.buffer, ReplayBatches):
            self.trainer.buffer.keys_read = ()


def gradient_step(
    trainer: TorchRLProtocol, minibatches: Sequence[TensorDictBase]
) -> dict[str, Tensor]:
    """Make one gradient step with the trainer's update, and call the hooks inside it.

    Args:
        trainer: its update, stages and buffer.
        minibatches: one, or several whose gradients are accumulated. A stepper of TorchRL takes one
            at a time and accumulates by itself; its metrics are means over those that have them.

    Returns:
        Scalar metrics on the device.

    Raises:
        NotFinite: if the step failed and a weight is NaN or infinite.
    """
    try:
        return _gradient_step(trainer, minibatches)
    except (RuntimeError, ValueError) as error:
        # Distributions refuse NaN before a loss could be NaN.
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
    """An eager gradient step with hooks at ``process_loss``, or ``optimizer`` in its place."""
    stages, update = trainer.stages, trainer.update
    compute = trainer.compute_loss
    if isinstance(update, Update):  # a hook in its place may minimise all of them in every step
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
