"""One gradient step: minibatch, loss, gradients, clipping, optimisers, target networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrl.objectives import SoftUpdate
from torchrl.objectives.utils import TargetNetUpdater
from torchrl.trainers import OptimizationStepper

from kit.fast.flat_update import FlatUpdate, Gradients, Metrics
from kit.fast.old_trace import FlatProgram, trace
from kit.logging.metrics import scalar, weighted_mean
from kit.steps import SettingError
from kit.steps.errors import whole_number

Compile = Literal["auto", True, False]


@dataclass
class _Group:
    """One optimiser, the losses it minimises and the parameters it owns."""

    name: str
    optimizer: Optimizer
    losses: tuple[str, ...] | None
    parameters: list[nn.Parameter]


class Update(OptimizationStepper):
    """Minimises a TorchRL loss, one gradient step at a time.

    It is an ``OptimizationStepper``: TorchRL's ``Trainer`` takes it, and the kit's trainer takes
    TorchRL's steppers in its place. Called with a minibatch, it makes one gradient step and returns
    metrics that stay on the device.

    Args:
        loss_module: returns a TensorDict whose entries named ``loss...`` are minimised (their sum)
            and whose other entries are metrics.
        optimizer: one optimiser for all losses; or one by name of the loss it minimises
            (``{"loss_actor": ..., "loss_qvalue": ...}``; several names may share an optimiser).
        clip_norm: largest norm of the gradients of an optimiser's parameters; ``None``: unclipped.
        clip_value: largest absolute value of a gradient; ``None``: unclipped.
        target_updater: ``SoftUpdate`` or ``HardUpdate`` of the loss's target networks.
        target_update_every: gradient steps between two target updates.
        autocast: type in which the forward pass may compute (``torch.bfloat16``); ``None``: as the
            parameters are.
        compile: ``"auto"``: the loss with its backward pass is traced once per minibatch shape and
            replayed as a flat list of tensor operations, with bitwise the same results, and runs
            eagerly where that is not possible. ``True``: the list is also compiled by
            ``torch.compile``, which rounds differently and needs a C++ compiler. ``False``: eager.

    Attributes:
        optimizer_step_count: gradient steps made.

    Raises:
        SettingError: if clipping contradicts itself, or an optimiser is named for a loss that the
            loss module does not have.
    """

    def __init__(
        self,
        loss_module: nn.Module,
        optimizer: Optimizer | Mapping[str, Optimizer],
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        target_updater: TargetNetUpdater | None = None,
        target_update_every: int = 1,
        autocast: torch.dtype | None = None,
        compile: Compile = "auto",
    ) -> None:
        self.loss_module = loss_module
        self.groups = _groups(optimizer)
        self.clip_norm = _positive("clip_norm", clip_norm)
        self.clip_value = _positive("clip_value", clip_value)
        if clip_norm is not None and clip_value is not None:
            raise SettingError("clip_value", clip_value, f"contradicts clip_norm={clip_norm}")
        self.target_updater = target_updater
        self.target_update_every = whole_number("target_update_every", target_update_every, 1)
        self.autocast = autocast
        if compile not in ("auto", True, False):
            raise SettingError("compile", compile, "is not a way to run", ["auto", True, False])
        self.compile = compile
        self.optimizer_step_count = 0
        self._parameters = [p for group in self.groups for p in group.parameters]
        self._update_targets = _target_step(target_updater, bool(compile))
        self._flat: FlatUpdate | None = None
        if compile:
            optimizers = [group.optimizer for group in self.groups]
            self._flat = FlatUpdate(
                loss_module, self._loss, self._apply, optimizers, compile=compile is True
            )

    @property
    def plain_reason(self) -> str:
        """Why the loss runs eagerly; empty while it does not."""
        return "asked for" if self._flat is None else self._flat.plain_reason

    @property
    def keys_read(self) -> list[Any]:
        """Keys of a minibatch that the loss reads; empty as long as that is not known."""
        return [] if self._flat is None else self._flat.keys_read

    # ------------------------------------------------------------------ one gradient step
    def __call__(self, *minibatches: TensorDictBase) -> TensorDict:
        """Make one gradient step on one minibatch, or on several whose gradients are averaged.

        Args:
            minibatches: TensorDicts of any batch size; several count by their rows, so that the
                step is that of the mean over all rows.

        Returns:
            Losses, the loss's metrics and the norm of the gradients: scalars on the device.
        """
        if len(minibatches) == 1 and self._flat is not None:
            metrics = self._flat.step(minibatches[0])
        else:
            metrics, gradients = self._accumulated(minibatches)
            with torch.no_grad():
                metrics |= self._apply(gradients)
        self.stepped()
        return TensorDict(metrics)

    def losses(self, minibatch: TensorDictBase) -> TensorDictBase:
        """Return what the loss module makes of a minibatch, in the type it may compute in."""
        if self.autocast is None:
            return _flat(self.loss_module(minibatch))
        kind = self._parameters[0].device.type
        with torch.autocast(kind, dtype=self.autocast):
            return _flat(self.loss_module(minibatch))

    def minimize(self, losses: TensorDictBase) -> TensorDict:
        """Make one gradient step on losses that were computed elsewhere, eagerly.

        Args:
            losses: as the loss module returns them, perhaps changed.
        """
        gradients = self._differentiate(losses)
        metrics = {name: scalar(value) for name, value in losses.items()}
        with torch.no_grad():
            metrics |= self._apply(gradients)
        self.stepped()
        return TensorDict(metrics)

    def stepped(self) -> None:
        """Count a gradient step that was made; update the targets if it is their turn."""
        self.optimizer_step_count += 1
        due = self.optimizer_step_count % self.target_update_every == 0
        if due and self._update_targets is not None:
            self._update_targets()

    def step(self, trainer: Any, sub_batch: TensorDictBase) -> TensorDictBase:
        """Make one gradient step, as TorchRL's trainer asks for it."""
        del trainer
        return self(sub_batch)

    def _accumulated(self, minibatches: Sequence[TensorDictBase]) -> tuple[Metrics, Gradients]:
        gradients_of = self._loss if self._flat is None else self._flat.gradients
        if len(minibatches) == 1:
            return gradients_of(minibatches[0])
        rows = [minibatch.numel() for minibatch in minibatches]
        total: list[Tensor | None] = [None] * len(self._parameters)
        parts = []
        for minibatch, weight in zip(minibatches, (n / sum(rows) for n in rows)):
            metrics, gradients = gradients_of(minibatch)
            parts.append(metrics)
            for number, gradient in enumerate(gradients):
                if gradient is not None:
                    before = total[number]
                    share = gradient * weight
                    total[number] = share if before is None else before + share
        return dict(weighted_mean(parts, rows).items()), total

    def _apply(self, gradients: Gradients) -> Metrics:
        """Clip and let the optimisers step; return the norms before clipping."""
        norms: dict[str, Tensor] = {}
        place = 0
        for group in self.groups:
            own = gradients[place : place + len(group.parameters)]
            place += len(group.parameters)
            given = [gradient for gradient in own if gradient is not None]
            norm = torch.nn.utils.get_total_norm(given)
            norms[f"grad_norm{group.name}"] = norm
            clipped = iter(self._clipped(given, norm) if given else ())
            for parameter, gradient in zip(group.parameters, own):
                parameter.grad = None if gradient is None else next(clipped)
            group.optimizer.step()
            for parameter in group.parameters:
                parameter.grad = None
        return norms

    def _clipped(self, gradients: list[Tensor], norm: Tensor) -> Sequence[Tensor]:
        """Return clipped gradients; not in place, as several may be one and the same tensor."""
        if self.clip_norm is not None:
            return torch._foreach_mul(gradients, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if self.clip_value is not None:
            gradients = list(torch._foreach_clamp_min(gradients, -self.clip_value))
            return torch._foreach_clamp_max(gradients, self.clip_value)
        return gradients

    # ------------------------------------------------------------------ loss and gradients
    @torch.enable_grad()
    def _loss(self, minibatch: TensorDictBase) -> tuple[Metrics, Gradients]:
        """Return metrics and the gradients of all parameters, in the order of the groups."""
        losses = self.losses(minibatch)
        gradients = self._differentiate(losses)
        return {name: scalar(value) for name, value in losses.items()}, gradients

    def _differentiate(self, losses: TensorDictBase) -> list[Tensor | None]:
        gradients: list[Tensor | None] = []
        for number, group in enumerate(self.groups):
            names = group.losses or [name for name in losses.keys() if name.startswith("loss")]
            parts = [self._named(losses, name).float() for name in names]
            if not parts:
                raise SettingError(
                    "loss_module",
                    type(self.loss_module).__name__,
                    "has no entry named loss..., which would be minimised",
                    f"it returns {list(losses.keys())}",
                )
            found = torch.autograd.grad(
                sum(parts[1:], parts[0]),
                group.parameters,
                retain_graph=number + 1 < len(self.groups),
                allow_unused=True,
            )
            gradients += map(_in_layout_of, group.parameters, found)
        return gradients

    def _named(self, losses: TensorDictBase, name: str) -> Tensor:
        loss: Tensor | None = losses.get(name, None)
        if loss is None:
            there = [n for n in losses.keys() if n.startswith("loss")]
            raise SettingError("optimizer", name, "is not a loss of the loss module", there)
        return loss

    # ------------------------------------------------------------------ in and out
    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """Optimisers by name."""
        return {group.name.lstrip("_") or "optimizer": group.optimizer for group in self.groups}

    def state_dict(self) -> dict[str, Any]:
        """Return where optimisers and target updates are; weights are the loss module's."""
        optimizers = {name: o.state_dict() for name, o in self.optimizers.items()}
        targets = {} if self.target_updater is None else self.target_updater.state_dict()
        return {
            "optimizers": optimizers,
            "targets": targets,
            "optimizer_step_count": self.optimizer_step_count,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state_dict["optimizers"][name])
        if self.target_updater is not None:
            self.target_updater.load_state_dict(state_dict["targets"])
        self.optimizer_step_count = int(state_dict["optimizer_step_count"])


def _groups(optimizer: Optimizer | Mapping[str, Optimizer]) -> list[_Group]:
    if isinstance(optimizer, Optimizer):
        return [_Group("", optimizer, None, _owned(optimizer))]
    losses: dict[int, list[str]] = {}
    distinct: dict[int, Optimizer] = {}
    for name, one in optimizer.items():
        losses.setdefault(id(one), []).append(name)
        distinct[id(one)] = one
    return [
        _Group(
            "_" + "_".join(name.removeprefix("loss_") for name in losses[key]),
            one,
            tuple(losses[key]),
            _owned(one),
        )
        for key, one in distinct.items()
    ]


def _owned(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _in_layout_of(parameter: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return a gradient in the memory layout of its parameter, which fused optimisers rely on."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _positive(field: str, value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise SettingError(field, value, "is not positive", [None, 0.5])
    return value


def _flat(losses: TensorDictBase) -> TensorDictBase:
    """Losses of several actions come with a group of entropies: ``entropy.gear_entropy``."""
    if any(isinstance(value, TensorDictBase) for value in losses.values()):
        return losses.flatten_keys(".")  # type: ignore[no-any-return]
    return losses


def _target_step(updater: TargetNetUpdater | None, flat: bool) -> Callable[[], Any] | None:
    """Return what updates the targets; a soft update, the same each time, is traced."""
    if updater is None:
        return None
    if not (flat and isinstance(updater, SoftUpdate)):
        return updater.step  # type: ignore[no-any-return]
    program: FlatProgram | None = None
    share = updater.eps

    def step() -> None:
        nonlocal program, share
        if program is None or share != updater.eps or not program.is_valid():
            share = updater.eps
            program, _ = trace(lambda: updater.step() or (), ())
        else:
            program()

    return step
