"""The ways to make a gradient step, as the loop calls them: minibatches in, metrics out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tensordict import TensorDictBase
from torchrl.trainers import OptimizationStepper

from kit.logging.metrics import MetricMeans, weighted_mean
from kit.trainer.torchrl_protocol import TorchRLProtocol
from kit.update import Update

AfterLoss = Callable[[TensorDictBase], None]
"""Called with each minibatch once its losses are computed."""


class GradientStep(Protocol):
    """Makes one gradient step."""

    def __call__(self, minibatches: Sequence[TensorDictBase]) -> TensorDictBase:
        """Make one gradient step.

        Args:
            minibatches: one, or several whose gradients are accumulated.

        Returns:
            Scalar metrics on the device.
        """


def gradient_step(
    trainer: TorchRLProtocol, update: Update | OptimizationStepper | None, after_loss: AfterLoss
) -> GradientStep:
    """The way to make gradient steps with ``update`` and the hooks that are registered now."""
    if trainer.stages["process_loss"] or trainer.stages["optimizer"]:
        own = update if isinstance(update, Update) else None
        return OpenUpdate(trainer, own, after_loss)
    if isinstance(update, Update):
        return ClosedUpdate(update, after_loss)
    assert update is not None
    return StepperUpdate(update, trainer, after_loss)


@dataclass
class ClosedUpdate:
    """The kit's update: loss, gradients and optimisers in one call, which hooks follow."""

    update: Update
    after_loss: AfterLoss

    def __call__(self, minibatches: Sequence[TensorDictBase]) -> TensorDictBase:
        """Make one gradient step."""
        metrics = self.update(*minibatches)
        for minibatch in minibatches:
            self.after_loss(minibatch)
        return metrics


@dataclass
class StepperUpdate:
    """A stepper of TorchRL, which takes one minibatch at a time and accumulates by itself."""

    stepper: OptimizationStepper
    trainer: Any
    after_loss: AfterLoss

    def __call__(self, minibatches: Sequence[TensorDictBase]) -> TensorDictBase:
        """Make one gradient step; its metrics are means over the minibatches that have them."""
        means = MetricMeans()
        for minibatch in minibatches:
            means.add(self.stepper.step(self.trainer, minibatch))
            self.after_loss(minibatch)
        return means.peek()


@dataclass
class OpenUpdate:
    """A gradient step with hooks inside it: at ``process_loss``, or ``optimizer`` in its place."""

    trainer: TorchRLProtocol
    update: Update | None
    after_loss: AfterLoss

    def __call__(self, minibatches: Sequence[TensorDictBase]) -> TensorDictBase:
        """Make one gradient step, eagerly."""
        stages = self.trainer.stages
        parts = []
        for minibatch in minibatches:
            losses = self._losses(minibatch)
            self.after_loss(minibatch)
            parts.append(stages.losses(minibatch, losses))
        losses = weighted_mean(parts, [minibatch.numel() for minibatch in minibatches])
        if not stages["optimizer"]:
            assert self.update is not None
            return self.update.minimize(losses)
        clip = self.trainer.clip_grad_norm, self.trainer.clip_norm
        metrics: TensorDictBase = stages.optimize(losses, *clip)
        if self.update is not None:
            self.update.stepped()
        return metrics

    def _losses(self, minibatch: TensorDictBase) -> TensorDictBase:
        if self.update is not None:
            return self.update.losses(minibatch)
        losses: TensorDictBase = self.trainer.compute_loss(minibatch)
        return losses
