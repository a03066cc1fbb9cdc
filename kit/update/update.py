"""One gradient step: minibatch, loss, gradients, clipping, optimisers, target networks."""

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

from kit.fast.nested import put
from kit.fast.traced import Traced, writable
from kit.fast.vectors import parts_of, vector_of
from kit.logging.metrics import scalar, weighted_mean
from kit.losses.due import losses_due
from kit.steps import SettingError
from kit.steps.errors import one_of
from kit.update.groups import Due, Group, LossChecks, due_at, flat, gradients_of, groups_of
from kit.update.targets import TargetUpdates
from kit.update.traced_step import TracedStep

Compile = Literal["auto", "exact", True, False]
Metrics = dict[str, Tensor]
Gradients = dict[int, Tensor]
"""By the number of the parameter, among those of the optimisers that step; absent where none."""
ChangeGradients = Callable[[Sequence[Tensor], Sequence[Tensor | None]], Sequence[Tensor | None]]
"""From parameters and their gradients to other gradients."""

_TRACED_SETTINGS = frozenset(
    {"max_grad_norm", "clip_value", "change_gradients", "compile", "writes_to_minibatch"}
)
"""Attributes of an update that traced graphs depend on."""


def autocast_loss(loss_module: nn.Module, precision: str, device: Any) -> nn.Module:
    """Replace a loss's ``forward`` by one that multiplies matrices in another type.

    Args:
        loss_module: the loss; its weights keep their type.
        precision: ``"bfloat16"``, or ``"float32"``, which changes nothing.
        device: device of the loss.
    """
    if one_of("precision", precision, ["float32", "bfloat16"]) == "bfloat16":
        mixed = torch.autocast(torch.device(device).type, torch.bfloat16)
        loss_module.forward = forward = mixed(loss_module.forward)
        vars(loss_module)["autocast_loss"] = mixed, forward  # for losses_due, which calls a part
    return loss_module


class Update(OptimizationStepper):
    """Minimises a TorchRL loss, one gradient step at a time.

    It is an ``OptimizationStepper``, so it also works in TorchRL's ``Trainer``. With several
    optimisers, the gradients of all losses that are due are computed at the parameters before the
    step.

    Args:
        loss_module: returns a TensorDict of scalars. The sum of those named ``loss...`` is
            minimised; the others are metrics.
        optimizer: one optimiser for all losses; or one by name of the loss it minimises
            (``{"loss_actor": ..., "loss_qvalue": ...}``). Several names may share an optimiser, and
            ``""`` stands for all losses in the module's ``out_keys`` that are not named. Weights
            that the losses reach must be in an optimiser or frozen (``requires_grad_(False)``);
            they may be frozen, unfrozen and added at any time.
        every: gradient steps between two steps of the optimiser of a loss, by name of the loss;
            default 1. ``{"loss_actor": 2}`` is the policy delay of TD3 (Fujimoto et al. 2018).
        max_grad_norm: largest norm of all gradients of an optimiser; ``None``: unclipped.
        clip_value: largest absolute value of a gradient; ``None``: unclipped.
        gradients: changes the gradients of an optimiser's parameters before they are clipped. Its
            ``state_dict()``, if any, is in checkpoints.
        target_updater: ``SoftUpdate`` or ``HardUpdate`` of the loss's target networks. A
            ``HardUpdate`` needs ``value_network_update_interval=0`` with ``target_update_every``.
        target_update_every: steps between two target updates: a number of gradient steps, or text
            such as ``"1_000 policy steps"``. Policy steps are the argument of :meth:`advance`.
        compile: ``"auto"``: loss, gradients and (of fused optimisers) the whole gradient step are
            recorded once per minibatch shape and replayed as tensor operations without Python, or
            as a CUDA graph; eager where that is not possible. Results are bitwise the eager ones,
            except for large matrix products on some processors (:mod:`kit.fast.products`;
            ``"exact"``: without these) and for learning rates on a GPU, which are float32 there.
            ``True``: loss and gradients are compiled by ``torch.compile``, which rounds differently
            and needs a C++ compiler. ``False``: eager.

    Attributes:
        optimizer_step_count: gradient steps made.
        shapes_vary: whether minibatches are whole batches of varying length. ``"auto"`` then works
            as ``"exact"``: to record each shape would cost more than faster products save.
        writes_to_minibatch: whether entries that the loss writes (``td_error``) are written to the
            minibatch, for priorities or hooks.
        reads_minibatches: whether a subclass reads entries that the loss does not read. It then
            receives all entries.
        post_backward: called in each gradient step when the gradients of all losses are in
            ``parameter.grad``, before ``gradients`` and clipping; it may change or replace them.

    Raises:
        SettingError: if a setting contradicts another one or the losses. Some errors are only found
            when the loss is called; they are raised before the first step of its optimiser.
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
            why = f"contradicts max_grad_norm={max_grad_norm}"
            raise SettingError("clip_value", clip_value, why)
        self.change_gradients = gradients
        self.compile = one_of("compile", compile, ["auto", "exact", True, False])
        self.optimizer_step_count = 0
        self._steps = [0] * len(self._groups)
        self._targets = TargetUpdates(target_updater, target_update_every, traces=bool(compile))
        self.traced_step = TracedStep(self, self._loss, self._step)

    def __setattr__(self, name: str, value: Any) -> None:
        traced = vars(self).get("traced_step") if name in _TRACED_SETTINGS else None
        if traced is not None and getattr(self, name) != value:
            traced.clear()
        super().__setattr__(name, value)

    @property
    def loss_module(self) -> nn.Module:
        """The loss module; optimisers have its weights, so another one needs another update."""
        return self._loss_module

    @property
    def groups(self) -> tuple[Group, ...]:
        """Optimisers, the losses they minimise and their periods."""
        return self._groups

    @property
    def target_updater(self) -> TargetNetUpdater | None:
        """TorchRL's updater of the target networks; it may be replaced."""
        return self._targets.updater

    @target_updater.setter
    def target_updater(self, updater: TargetNetUpdater | None) -> None:
        self._targets.replace(updater)
        self.traced_step = TracedStep(self, self._loss, self._step)

    @property
    def plain_reason(self) -> str:
        """Why the loss runs eagerly; empty while it does not."""
        return self.traced_step.reason or ("" if self.compile else "asked for")

    @property
    def undisturbed(self) -> bool:
        """Whether only gradient steps change what they depend on, until this is false again.

        Changes are then looked for in the first gradient step only.
        """
        return self.traced_step.looked is not None

    @undisturbed.setter
    def undisturbed(self, value: bool) -> None:
        self.traced_step.looked = set() if value else None

    @property
    def keys_read(self) -> list[Any]:
        """Keys of a minibatch that the loss reads; empty if unknown, or if a check is due."""
        return self.traced_step.keys_read

    # ------------------------------------------------------------------ one gradient step
    def __call__(self, minibatch: TensorDictBase, *others: TensorDictBase) -> Metrics:
        """Make one gradient step on one minibatch, or on several whose gradients are averaged.

        Args:
            minibatch: TensorDict of any batch size.
            others: further minibatches; gradients are weighted by the number of rows.

        Returns:
            Losses, the loss's metrics and the norm of the gradients: read-only scalars on the
            device. Losses of an actor that is not due may be omitted, with their metrics: see
            :func:`~kit.losses.losses_due`.
        """
        due = self._due()
        if not others and (step := self.traced_step.step(due)) is not None:
            metrics, _ = self._run(step, minibatch)
            self._stepped(due, targets_moved=self.targets_move_with(due))
            return metrics
        minibatches = [minibatch, *others]
        parts = [self._losses_of(due, one) for one in minibatches]
        rows = [one.numel() for one in minibatches]
        metrics = weighted_mean([part for part, _ in parts], rows)
        with torch.no_grad():
            metrics |= self._apply(due, weighted_mean([part for _, part in parts], rows))
        self._stepped(due)
        return metrics

    def losses(self, minibatch: TensorDictBase, *, due_alone: bool = False) -> TensorDictBase:
        """Return the losses of a minibatch of any size; those not due may be omitted on request."""
        if not due_alone:
            return flat(self.loss_module(minibatch))
        return self._losses_due(self._due(), minibatch)

    def _losses_due(self, due: Due, minibatch: TensorDictBase) -> TensorDictBase:
        names = {name for number in due for name in self._groups[number].losses}
        return flat(losses_due(self.loss_module, minibatch, names))

    def minimize(self, losses: TensorDictBase) -> Metrics:
        """Make one eager gradient step on outputs of the loss module, perhaps changed."""
        due = self._due()
        gradients = self._differentiate(due, losses)
        metrics = {name: scalar(value) for name, value in losses.items()}
        with torch.no_grad():
            metrics |= self._apply(due, gradients)
        self.stepped()
        return metrics

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDictBase:
        """Make one gradient step for TorchRL's trainer, and call its ``post_loss`` hooks."""
        metrics = TensorDict(self(sub_batch))
        if after_loss := getattr(trainer, "_post_loss_hook", None):  # not of a learner elsewhere
            after_loss(sub_batch)
        return metrics

    def register(self, trainer: Any, name: str = "optimization_stepper") -> None:
        """Register the update as the stepper of TorchRL's trainer.

        Raises:
            SettingError: if the trainer would clip gradients differently, or targets are updated by
                policy steps.
        """
        own = self.max_grad_norm if trainer.clip_grad_norm else self.clip_value
        if trainer.clip_norm not in (None, own):
            why = "is not where the update clips gradients, which it does by itself"
            works = "leave it out, and give Update(max_grad_norm=...) or Update(clip_value=...)"
            raise SettingError("clip_norm", trainer.clip_norm, why, works)
        if self._targets.counts == "policy":
            why = "counts policy steps, which TorchRL's trainer does not tell an update"
            works = "give a number of gradient steps"
            raise SettingError("target_update_every", self._targets.period.period, why, works)
        super().register(trainer, name)

    def stepped(self) -> None:
        """Count a gradient step that was made; update the targets if it is their turn."""
        self._stepped(self._due())

    def _stepped(self, due: Due, targets_moved: bool = False) -> None:
        self.optimizer_step_count += 1
        for number in due:
            self._steps[number] += 1
        self._targets.count("gradient", self.optimizer_step_count, updated=targets_moved)

    def begin_run(self) -> None:
        """Count policy steps from 0 again, in case of an earlier run."""
        if self._targets.counts == "policy":
            self._targets.period.last = 0

    def advance(self, policy_steps: int) -> None:
        """Update the targets if they are due after so many policy steps of the run."""
        self._targets.count("policy", policy_steps)

    def targets_move_with(self, due: Due) -> bool:
        """Return whether a soft update of the targets is part of each of these gradient steps."""
        return self._targets.move_with([self._groups[number].period for number in due])

    def _due(self) -> Due:
        return due_at(self._groups, self.optimizer_step_count + 1)

    def _losses_of(self, due: Due, minibatch: TensorDictBase) -> tuple[Metrics, Gradients]:
        """Metrics and gradients of a minibatch."""
        if not self.compile:
            return self._outputs(self._loss(due, minibatch.copy()), minibatch)
        return self._run(self.traced_step.loss(due), minibatch)

    def _run(self, traced: Traced, minibatch: TensorDictBase) -> tuple[Metrics, Gradients]:
        """Return metrics and gradients of a traced call."""
        outputs = traced(minibatch)
        if traced.is_stale:
            self.compile = False  # the other graphs of the loss use the old value, too
        return self._outputs(outputs, minibatch)

    @staticmethod
    def _outputs(
        outputs: Mapping[Any, Tensor], minibatch: TensorDictBase
    ) -> tuple[Metrics, Gradients]:
        """Metrics and gradients; what the loss writes is written into the minibatch."""
        metrics: Metrics = {}
        gradients: Gradients = {}
        for (what, name), value in outputs.items():
            if what == "metric":
                metrics[name] = value
            elif what == "gradient":
                gradients[name] = value
            else:
                put(minibatch, name, writable(value))
        return metrics, gradients

    # ------------------------------------------------------------------ loss and gradients
    @torch.enable_grad()
    def _loss(self, due: Due, minibatch: TensorDictBase) -> dict[Any, Tensor]:
        """Metrics, gradients, and what the loss writes into the minibatch."""
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
        """Make the step; metrics, and what the loss writes into the minibatch."""
        outputs = self._loss(due, minibatch)
        numbers = [name for what, name in outputs if what == "gradient"]
        norms = self._apply(due, {number: outputs.pop(("gradient", number)) for number in numbers})
        if (updater := self.target_updater) is not None and self.targets_move_with(due):
            updater.step()
        return outputs | {("metric", name): norm for name, norm in norms.items()}

    def _differentiate(self, due: Due, losses: TensorDictBase) -> Gradients:
        """The gradients of the parameters of all groups that are due."""
        self._checks(due, losses)
        gradients: list[Tensor | None] = []
        for number in due:
            gradients += gradients_of(self._groups[number], losses, retain_graph=number != due[-1])
        return {number: value for number, value in enumerate(gradients) if value is not None}

    def _apply(self, due: Due, gradients: Gradients) -> Metrics:
        """Change gradients, clip and let the optimisers step; the norms before clipping."""
        norms: Metrics = {}
        gradients = self._after_hooks(due, gradients)
        numbers = itertools.count()
        for group in (self._groups[number] for number in due):
            found: Sequence[Tensor | None] = [
                gradients.get(next(numbers)) for _ in group.parameters
            ]
            if self.change_gradients is not None:
                found = [*self.change_gradients(group.parameters, found)]
            given = [gradient for gradient in found if gradient is not None]
            whole = vector_of(given) if given else group.parameters[0].new_zeros(0)
            norm = torch.linalg.vector_norm(whole)
            norms["grad_norm" + "_" * bool(group.name) + group.name] = norm
            clipped = iter(parts_of(self._clipped(whole, norm), given))
            for parameter, gradient in zip(group.parameters, found):
                following = None if gradient is None else next(clipped)
                parameter.grad = _in_layout_of(parameter, following)
            if given:  # otherwise all its weights are frozen, which some optimisers refuse
                group.optimizer.step()
            for parameter in group.parameters:
                parameter.grad = None
        return norms

    def _after_hooks(self, due: Due, gradients: Gradients) -> Gradients:
        """Return the gradients as ``post_backward`` leaves them."""
        if self.post_backward is None:
            return gradients
        parameters = [one for number in due for one in self._groups[number].parameters]
        for number, parameter in enumerate(parameters):
            gradient = gradients.get(number)  # parameters may share one gradient tensor
            parameter.grad = None if gradient is None else gradient.clone()
        self.post_backward()
        return {n: one.grad for n, one in enumerate(parameters) if one.grad is not None}

    def _clipped(self, gradient: Tensor, norm: Tensor) -> Tensor:
        """The gradient clipped; not in place, as it may be given elsewhere."""
        if self.max_grad_norm is not None:
            return gradient * (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.clip_value is not None:
            return gradient.clamp(-self.clip_value, self.clip_value)
        return gradient

    # ------------------------------------------------------------------ in and out
    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """Optimisers by name."""
        return {group.name or "optimizer": group.optimizer for group in self._groups}

    @property
    def optimizer_steps(self) -> dict[str, int]:
        """Steps of each optimiser, by name."""
        return dict(zip(self.optimizers, self._steps))

    def state_dict(self) -> dict[str, Any]:
        """The state of optimisers, gradients and target updates; weights are the loss module's."""
        changes = self._stateful_changes()
        return {
            "optimizers": {name: one.state_dict() for name, one in self.optimizers.items()},
            "optimizer_steps": self.optimizer_steps,
            "gradients": {} if changes is None else changes.state_dict(),
            **self._targets.state_dict(),
            "optimizer_step_count": self.optimizer_step_count,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`.

        Raises:
            SettingError: if it is of an update with other optimisers.
        """
        if [*state_dict["optimizers"]] != [*self.optimizers]:
            why = "is the state of an update with other optimisers"
            raise SettingError("state_dict", [*state_dict["optimizers"]], why, [[*self.optimizers]])
        for name, optimizer in self.optimizers.items():
            # PyTorch would go on with the very tensors, which may be those of another optimiser.
            optimizer.load_state_dict(copy.deepcopy(state_dict["optimizers"][name]))
        self._steps = [int(steps) for steps in state_dict["optimizer_steps"].values()]
        if (changes := self._stateful_changes()) is not None:
            changes.load_state_dict(state_dict["gradients"])
        self._targets.load_state_dict(state_dict)
        self.optimizer_step_count = int(state_dict["optimizer_step_count"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies: TensorDict copies the weights of a loss apart from those of optimisers."""
        why = "cannot be copied or pickled: the copy's optimisers would not have its loss's weights"
        works = "copy.deepcopy(update.state_dict()) and that of its loss_module can be loaded again"
        raise SettingError("update", type(self).__name__, why, works)

    def _stateful_changes(self) -> Any:
        """What changes gradients, or has the method that does; ``None`` if it has no state."""
        owner = getattr(self.change_gradients, "__self__", self.change_gradients)
        return owner if hasattr(owner, "load_state_dict") else None


def _in_layout_of(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """A gradient in the memory layout of its parameter, which fused optimisers rely on."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


# ---------------------------------------------------------------------- settings
def _positive(field: str, value: float | None) -> float | None:
    if value is not None and not (isinstance(value, numbers.Real) and value > 0):
        raise SettingError(field, value, "is not positive", [None, 0.5])
    return value
