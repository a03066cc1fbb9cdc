"""One gradient step: minibatch, loss, gradients, clipping, optimisers, target networks."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrl.objectives import SoftUpdate
from torchrl.objectives.utils import TargetNetUpdater
from torchrl.trainers import OptimizationStepper

from kit.fast.nested import put
from kit.fast.optimizers import FusedOptimizers, step_is_fixed
from kit.fast.traced import Traced, writable
from kit.fast.vectors import parts_of, vector_of
from kit.logging.metrics import scalar, weighted_mean
from kit.losses.due import LEFT_OUT, losses_due
from kit.steps import SettingError
from kit.steps.errors import one_of, whole_number
from kit.steps.every import Every
from kit.update.groups import (
    another,
    as_losses,
    check_names,
    check_reached,
    check_weights,
    declared_losses,
    gradients_of,
    groups_of,
    losses_among,
)

Compile = Literal["auto", "exact", True, False]
Metrics = dict[str, Tensor]
Gradients = dict[int, Tensor]
"""By the number of the parameter, among those of the optimisers that step; absent where none."""
ChangeGradients = Callable[[Sequence[Tensor], Sequence[Tensor | None]], Sequence[Tensor | None]]
"""From parameters and their gradients to other gradients."""
Due = tuple[int, ...]
"""Positions of the groups whose optimisers step."""

_RECORDS = ("auto", "exact")
"""Values of ``compile`` for which the whole gradient step is recorded."""
_RECORDED = frozenset(
    {"max_grad_norm", "clip_value", "change_gradients", "compile", "writes_to_minibatch"}
)
"""Attributes of an update that its programs take for granted."""


def in_precision(loss_module: nn.Module, precision: str, device: Any) -> nn.Module:
    """Let a loss multiply matrices in another type; its weights stay what they are.

    Args:
        loss_module: of which ``forward`` is replaced.
        precision: ``"bfloat16"``, or ``"float32"``, which changes nothing.
        device: on which it runs.

    Raises:
        SettingError: if the type is neither.
    """
    if one_of("precision", precision, ["float32", "bfloat16"]) == "bfloat16":
        mixed = torch.autocast(torch.device(device).type, torch.bfloat16)
        loss_module.forward = forward = mixed(loss_module.forward)
        vars(loss_module)["in_precision"] = mixed, forward  # for losses_due, which calls a part
    return loss_module


class Update(OptimizationStepper):
    """Minimises a TorchRL loss, one gradient step at a time.

    It is an ``OptimizationStepper``: TorchRL's ``Trainer`` takes it, and the kit's trainer takes
    TorchRL's steppers in its place. With several optimisers, the gradients of all losses that are
    due are computed at the parameters before the step.

    Args:
        loss_module: returns a TensorDict of scalars, of which those named ``loss...`` are minimised
            (their sum) and the others are metrics.
        optimizer: one optimiser for all losses; or one by name of the loss it minimises
            (``{"loss_actor": ..., "loss_qvalue": ...}``; several names may share an optimiser, and
            ``""`` stands for all losses in the module's ``out_keys`` that are not named).
            Weights that the losses reach are in one, or frozen (``requires_grad_(False)``); they
            may be frozen, freed and added at any time.
        every: gradient steps between two steps of the optimiser of a loss, by name of the loss; 1
            where none is given. ``{"loss_actor": 2}`` is the policy delay of TD3 (Fujimoto et al.
            2018): the actor is updated in gradient steps 2, 4, ...
        max_grad_norm: largest norm of an optimiser's gradients, as one vector; ``None``:
            unclipped.
        clip_value: largest absolute value of a gradient; ``None``: unclipped.
        gradients: changes the gradients of an optimiser's parameters before they are clipped, once
            in a gradient step; what it has in ``state_dict()`` is in checkpoints. ``None``: they
            are those of the losses.
        target_updater: ``SoftUpdate`` or ``HardUpdate`` of the loss's target networks. A
            ``HardUpdate`` counts by itself; with ``value_network_update_interval=0``, which copies
            each time, ``target_update_every`` may say when.
        target_update_every: steps between two target updates: a number of gradient steps, or text
            such as ``"1_000 policy steps"``. Policy steps are the argument of :meth:`advance`.
        compile: ``"auto"``: loss, gradients and (of fused optimisers) the whole gradient step are
            recorded once per minibatch shape and replayed as tensor operations without Python, or
            as a CUDA graph; eager where that is not possible. Results are bitwise the eager ones,
            but for large matrix products on processors that have faster ones, which round
            otherwise (:mod:`kit.fast.products`; ``"exact"``: without these), and for learning
            rates on a GPU, which are float32 there.
            ``True``: loss and gradients are compiled by ``torch.compile``, which rounds differently
            and needs a C++ compiler. ``False``: eager.

    Attributes:
        optimizer_step_count: gradient steps made.
        shapes_vary: whether minibatches are whole batches of ever other lengths. To record each
            would cost more than faster products save: ``"auto"`` is ``"exact"`` then.
        writes_to_minibatch: whether what the loss writes into a minibatch (``td_error``) is there
            after its gradient step, for priorities or hooks.
        post_backward: called in each gradient step when the gradients of all losses are in
            ``parameter.grad``, before ``gradients`` and clipping; it may change or replace them.
        undisturbed: set to true, and to false afterwards, around gradient steps between which
            nothing else changes what they depend on: changes are looked for in the first alone.

    Raises:
        SettingError: if a setting contradicts itself or the losses. What the loss returns may only
            be known when it is called; the error is then raised before that loss's optimiser steps.
    """

    shapes_vary = False
    writes_to_minibatch = True
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
        if not isinstance(loss_module, nn.Module):
            name = getattr(loss_module, "__name__", type(loss_module).__name__)
            why = "is no module, so that no checkpoint would have the weights that it trains"
            works = "make it the forward of a torch.nn.Module that has its networks"
            raise SettingError("loss_module", name, why, works)
        self.loss_module = loss_module
        self.groups = groups_of(optimizer, every or {}, loss_module)
        declared = declared_losses(loss_module, self.groups)
        if declared:
            check_names(self.groups, declared, loss_module)
        self.max_grad_norm = _positive("max_grad_norm", max_grad_norm)
        self.clip_value = _positive("clip_value", clip_value)
        if max_grad_norm is not None and clip_value is not None:
            why = f"contradicts max_grad_norm={max_grad_norm}"
            raise SettingError("clip_value", clip_value, why)
        self.change_gradients = gradients
        _check_hard_update(target_updater, target_update_every)
        self.target_updater = target_updater
        self._target_period, self._target_counter = _target_period(target_update_every)
        if compile not in (ways := ["auto", "exact", True, False]):
            raise SettingError("compile", compile, "is not a way to run", ways)
        self.compile = compile
        self.optimizer_step_count = 0
        self._checked: set[int] = set()  # groups, with the weights that have been trained so far
        self._trained: set[int] = set()
        self._owned: list[list[int]] = []  # parameters of each group, by which losses were recorded
        self._traced: dict[tuple[Due, str], Traced] = {}
        self._fixed: dict[Due, Traced] = {}  # whole steps, as long as nothing changes
        self._read: list[list[Any]] = []
        self._keys_read: list[Any] = []
        self._undisturbed = False
        self._looked: set[Due] = set()
        self._fused = FusedOptimizers(
            [g.optimizer for g in self.groups] if compile in _RECORDS else []
        )
        self._update_targets = self._target_step()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("loss_module", "groups") and name in vars(self):
            raise another(name, value)
        if name in _RECORDED and getattr(self, name, None) != value:
            for traced in vars(self).get("_traced", {}).values():
                traced.clear()
            vars(self).get("_fixed", {}).clear()
        super().__setattr__(name, value)
        if name == "target_updater" and "_update_targets" in vars(self):  # another one
            self._traced.clear()
            self._fixed.clear()
            self._update_targets = self._target_step()

    def _target_step(self) -> Callable[[], Any] | None:
        """The update of the targets; a soft update, the same each time, is traced."""
        updater = self.target_updater
        if updater is None or not (self.compile and isinstance(updater, SoftUpdate)):
            return None if updater is None else updater.step
        traced = Traced(lambda _: updater.step() or {}, updater, name=type(updater).__name__)

        def step() -> None:
            traced.refresh()
            traced({})

        return step

    # ------------------------------------------------------------------ one gradient step
    def __call__(self, minibatch: TensorDictBase, *others: TensorDictBase) -> Metrics:
        """Make one gradient step on one minibatch, or on several whose gradients are averaged.

        Args:
            minibatch: TensorDict of any batch size.
            others: likewise; they count by their rows, so that the step is that of the mean over
                all rows.

        Returns:
            Losses, the loss's metrics and the norm of the gradients: scalars on the device, to be
            read alone. Losses of an actor that is not due may be left out, with their metrics: see
            :func:`~kit.losses.losses_due`.
        """
        due = self._due(self.optimizer_step_count + 1)
        if not others and (whole := self._whole_step(due)) is not None:
            metrics, _ = self._run(whole, minibatch)
            self._stepped(due, targets_moved=self._moves_targets(due))
        else:
            minibatches = [minibatch, *others]
            parts = [self._losses_of(due, one) for one in minibatches]
            rows = [one.numel() for one in minibatches]
            metrics = weighted_mean([part for part, _ in parts], rows)
            with torch.no_grad():
                metrics |= self._apply(due, weighted_mean([part for _, part in parts], rows))
            self._stepped(due)
        return metrics

    def losses(self, minibatch: TensorDictBase, *, due_alone: bool = False) -> TensorDictBase:
        """The losses of a minibatch.

        Args:
            minibatch: of any batch size.
            due_alone: whether those that are not due may be left out, as in a call.
        """
        if not due_alone:
            return as_losses(self.loss_module, self.loss_module(minibatch))
        return self._losses_due(self._due(self.optimizer_step_count + 1), minibatch)

    def _losses_due(self, due: Due, minibatch: TensorDictBase) -> TensorDictBase:
        names = {name for number in due for name in self.groups[number].losses}
        return as_losses(self.loss_module, losses_due(self.loss_module, minibatch, names))

    def minimize(self, losses: TensorDictBase) -> Metrics:
        """Make one gradient step on losses that were computed elsewhere, eagerly.

        Args:
            losses: as the loss module returns them, perhaps changed.
        """
        due = self._due(self.optimizer_step_count + 1)
        gradients = self._differentiate(due, losses)
        metrics = {name: scalar(value) for name, value in losses.items()}
        with torch.no_grad():
            metrics |= self._apply(due, gradients)
        self.stepped()
        return metrics

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDictBase:
        """Make one gradient step, as TorchRL's trainer asks for it, and call its loss hooks.

        It leaves stage ``post_loss`` to steppers, where replay buffers are told priorities.
        """
        metrics = TensorDict(self(sub_batch))
        if after_loss := getattr(trainer, "_post_loss_hook", None):  # not of a learner elsewhere
            after_loss(sub_batch)
        return metrics

    def register(self, trainer: Any, name: str = "optimization_stepper") -> None:
        """Become the stepper of TorchRL's trainer.

        Raises:
            SettingError: if the trainer would clip gradients otherwise, or targets are updated by
                policy steps, which it does not tell.
        """
        own = self.max_grad_norm if trainer.clip_grad_norm else self.clip_value
        if trainer.clip_norm not in (None, own):
            why = "is not where the update clips gradients, which it does by itself"
            works = "leave it out, and give Update(max_grad_norm=...) or Update(clip_value=...)"
            raise SettingError("clip_norm", trainer.clip_norm, why, works)
        if self._target_counter == "policy":
            why = "counts policy steps, which TorchRL's trainer does not tell an update"
            works = "give a number of gradient steps"
            raise SettingError("target_update_every", self._target_period.period, why, works)
        super().register(trainer, name)

    def stepped(self) -> None:
        """Count a gradient step that was made; update the targets if it is their turn."""
        self._stepped(self._due(self.optimizer_step_count + 1))

    def _stepped(self, due: Due, targets_moved: bool = False) -> None:
        self.optimizer_step_count += 1
        for number in due:
            self.groups[number].steps += 1
        if targets_moved:
            self._target_period(self.optimizer_step_count)
        elif self._target_counter == "gradient":
            self._targets_due(self.optimizer_step_count)

    def begin_run(self) -> None:
        """Count policy steps from 0 on: it may have been trained by a run before."""
        if self._target_counter == "policy":
            self._target_period.last = 0

    def advance(self, policy_steps: int) -> None:
        """Update the targets if it is their turn by policy steps; called once per iteration.

        Args:
            policy_steps: policy steps of the run so far.
        """
        if self._target_counter == "policy":
            self._targets_due(policy_steps)

    def _targets_due(self, count: int) -> None:
        due = self._target_period(count)
        if due and self._update_targets is not None:
            with torch.no_grad():
                for _ in range(due):
                    self._update_targets()

    def _moves_targets(self, due: Due) -> bool:
        """Whether a whole step includes a soft update of the targets: the same in each of its kind.

        So it is in every step, or together with the losses of an optimiser.
        """
        if type(self.target_updater) is not SoftUpdate or self._target_counter != "gradient":
            return False
        return self._target_period.period in (1, *[self.groups[number].period for number in due])

    def _due(self, gradient_step: int) -> Due:
        return tuple([n for n, g in enumerate(self.groups) if gradient_step % g.period == 0])

    @functools.cached_property
    def _ever_due(self) -> set[Due]:
        """All sets of groups that are due at one gradient step or another."""
        periods = [group.period for group in self.groups]
        # Groups that are due together are so at the least common multiple of their periods, too.
        some = (itertools.combinations(periods, count) for count in range(len(periods) + 1))
        return {self._due(math.lcm(*together)) for together in itertools.chain(*some)}

    # ------------------------------------------------------------------ the fast path
    @property
    def plain_reason(self) -> str:
        """Why the loss runs eagerly; empty while it does not."""
        stale = [traced.reason for traced in self._traced.values() if traced.is_stale]
        reasons = [traced.reason for (_, kind), traced in self._traced.items() if kind == "loss"]
        return next(filter(None, [*stale, *reasons]), "" if self.compile else "asked for")

    @property
    def undisturbed(self) -> bool:
        """Whether nothing but gradient steps changes what these depend on, from now on."""
        return self._undisturbed

    @undisturbed.setter
    def undisturbed(self, value: bool) -> None:
        self._undisturbed = value
        self._looked.clear()

    @property
    def keys_read(self) -> list[Any]:
        """Keys of a minibatch that the loss reads; empty if unknown, or if a check is due."""
        if any(traced.check_is_due for traced in self._traced.values()):
            return []
        if all(map(self._is_unchanged, self._ever_due)):
            read = [self._fixed[due].keys_read for due in self._ever_due]
        else:
            self._fused.take_rates()
            for traced in self._traced.values():
                traced.refresh()
            known = {due: traced for (due, _), traced in self._traced.items() if traced.replays}
            if self._ever_due - known.keys():
                return []
            read = [traced.keys_read for traced in self._traced.values()]
        if read != self._read:
            self._read = read
            self._keys_read = sorted({key for keys in read for key in keys}, key=str)
        return self._keys_read

    def _is_unchanged(self, due: Due) -> bool:
        """Whether the whole step is known, and what it depends on is what it was."""
        whole = self._fixed.get(due)
        if whole is None or not whole.replays:
            return False
        if due not in self._looked:
            self._fused.take_rates()
            if whole.refresh():
                return False
            if self._undisturbed:
                self._looked.add(due)
        return True

    def _whole_step(self, due: Due) -> Traced | None:
        """The whole step, where it is one list of operations."""
        if self.post_backward is None and self._is_unchanged(due):
            return self._fixed[due]
        self._fixed.pop(due, None)
        self._fused.update()
        loss = self._traced.get((due, "loss"))
        if (
            self.compile not in _RECORDS
            or self.post_backward is not None
            or (loss is not None and loss.reason)
            or not step_is_fixed([self.groups[number].optimizer for number in due])
            or (whole := self._trace(due, "step")).reason
        ):
            return None
        whole.refresh()
        if whole.replays:
            self._fixed[due] = whole
        return whole

    def _losses_of(self, due: Due, minibatch: TensorDictBase) -> tuple[Metrics, Gradients]:
        """Metrics and gradients of a minibatch."""
        if not self.compile:
            return self._outputs(self._loss(due, minibatch.copy()), minibatch)
        owned = [[*map(id, group.parameters)] for group in self.groups]
        if owned != self._owned:  # gradients go by the number of their parameter
            self._owned = owned
            for traced in self._traced.values():
                traced.clear()
        traced = self._trace(due, "loss")
        traced.refresh()
        return self._run(traced, minibatch)

    def _run(self, traced: Traced, minibatch: TensorDictBase) -> tuple[Metrics, Gradients]:
        """Return metrics and gradients of a traced call."""
        outputs = traced(minibatch)
        if traced.is_stale:
            self.compile = False  # the other programs of the loss use the old value, too
        return self._outputs(outputs, minibatch)

    def _trace(self, due: Due, kind: str) -> Traced:
        if (due, kind) not in self._traced:
            whole = kind == "step"
            optimizers = [self.groups[n].optimizer for n in due] if whole else []
            changing = whole and self.change_gradients is not None
            changes = [self.change_gradients] if changing else []
            targets = [self.target_updater] if whole and self._moves_targets(due) else []
            self._traced[due, kind] = Traced(
                functools.partial(self._loss if kind == "loss" else self._step, due),
                self.loss_module,
                *changes,
                *optimizers,
                *targets,
                name=type(self.loss_module).__name__,
                executor="inductor" if self.compile is True else "auto",
                read_only=whole,
                fast_products=self.compile == "auto" and not self.shapes_vary,
            )
        return self._traced[due, kind]

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
        if (updater := self.target_updater) is not None and self._moves_targets(due):
            updater.step()
        return outputs | {("metric", name): norm for name, norm in norms.items()}

    def _differentiate(self, due: Due, losses: TensorDictBase) -> Gradients:
        """The gradients of the parameters of all groups that are due."""
        trained = {id(one) for one in self.loss_module.parameters() if one.requires_grad}
        if not trained <= self._trained:  # those that were freed may be in no optimiser
            self._trained |= trained
            self._checked.clear()
        if not self._checked.issuperset(due):
            self._check(due, losses)
        gradients: list[Tensor | None] = []
        for number in due:
            gradients += gradients_of(self.groups[number], losses, retain_graph=number != due[-1])
        return {number: value for number, value in enumerate(gradients) if value is not None}

    def _check(self, due: Due, losses: TensorDictBase) -> None:
        """Refuse optimisers that do not fit the losses or the weights that are trained."""
        if torch.is_inference_mode_enabled():
            why = "is called in torch.inference_mode(), where PyTorch computes no gradients"
            raise SettingError("update", type(self).__name__, why, "train outside of it")
        names = losses_among(losses.keys())
        if not names:
            why = "has no entry named loss..., which would be minimised"
            works = f"it returns {list(losses.keys())}"
            raise SettingError("loss_module", type(self.loss_module).__name__, why, works)
        later = {name for n, g in enumerate(self.groups) if n not in due for name in g.losses}
        expected = [*names, *sorted(later & LEFT_OUT - {*names})]
        check_names(self.groups, expected, self.loss_module)
        there = [n for n, group in enumerate(self.groups) if {*group.losses} <= {*names}]
        for group in (self.groups[number] for number in there):
            if all(not one.requires_grad for one in group.parameters):
                continue  # frozen for now
            found = gradients_of(group, losses, retain_graph=True)
            if any(gradient is not None and gradient.is_sparse for gradient in found):
                why = "gives sparse gradients, and optimisers here are given dense ones"
                works = "make its embeddings with sparse=False"
                raise SettingError("loss_module", type(self.loss_module).__name__, why, works)
            if all(gradient is None for gradient in found):
                name = group.name or type(group.optimizer).__name__
                why = (
                    f"is over parameters that {' and '.join(group.losses or names)} does not reach"
                )
                works = "give it parameters of the loss module's networks"
                raise SettingError("optimizer", name, why, works)
            check_reached(group, found, losses, names, self.loss_module)
        check_weights(self.groups, losses, names, self.loss_module)
        self._checked.update(there)

    def _apply(self, due: Due, gradients: Gradients) -> Metrics:
        """Change gradients, clip and let the optimisers step; the norms before clipping."""
        norms: Metrics = {}
        gradients = self._after_hooks(due, gradients)
        numbers = itertools.count()
        for group in (self.groups[number] for number in due):
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
        parameters = [one for number in due for one in self.groups[number].parameters]
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
        return {group.name or "optimizer": group.optimizer for group in self.groups}

    @property
    def optimizer_steps(self) -> dict[str, int]:
        """Steps of each optimiser, by name."""
        return {group.name or "optimizer": group.steps for group in self.groups}

    def state_dict(self) -> dict[str, Any]:
        """The state of optimisers, gradients and target updates; weights are the loss module's."""
        targets = {} if self.target_updater is None else self.target_updater.state_dict()
        changes = self._stateful_changes()
        return {
            "optimizers": {name: one.state_dict() for name, one in self.optimizers.items()},
            "optimizer_steps": self.optimizer_steps,
            "gradients": {} if changes is None else changes.state_dict(),
            "targets": targets,
            "target_period": self._target_period.state_dict(),
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
        for group, steps in zip(self.groups, state_dict["optimizer_steps"].values()):
            group.steps = int(steps)
        if (changes := self._stateful_changes()) is not None:
            changes.load_state_dict(state_dict["gradients"])
        if self.target_updater is not None:
            self.target_updater.load_state_dict(state_dict["targets"])
        self._target_period.load_state_dict(state_dict["target_period"])
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


def _check_hard_update(updater: TargetNetUpdater | None, period: int | str) -> None:
    """Refuse two periods of which one would count the other, and one that is never reached."""
    interval = getattr(updater, "value_network_update_interval", 0)
    whole_number("value_network_update_interval", interval)
    if period != 1 and interval:
        name = type(updater).__name__
        why = f"would call {name}, which copies only once in {interval + 1} calls"
        works = f"give {name}(..., value_network_update_interval=0)"
        raise SettingError("target_update_every", period, why, works)


def _target_period(period: int | str) -> tuple[Every, str]:
    """The period of target updates and what it counts: gradient or policy steps."""
    if not isinstance(period, str):
        return Every(whole_number("target_update_every", period, 1)), "gradient"
    found = re.fullmatch(r"([\d_,]+) (gradient|policy) steps?", period.strip())
    if found is None:
        works = ["100 gradient steps", "1_000 policy steps"]
        raise SettingError("target_update_every", period, "is not a number of steps", works)
    count = int(found[1].replace("_", "").replace(",", "") or 0)
    return Every(whole_number("target_update_every", count, 1)), found[2]
