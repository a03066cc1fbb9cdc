"""Optimiser groups: optimisers, their losses, and checks that losses and optimisers match."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim import Optimizer

from kit.losses.due import LEFT_OUT
from kit.steps import SettingError
from kit.steps.errors import whole_number

Due = tuple[int, ...]
"""Indices of the groups whose optimisers take a step."""


@dataclass(frozen=True)
class Group:
    """An optimiser and the losses it minimises. An empty tuple of losses means all losses."""

    name: str
    optimizer: Optimizer
    losses: tuple[str, ...]
    period: int
    """Number of gradient steps per step of this optimiser."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All current parameters of the optimiser, including frozen parameters."""
        return [one for group in self.optimizer.param_groups for one in group["params"]]


def groups_of(
    optimizer: Optimizer | Mapping[str, Optimizer],
    every: Mapping[str, int],
    loss_module: nn.Module,
) -> tuple[Group, ...]:
    """Create a group for each optimiser, with its losses and period."""
    named = {"": optimizer} if isinstance(optimizer, Optimizer) else optimizer
    for name in every:
        if name not in named:
            hint = [*filter(None, named)] or "Pass a separate optimiser for each loss"
            raise SettingError("every", name, "This loss has no separate optimiser", hint)
    others = [name for name in _declared_names(loss_module) if name not in named]
    if len(named) > 1 and "" in named and not others:
        reason = "The name '' selects all other losses, but the module declares no other losses"
        raise SettingError("optimizer", "", reason, "Name the losses, or list them in out_keys")
    groups = []
    for member in dict.fromkeys(named.values()):
        keys = [name for name, optimizer in named.items() if optimizer is member]
        names = tuple(filter(None, keys))
        periods = {whole_number(f"every.{name}", every.get(name, 1), 1) for name in keys}
        if len(periods) > 1:
            reason = f"Periods differ for {' and '.join(names)}, which share an optimiser"
            raise SettingError("every", dict(every), reason, "Use the same period for these losses")
        name = "_".join(name.removeprefix("loss_") for name in names)
        losses = (*names, *others) if "" in keys and len(named) > 1 else names
        groups.append(Group(name, member, losses, periods.pop()))
    return tuple(groups)


def due_at(groups: Sequence[Group], gradient_step: int) -> Due:
    """Return the indices of the groups due at a gradient step, which is counted from 1."""
    return tuple([n for n, group in enumerate(groups) if gradient_step % group.period == 0])


def ever_due(groups: Sequence[Group]) -> set[Due]:
    """Return all sets of groups that step together at some gradient step."""
    periods = [group.period for group in groups]
    # A set of groups first steps together at the least common multiple of the groups' periods.
    subsets = (itertools.combinations(periods, count) for count in range(len(periods) + 1))
    return {due_at(groups, math.lcm(*subset)) for subset in itertools.chain(*subsets)}


def losses_among(names: Iterable[Any]) -> list[str]:
    """Return the names of losses: output names that start with ``loss``."""
    return [name for name in names if isinstance(name, str) and name.startswith("loss")]


def flat(losses: TensorDictBase) -> TensorDictBase:
    """Return the outputs of a loss module with nested names flattened."""
    if any(isinstance(value, TensorDictBase) for value in losses.values()):
        return losses.flatten_keys(".")  # Composite actions have nested outputs.
    return losses


def total_of(losses: TensorDictBase, names: Sequence[str] = ()) -> Tensor:
    """Return the sum of the named losses, or of all losses if no names are given."""
    parts = [losses[name].float() for name in names or losses_among(losses.keys()) or ["loss"]]
    total: Tensor = sum(parts[1:], parts[0])
    return total


def gradients_of(
    group: Group, losses: TensorDictBase, retain_graph: bool
) -> Sequence[Tensor | None]:
    """Return the gradients of a group's total loss with respect to the group's parameters."""
    total, parameters = total_of(losses, group.losses), group.parameters
    trainable = [p for p in parameters if p.requires_grad]
    if not (trainable and total.requires_grad):
        return [None] * len(parameters)
    if any(p._post_accumulate_grad_hooks for p in trainable):
        name = "register_post_accumulate_grad_hook"
        reason = "Gradients are not accumulated, so this hook would never be called"
        raise SettingError("hook", name, reason, "Use register_hook, or a hook of the trainer")
    found = torch.autograd.grad(total, trainable, retain_graph=retain_graph, allow_unused=True)
    gradients = iter(found)
    return [next(gradients) if p.requires_grad else None for p in parameters]


# ---------------------------------------------------------------------- checks
def reaches(outputs: Iterable[Tensor], weights: Sequence[Tensor]) -> list[bool]:
    """Return, for each weight, whether the outputs have a gradient with respect to the weight."""
    totals = [one.sum() for one in outputs if one.requires_grad]
    if not (totals and weights):
        return [False] * len(weights)
    found = torch.autograd.grad(totals, weights, retain_graph=True, allow_unused=True)
    return [gradient is not None for gradient in found]


class LossChecks:
    """Checks, before each optimiser's first step, that losses and optimisers match.

    The checks are repeated when a parameter is unfrozen, because the parameter may not belong to
    any optimiser.
    """

    def __init__(self, groups: Sequence[Group], loss_module: nn.Module) -> None:
        self.groups, self.loss_module = groups, loss_module
        self._checked: set[int] = set()
        self._trainable: set[int] = set()
        declared = _declared_names(loss_module)
        if declared and {name for group in groups for name in group.losses} <= {*declared}:
            self._check_names(declared)

    def __call__(self, due: Due, losses: TensorDictBase) -> None:
        """Check the losses of a gradient step before its optimisers step."""
        trainable = {id(p) for p in self.loss_module.parameters() if p.requires_grad}
        if not trainable <= self._trainable:
            self._trainable |= trainable
            self._checked.clear()
        if not self._checked.issuperset(due):
            self._check(due, losses)

    def _check(self, due: Due, losses: TensorDictBase) -> None:
        names = losses_among(losses.keys())
        later = {name for n, g in enumerate(self.groups) if n not in due for name in g.losses}
        self._check_names([*names, *sorted(later & LEFT_OUT - {*names})])
        present = [n for n, group in enumerate(self.groups) if {*group.losses} <= {*names}]
        for number in present:
            self._check_reached(self.groups[number], losses, names)
        self._check_owned(losses, names)
        self._checked.update(present)

    def _check_names(self, losses: Sequence[str]) -> None:
        named = [name for group in self.groups for name in group.losses]
        missing = [name for name in losses if name not in {*named, *self._fixed}]
        if named and missing:
            reason = f"No optimiser minimises {' and '.join(missing)}"
            hint = "Assign each of these losses to an optimiser"
            raise SettingError("optimizer", named, reason, hint)

    @property
    def _fixed(self) -> set[str]:
        """Losses without trainable parameters, such as ``loss_alpha`` with a fixed temperature."""
        return {"loss_alpha"} if getattr(self.loss_module, "fixed_alpha", False) else set()

    def _check_reached(self, group: Group, losses: TensorDictBase, names: Sequence[str]) -> None:
        """Raise an error if a group's losses have no gradient for parameters of its optimiser."""
        minimized = group.losses or names
        trainable = [p for p in group.parameters if p.requires_grad]
        reached = reaches([losses[name] for name in minimized], trainable)
        if trainable and not any(reached):
            name = group.name or type(group.optimizer).__name__
            reason = f"Parameters of this optimiser do not affect {' and '.join(minimized)}"
            hint = "Pass the parameters of the loss module's networks"
            raise SettingError("optimizer", name, reason, hint)
        unreached = [p for p, is_reached in zip(trainable, reached) if not is_reached]
        if unreached:
            self._check_unreached(unreached, losses, names, minimized)

    def _check_unreached(
        self,
        unreached: list[nn.Parameter],
        losses: TensorDictBase,
        names: Sequence[str],
        minimized: Sequence[str],
    ) -> None:
        """Raise an error if parameters have no gradient because a loss is detached or misnamed."""
        paths = {id(p): name for name, p in self.loss_module.named_parameters()}
        first, kind = paths.get(id(unreached[0]), "a weight"), type(self.loss_module).__name__
        for name in minimized:
            if not losses[name].requires_grad and name not in self._fixed:
                reason = f"The returned {name} has no gradient, so {first} would never change"
                hint = "Remove detach() and no_grad(), or freeze weights with requires_grad_(False)"
                raise SettingError("loss_module", kind, reason, hint)
        for name in losses.keys():
            if name not in names and any(reaches([losses[name]], unreached)):
                reason = f"Only {name} depends on {first}, but {name} is not minimised"
                raise SettingError(
                    "loss_module", kind, reason, f"Rename {name} to loss_{name}, or detach it"
                )

    def _check_owned(self, losses: TensorDictBase, names: Sequence[str]) -> None:
        """Raise an error if losses depend on trainable parameters that no optimiser updates."""
        owned = {id(one) for group in self.groups for one in group.parameters}
        named = self.loss_module.named_parameters()
        others = {k: p for k, p in named if p.requires_grad and id(p) not in owned}
        reached = reaches([losses[name] for name in names], [*others.values()])
        unowned = [name for name, is_reached in zip(others, reached) if is_reached]
        if unowned:
            optimizers = " and ".join(type(group.optimizer).__name__ for group in self.groups)
            more = "" if len(unowned) == 1 else f" and {len(unowned) - 1} more weights"
            reason = f"No optimiser updates {unowned[0]}{more}, but the losses depend on it"
            hint = "Add the weights to an optimiser, or freeze them with requires_grad_(False)"
            raise SettingError("optimizer", optimizers, reason, hint)


def _declared_names(loss_module: nn.Module) -> list[str]:
    try:
        return losses_among(getattr(loss_module, "out_keys", None) or ())
    except (AttributeError, NotImplementedError, RuntimeError):  # out_keys may raise an error.
        return []
