"""Gradient steps: loss, gradients, clipping, optimisers and target updates."""

from __future__ import annotations

import copy
import itertools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrl.objectives.utils import TargetNetUpdater
from torchrl.trainers import OptimizationStepper

from kit.distributed import Ranks
from kit.fast.nested import put
from kit.fast.traced import Traced, writable
from kit.fast.vectors import parts_of, vector_of
from kit.logging.metrics import scalar, weighted_mean
from kit.losses.due import losses_due
from kit.steps import SettingError
from kit.steps.errors import one_of
from kit.update.gradient_vectors import Layout, common_layout, flatten, split
from kit.update.groups import Due, Group, LossChecks, due_at, flat, gradients_of, groups_of
from kit.update.targets import TargetUpdates
from kit.update.traced_step import TracedStep

Compile = Literal["auto", "exact", True, False]
Metrics = dict[str, Tensor]
Gradients = dict[Any, Tensor]
"""Gradients, keyed by index into the parameters of all due optimisers.

With several ranks, gradients that have not been averaged are one vector, keyed by its layout.
"""
ChangeGradients = Callable[[Sequence[Tensor], Sequence[Tensor | None]], Sequence[Tensor | None]]
"""Function that maps parameters and their gradients to modified gradients."""

_TRACED_SETTINGS = frozenset(
    {"max_grad_norm", "clip_value", "change_gradients", "compile", "writes_to_minibatch"}
)
"""Attributes of an update that traced graphs depend on."""


def autocast_loss(loss_module: nn.Module, precision: str, device: Any) -> nn.Module:
    """Wrap a loss's ``forward`` in autocast, so that matrix products use the given precision.

    Args:
        loss_module: Loss module; its weights keep their dtype.
        precision: ``"bfloat16"``, or ``"float32"`` for no autocast.
        device: Device of the loss.
    """
    if one_of("precision", precision, ["float32", "bfloat16"]) == "bfloat16":
        mixed = torch.autocast(torch.device(device).type, torch.bfloat16)
        loss_module.forward = forward = mixed(loss_module.forward)
        vars(loss_module)["autocast_loss"] = mixed, forward  # read by losses_due
    return loss_module


class Update(OptimizationStepper):
    """Minimises a TorchRL loss, one gradient step per call.

    The class is an ``OptimizationStepper``, so it also works in TorchRL's ``Trainer``. With several
    optimisers, the gradients of all due losses are computed before any optimiser steps.

    Args:
        loss_module: Returns a TensorDict of scalars. The sum of outputs named ``loss...`` is
            minimised; other outputs are metrics.
        optimizer: An optimiser for all losses, or a mapping from loss names to optimisers
            (``{"loss_actor": ..., "loss_qvalue": ...}``). Several losses may share an optimiser.
            The name ``""`` selects all other losses in the module's ``out_keys``. Parameters that a
            loss depends on must be in an optimiser or frozen (``requires_grad_(False)``).
            Parameters may be frozen, unfrozen and added at any time.
        every: Number of gradient steps per step of a loss's optimiser, keyed by loss name; default
            1. ``{"loss_actor": 2}`` is TD3's policy delay (Fujimoto et al. 2018).
        max_grad_norm: Maximum total norm of the gradients of an optimiser; ``None``: no clipping.
        clip_value: Maximum absolute value of a gradient entry; ``None``: no clipping.
        gradients: Function that changes the gradients of an optimiser's parameters before clipping.
            Its ``state_dict()``, if any, is saved in checkpoints.
        target_updater: ``SoftUpdate`` or ``HardUpdate`` for the loss's target networks. With
            ``target_update_every``, ``HardUpdate`` requires ``value_network_update_interval=0``.
        target_update_every: Interval between target updates: a number of gradient steps, or a
            string such as ``"1_000 policy steps"``. Policy steps are reported through
            :meth:`advance`.
        compile: How gradient steps are executed:

            - ``"auto"``: traced once per minibatch shape and replayed without Python, or as a CUDA
              graph. With fused optimisers, the whole gradient step is traced. Untraceable losses
              run eagerly. Results are bitwise equal to eager results, except for large matrix
              products on some CPUs (:mod:`kit.fast.products`) and float32 learning rates on GPUs.
            - ``"exact"``: as ``"auto"``, without the faster matrix products.
            - ``True``: loss and gradients are compiled by ``torch.compile``, which rounds
              differently and needs a C++ compiler.
            - ``False``: run eagerly.

    Attributes:
        optimizer_step_count: Number of gradient steps so far.
        shapes_vary: Whether minibatches are whole batches of varying length. ``"auto"`` then
            behaves like ``"exact"``, because tracing each shape would cost more than faster matrix
            products save.
        writes_to_minibatch: Whether entries that the loss writes (``td_error``) are copied to the
            minibatch, for priorities or hooks.
        reads_minibatches: Whether a subclass needs minibatch entries that the loss does not read.
        post_backward: Hook called in each gradient step after the gradients of all losses are
            stored in ``parameter.grad``, before ``gradients`` and clipping. It may change or
            replace ``parameter.grad``.
        ranks: Processes that train together; ``None`` for one process. With several ranks, each
            gradient step averages the gradients of all due optimisers in one collective, before
            ``post_backward``, ``gradients`` and clipping. Gradient norms are computed from the mean
            gradient, and losses from the rows of this rank. A parameter is updated if any rank has
            a gradient for it.

    Raises:
        SettingError: If arguments contradict each other or the losses. Errors that depend on the
            loss outputs are raised before the first step of the loss's optimiser.
    """

    shapes_vary = False
    writes_to_minibatch = True
    reads_minibatches = False
    post_backward: Callable[[], None] | None = None

    def __init__(
        self,
        loss_module: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer],
        *,
        every: Mapping[str, int] | None = None,
        max_grad_norm: float | None = None,
        clip_value: float | None = None,
        gradients: ChangeGradients | None = None,
        target_updater: TargetNetUpdater | None = None,
        target_update_every: int | str = 1,
        compile: Compile = "auto",
    ) -> None:
        self._loss_module = loss_module
        self._groups = groups_of(optimizer, every or {}, loss_module)
        self._checks = LossChecks(self._groups, loss_module)
        self.max_grad_norm = _positive("max_grad_norm", max_grad_norm)
        self.clip_value = _positive("clip_value", clip_value)
        if max_grad_norm is not None and clip_value is not None:
            reason = f"Gradients are already clipped by max_grad_norm={max_grad_norm}"
            raise SettingError("clip_value", clip_value, reason, [None])
        self.change_gradients = gradients
        self.compile = one_of("compile", compile, ["auto", "exact", True, False])
        self.optimizer_step_count = 0
        self._steps = [0] * len(self._groups)
        self._targets = TargetUpdates(target_updater, target_update_every, traces=bool(compile))
        self._ranks: Ranks | None = None
        self._reset_traces()

    def __setattr__(self, name: str, value: Any) -> None:
        traced = vars(self).get("traced_step") if name in _TRACED_SETTINGS else None
        if traced is not None and getattr(self, name) != value:
            traced.clear()
        super().__setattr__(name, value)

    @property
    def loss_module(self) -> nn.Module:
        """The loss module. It cannot be replaced, because the optimisers refer to its weights."""
        return self._loss_module

    @property
    def groups(self) -> tuple[Group, ...]:
        """Optimisers with their losses and periods."""
        return self._groups

    @property
    def target_updater(self) -> TargetNetUpdater | None:
        """TorchRL's updater for the target networks; can be replaced."""
        return self._targets.updater

    @target_updater.setter
    def target_updater(self, updater: TargetNetUpdater | None) -> None:
        self._targets.replace(updater)
        self._reset_traces()

    @property
    def ranks(self) -> Ranks | None:
        """Processes that train together; can be replaced."""
        return self._ranks

    @ranks.setter
    def ranks(self, ranks: Ranks | None) -> None:
        averaged = self.averages_gradients
        self._ranks = ranks
        if self.averages_gradients != averaged:
            self._reset_traces()

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are averaged over several ranks."""
        return self._ranks is not None and self._ranks.size > 1

    def _reset_traces(self) -> None:
        self.traced_step = TracedStep(self, self._loss, self._step, self._step_along)

    @property
    def plain_reason(self) -> str:
        """Reason why the loss runs eagerly; empty if it is traced."""
        return self.traced_step.reason or ("" if self.compile else "compile=False")

    @property
    def undisturbed(self) -> bool:
        """Whether the caller changes nothing between gradient steps.

        While this is true, dependencies are checked for changes only in the first gradient step.
        """
        return self.traced_step.looked is not None

    @undisturbed.setter
    def undisturbed(self, value: bool) -> None:
        self.traced_step.looked = set() if value else None

    @property
    def keys_read(self) -> list[Any]:
        """Minibatch keys that the loss reads; empty if unknown or if the trace must be verified."""
        return self.traced_step.keys_read

    # ------------------------------------------------------------------ one gradient step
    def __call__(self, minibatch: TensorDictBase, *others: TensorDictBase) -> Metrics:
        """Take one gradient step on a minibatch, or on averaged gradients from several minibatches.

        Args:
            minibatch: TensorDict of any batch size.
            others: Further minibatches; gradients are weighted by the number of rows.

        Returns:
            A dict of losses, loss metrics and gradient norms, as read-only scalar tensors on the
            device. Losses and metrics of an actor that is not due may be omitted; see
            :func:`~kit.losses.losses_due`.
        """
        due = self._due()
        alone = not (others or self.averages_gradients)
        if alone and (step := self.traced_step.step(due)) is not None:
            metrics, _ = self._run(step, minibatch)
            self._stepped(due, targets_moved=self.targets_move_with(due))
            return metrics
        minibatches = [minibatch, *others]
        parts = [self._losses_of(due, one) for one in minibatches]
        rows = [one.numel() for one in minibatches]
        metrics = weighted_mean([part for part, _ in parts], rows)
        return metrics | self._take_step(due, [part for _, part in parts], rows)

    def losses(self, minibatch: TensorDictBase, *, due_alone: bool = False) -> TensorDictBase:
        """Return a minibatch's losses. ``due_alone`` permits omitting losses that are not due."""
        if not due_alone:
            return flat(self.loss_module(minibatch))
        return self._losses_due(self._due(), minibatch)

    def _losses_due(self, due: Due, minibatch: TensorDictBase) -> TensorDictBase:
        names = {name for number in due for name in self._groups[number].losses}
        return flat(losses_due(self.loss_module, minibatch, names))

    def minimize(self, losses: TensorDictBase) -> Metrics:
        """Take one gradient step on the eager (possibly changed) outputs of the loss module."""
        due = self._due()
        gradients = self._differentiate(due, losses)
        metrics = {name: scalar(value) for name, value in losses.items()}
        return metrics | self._take_step(due, [gradients], [1])

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDictBase:
        """Take one gradient step in TorchRL's trainer and call its ``post_loss`` hooks."""
        metrics = TensorDict(self(sub_batch))
        if after_loss := getattr(trainer, "_post_loss_hook", None):  # remote learners have no hooks
            after_loss(sub_batch)
        return metrics

    def register(self, trainer: Any, name: str = "optimization_stepper") -> None:
        """Register the update as the optimisation stepper of TorchRL's trainer.

        Raises:
            SettingError: If the trainer clips gradients differently, or the target interval is in
                policy steps.
        """
        limit = self.max_grad_norm if trainer.clip_grad_norm else self.clip_value
        if trainer.clip_norm not in (None, limit):
            reason = "The update clips gradients itself and ignores the trainer's clip_norm"
            hint = "Remove it and use Update(max_grad_norm=...) or Update(clip_value=...)"
            raise SettingError("clip_norm", trainer.clip_norm, reason, hint)
        if self._targets.counts == "policy":
            reason = "TorchRL's trainer does not report policy steps to the update"
            hint = "Use a number of gradient steps"
            raise SettingError("target_update_every", self._targets.period.period, reason, hint)
        super().register(trainer, name)

    def stepped(self) -> None:
        """Count a gradient step taken elsewhere, and update the targets if they are due."""
        self._stepped(self._due())

    def _stepped(self, due: Due, targets_moved: bool = False) -> None:
        self.optimizer_step_count += 1
        for number in due:
            self._steps[number] += 1
        self._targets.count("gradient", self.optimizer_step_count, updated=targets_moved)

    def begin_run(self) -> None:
        """Restart the count of policy steps at 0 for a new run."""
        if self._targets.counts == "policy":
            self._targets.period.last = 0

    def advance(self, policy_steps: int) -> None:
        """Update the targets if due, given the run's total number of policy steps so far."""
        self._targets.count("policy", policy_steps)

    def targets_move_with(self, due: Due) -> bool:
        """Return whether a soft target update is due whenever these groups step together."""
        return self._targets.move_with([self._groups[number].period for number in due])

    def _due(self) -> Due:
        return due_at(self._groups, self.optimizer_step_count + 1)

    def _losses_of(self, due: Due, minibatch: TensorDictBase) -> tuple[Metrics, Gradients]:
        if not self.compile:
            return self._outputs(self._loss(due, minibatch.copy()), minibatch)
        return self._run(self.traced_step.loss(due), minibatch)

    def _run(self, traced: Traced, minibatch: Any) -> tuple[Metrics, Gradients]:
        outputs = traced(minibatch)
        if traced.is_stale:
            self.compile = False  # All other traced graphs of the loss are outdated too.
        return self._outputs(outputs, minibatch)

    @staticmethod
    def _outputs(outputs: Mapping[Any, Tensor], minibatch: Any) -> tuple[Metrics, Gradients]:
        """Return metrics and gradients, and copy entries that the loss wrote into the minibatch."""
        metrics: Metrics = {}
        gradients: Gradients = {}
        for (kind, name), value in outputs.items():
            if kind == "metric":
                metrics[name] = value
            elif kind == "gradient":
                gradients[name] = value
            else:
                put(minibatch, name, writable(value))
        return metrics, gradients

    # ------------------------------------------------------------------ loss and gradients
    @torch.enable_grad()
    def _loss(self, due: Due, minibatch: TensorDictBase) -> dict[Any, Tensor]:
        """Return metrics, gradients and the minibatch entries that the loss writes."""
        before = {key: minibatch.get(key) for key in minibatch.keys(True, True)}
        losses = self._losses_due(due, minibatch)
        outputs: dict[Any, Tensor] = {("metric", k): scalar(v) for k, v in losses.items()}
        gradients = self._differentiate(due, losses)
        outputs |= {("gradient", number): value for number, value in gradients.items()}
        for key in minibatch.keys(True, True) if self.writes_to_minibatch else ():
            if minibatch.get(key) is not before.get(key):
                outputs["written", key] = minibatch.get(key).detach()
        return outputs

    def _step(self, due: Due, minibatch: TensorDictBase) -> dict[Any, Tensor]:
        """Take the gradient step; return metrics and the minibatch entries that the loss writes."""
        outputs = self._loss(due, minibatch)
        numbers = [name for kind, name in outputs if kind == "gradient"]
        gradients = {number: outputs.pop(("gradient", number)) for number in numbers}
        return outputs | self._finish_traced(due, self._apply(due, gradients))

    def _step_along(
        self, layout: Layout, due: Due, mean: Mapping[str, Tensor]
    ) -> dict[Any, Tensor]:
        """Take the gradient step with a vector of averaged gradients; return the norms."""
        norms = self._apply_mean(due, layout, mean["gradient"])
        return self._finish_traced(due, norms)

    def _apply_mean(self, due: Due, layout: Layout, mean: Tensor) -> Metrics:
        return self._apply(due, split(mean, layout, self._parameters_of(due)), mean)

    def _finish_traced(self, due: Due, norms: Metrics) -> dict[Any, Tensor]:
        """Update the targets that move in the same traced graph, and return the norms."""
        if (updater := self.target_updater) is not None and self.targets_move_with(due):
            updater.step()
        return {("metric", name): norm for name, norm in norms.items()}

    def _take_step(self, due: Due, parts: Sequence[Gradients], rows: Sequence[float]) -> Metrics:
        """Take the gradient step with the mean gradient of minibatches and ranks."""
        if self.averages_gradients and any(parts):
            return self._take_step_with_ranks(due, parts, rows)
        with torch.no_grad():
            norms = self._apply(due, weighted_mean(parts, rows))
        self._stepped(due)
        return norms

    def _take_step_with_ranks(
        self, due: Due, parts: Sequence[Gradients], rows: Sequence[float]
    ) -> Metrics:
        """Average the gradients in one eager collective, and take the gradient step.

        A collective inside a traced graph would run more often than once per gradient step.
        """
        assert self.ranks is not None
        vectors = [{"gradient": vector} for part in parts for vector in part.values()]
        with torch.inference_mode():  # the vector may be an inference tensor of a traced graph
            mean = self.ranks.mean(weighted_mean(vectors, rows)["gradient"], "gradients")
        # The smallest layout has a missing gradient if any layout has one.
        layout = common_layout(min(layout for part in parts for layout in part), mean)
        step = self.traced_step.step(due, layout)
        if step is None or not step.replays or step.policy.check_is_due:
            mean = writable(mean)  # fused optimisers reject inference tensors, except in replays
        if step is not None:
            norms, _ = self._run(step, {"gradient": mean})
        else:
            with torch.no_grad():
                norms = self._apply_mean(due, layout, mean)
        self._stepped(due, targets_moved=step is not None and self.targets_move_with(due))
        return norms

    def _differentiate(self, due: Due, losses: TensorDictBase) -> Gradients:
        self._checks(due, losses)
        gradients: list[Tensor | None] = []
        for number in due:
            gradients += gradients_of(self._groups[number], losses, retain_graph=number != due[-1])
        found = {number: value for number, value in enumerate(gradients) if value is not None}
        return flatten(found, self._parameters_of(due)) if self.averages_gradients else found

    def _parameters_of(self, due: Due) -> list[nn.Parameter]:
        return [p for number in due for p in self._groups[number].parameters]

    def _apply(self, due: Due, gradients: Gradients, mean: Tensor | None = None) -> Metrics:
        """Change and clip gradients, run the optimisers, and return the norms before clipping.

        ``mean`` is the vector of averaged gradients, if the gradients are its parts.
        """
        norms: Metrics = {}
        gradients = self._after_hooks(due, gradients)
        numbers = itertools.count()
        for group in (self._groups[number] for number in due):
            found: Sequence[Tensor | None] = [
                gradients.get(next(numbers)) for _ in group.parameters
            ]
            if self.change_gradients is not None:
                found = [*self.change_gradients(group.parameters, found)]
            present = [gradient for gradient in found if gradient is not None]
            vector = vector_of(present, mean) if present else group.parameters[0].new_zeros(0)
            norm = torch.linalg.vector_norm(vector)
            norms["grad_norm" + "_" * bool(group.name) + group.name] = norm
            clipped = iter(parts_of(self._clipped(vector, norm), present))
            for parameter, gradient in zip(group.parameters, found):
                following = None if gradient is None else next(clipped)
                parameter.grad = _in_layout_of(parameter, following)
            if present:  # Some optimisers raise errors if all weights are frozen.
                group.optimizer.step()
            for parameter in group.parameters:
                parameter.grad = None
        return norms

    def _after_hooks(self, due: Due, gradients: Gradients) -> Gradients:
        """Call the ``post_backward`` hook, if any, and return the resulting gradients."""
        if self.post_backward is None:
            return gradients
        parameters = self._parameters_of(due)
        for number, parameter in enumerate(parameters):
            gradient = gradients.get(number)  # Several parameters may share a gradient tensor.
            parameter.grad = None if gradient is None else gradient.clone()
        self.post_backward()
        return {n: p.grad for n, p in enumerate(parameters) if p.grad is not None}

    def _clipped(self, gradient: Tensor, norm: Tensor) -> Tensor:
        """Return the clipped gradient without changing the input, which may be shared."""
        if self.max_grad_norm is not None:
            return gradient * (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.clip_value is not None:
            return gradient.clamp(-self.clip_value, self.clip_value)
        return gradient

    # ------------------------------------------------------------------ state
    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """Optimisers, keyed by name."""
        return {group.name or "optimizer": group.optimizer for group in self._groups}

    @property
    def optimizer_steps(self) -> dict[str, int]:
        """Number of steps taken by each optimiser, keyed by name."""
        return dict(zip(self.optimizers, self._steps))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of optimisers, ``gradients`` and target updates, without the weights."""
        changes = self._stateful_changes()
        return {
            "optimizers": {name: one.state_dict() for name, one in self.optimizers.items()},
            "optimizer_steps": self.optimizer_steps,
            "gradients": {} if changes is None else changes.state_dict(),
            **self._targets.state_dict(),
            "optimizer_step_count": self.optimizer_step_count,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`.

        Raises:
            SettingError: If the state belongs to an update with other optimisers.
        """
        if [*state_dict["optimizers"]] != [*self.optimizers]:
            reason = "The state belongs to an update with other optimisers"
            raise SettingError(
                "state_dict", [*state_dict["optimizers"]], reason, [[*self.optimizers]]
            )
        for name, optimizer in self.optimizers.items():
            # PyTorch keeps references to loaded tensors, so copy them.
            optimizer.load_state_dict(copy.deepcopy(state_dict["optimizers"][name]))
        self._steps = [int(steps) for steps in state_dict["optimizer_steps"].values()]
        if (changes := self._stateful_changes()) is not None:
            changes.load_state_dict(state_dict["gradients"])
        self._targets.load_state_dict(state_dict)
        self.optimizer_step_count = int(state_dict["optimizer_step_count"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reject copies, because TensorDict would copy weights separately from optimisers."""
        reason = "A copied or pickled update would not optimise the weights of its copied loss"
        hint = "Use state_dict() of the update and of its loss_module"
        raise SettingError("update", type(self).__name__, reason, hint)

    def _stateful_changes(self) -> Any:
        """Return the object that changes gradients, or ``None`` if it has no state."""
        owner = getattr(self.change_gradients, "__self__", self.change_gradients)
        return owner if hasattr(owner, "load_state_dict") else None


def _in_layout_of(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return a gradient in the parameter's memory layout, which fused optimisers require."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


# ---------------------------------------------------------------------- settings
def _positive(field: str, value: float | None) -> float | None:
    if value is not None and not (isinstance(value, numbers.Real) and value > 0):
        raise SettingError(field, value, "The value must be positive", [None, 0.5])
    return value
