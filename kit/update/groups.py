"""Optimisers of an update, the losses that they minimise, and checks that both fit together."""

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
"""Positions of the groups whose optimisers step."""


@dataclass(frozen=True)
class Group:
    """One optimiser and the losses it minimises (empty: all)."""

    name: str
    optimizer: Optimizer
    losses: tuple[str, ...]
    period: int
    """gradient steps between two steps of this optimiser."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters that the optimiser has now, including those that are frozen."""
        return [one for group in self.optimizer.param_groups for one in group["params"]]


def groups_of(
    optimizer: Optimizer | Mapping[str, Optimizer],
    every: Mapping[str, int],
    loss_module: nn.Module,
) -> tuple[Group, ...]:
    """Return optimisers with their losses and periods."""
    named = {"": optimizer} if isinstance(optimizer, Optimizer) else optimizer
    for name in every:
        if name not in named:
            works = [*filter(None, named)] or "give each loss an optimiser of its own"
            raise SettingError("every", name, "is not a loss with an optimiser of its own", works)
    others = [name for name in _declared_names(loss_module) if name not in named]
    if len(named) > 1 and "" in named and not others:
        why = "is the optimizer of all other losses, and the loss module declares none"
        raise SettingError("optimizer", "", why, "name its losses, or list them in out_keys")
    groups = []
    for one in dict.fromkeys(named.values()):
        given = [name for name, optimizer in named.items() if optimizer is one]
        names = tuple(filter(None, given))
        periods = {whole_number(f"every.{name}", every.get(name, 1), 1) for name in given}
        if len(periods) > 1:
            why = f"differs for {' and '.join(names)}, which share an optimiser"
            raise SettingError("every", dict(every), why, "give them the same period")
        name = "_".join(name.removeprefix("loss_") for name in names)
        losses = (*names, *others) if "" in given and len(named) > 1 else names
        groups.append(Group(name, one, losses, periods.pop()))
    return tuple(groups)


def due_at(groups: Sequence[Group], gradient_step: int) -> Due:
    """Return the groups whose optimisers step at a gradient step, counted from 1."""
    return tuple([n for n, group in enumerate(groups) if gradient_step % group.period == 0])


def ever_due(groups: Sequence[Group]) -> set[Due]:
    """Return all sets of groups that are due at one gradient step or another."""
    periods = [group.period for group in groups]
    # Groups that are due together are so at the least common multiple of their periods, too.
    some = (itertools.combinations(periods, count) for count in range(len(periods) + 1))
    return {due_at(groups, math.lcm(*together)) for together in itertools.chain(*some)}


def losses_among(names: Iterable[Any]) -> list[str]:
    """Return the names of losses among a loss module's outputs."""
    return [name for name in names if isinstance(name, str) and name.startswith("loss")]


def flat(losses: TensorDictBase) -> TensorDictBase:
    """Return the outputs of a loss module with flat names."""
    if any(isinstance(value, TensorDictBase) for value in losses.values()):
        return losses.flatten_keys(".")  # entropies of several actions: entropy.gear_entropy
    return losses


def total_of(losses: TensorDictBase, names: Sequence[str] = ()) -> Tensor:
    """Return the sum of losses: of all, or of those with these names."""
    parts = [losses[name].float() for name in names or losses_among(losses.keys()) or ["loss"]]
    total: Tensor = sum(parts[1:], parts[0])
    return total


def gradients_of(
    group: Group, losses: TensorDictBase, retain_graph: bool
) -> Sequence[Tensor | None]:
    """Return the gradients of the sum of a group's losses."""
    total, parameters = total_of(losses, group.losses), group.parameters
    learning = [p for p in parameters if p.requires_grad]  # others are frozen
    if not (learning and total.requires_grad):
        return [None] * len(parameters)
    if any(p._post_accumulate_grad_hooks for p in learning):
        name = "register_post_accumulate_grad_hook"
        why = "of a parameter is not called: gradients are computed, not accumulated"
        raise SettingError("hook", name, why, "use register_hook, or a hook of the trainer")
    found = iter(torch.autograd.grad(total, learning, retain_graph=retain_graph, allow_unused=True))
    return [next(found) if p.requires_grad else None for p in parameters]


# ---------------------------------------------------------------------- what fits together
def reaches(outputs: Iterable[Tensor], weights: Sequence[Tensor]) -> list[bool]:
    """Return whether outputs have a gradient to each of some weights."""
    totals = [one.sum() for one in outputs if one.requires_grad]
    if not (totals and weights):
        return [False] * len(weights)
    found = torch.autograd.grad(totals, weights, retain_graph=True, allow_unused=True)
    return [gradient is not None for gradient in found]


class LossChecks:
    """Checks that losses and optimisers fit together, before the first step of each optimiser.

    The checks are repeated when a frozen weight begins to learn, as it may be in no optimiser.
    """

    def __init__(self, groups: Sequence[Group], loss_module: nn.Module) -> None:
        self.groups, self.loss_module = groups, loss_module
        self._checked: set[int] = set()
        self._learning: set[int] = set()
        declared = _declared_names(loss_module)
        if declared and {name for group in groups for name in group.losses} <= {*declared}:
            self._check_names(declared)

    def __call__(self, due: Due, losses: TensorDictBase) -> None:
        """Check the losses of a gradient step before its optimisers step."""
        learning = {id(one) for one in self.loss_module.parameters() if one.requires_grad}
        if not learning <= self._learning:
            self._learning |= learning
            self._checked.clear()
        if not self._checked.issuperset(due):
            self._check(due, losses)

    def _check(self, due: Due, losses: TensorDictBase) -> None:
        names = losses_among(losses.keys())
        later = {name for n, g in enumerate(self.groups) if n not in due for name in g.losses}
        self._check_names([*names, *sorted(later & LEFT_OUT - {*names})])
        there = [n for n, group in enumerate(self.groups) if {*group.losses} <= {*names}]
        for number in there:
            self._check_reached(self.groups[number], losses, names)
        self._check_owned(losses, names)
        self._checked.update(there)

    def _check_names(self, losses: Sequence[str]) -> None:
        """Raise an error for a loss without an optimiser."""
        named = [name for group in self.groups for name in group.losses]
        left = [name for name in losses if name not in {*named, *self._fixed}]
        if named and left:
            why = f"leaves {' and '.join(left)} without an optimiser"
            works = "name an optimiser for it as well (several losses may share one)"
            raise SettingError("optimizer", named, why, works)

    @property
    def _fixed(self) -> set[str]:
        """Losses that depend on no parameter: TorchRL's of a temperature that is fixed."""
        return {"loss_alpha"} if getattr(self.loss_module, "fixed_alpha", False) else set()

    def _check_reached(self, group: Group, losses: TensorDictBase, names: Sequence[str]) -> None:
        """Raise an error if the losses of a group do not reach weights of its optimiser."""
        own = group.losses or names
        learning = [one for one in group.parameters if one.requires_grad]
        found = reaches([losses[name] for name in own], learning)
        if learning and not any(found):
            name = group.name or type(group.optimizer).__name__
            why = f"is over parameters that {' and '.join(own)} does not reach"
            works = "give it those of the loss module's networks"
            raise SettingError("optimizer", name, why, works)
        left = [one for one, is_reached in zip(learning, found) if not is_reached]
        if left:
            self._check_unreached(left, losses, names, own)

    def _check_unreached(
        self, left: list[nn.Parameter], losses: TensorDictBase, names: Sequence[str], own: Any
    ) -> None:
        """Raise an error if weights are not reached because a loss is detached or misnamed."""
        known = {id(one): name for name, one in self.loss_module.named_parameters()}
        first, kind = known.get(id(left[0]), "a weight"), type(self.loss_module).__name__
        for name in own:
            if not losses[name].requires_grad and name not in self._fixed:
                why = f"returns a {name} without a gradient, and no other changes {first}"
                works = "leave out detach() and no_grad(), or freeze it: requires_grad_(False)"
                raise SettingError("loss_module", kind, why, works)
        for name in losses.keys():
            if name not in names and any(reaches([losses[name]], left)):
                why = f"returns {name}, which alone reaches {first} and is not minimised"
                raise SettingError("loss_module", kind, why, f"call it loss_{name}, or detach it")

    def _check_owned(self, losses: TensorDictBase, names: Sequence[str]) -> None:
        """Raise an error if losses reach weights that are not frozen and in no optimiser."""
        owned = {id(one) for group in self.groups for one in group.parameters}
        named = self.loss_module.named_parameters()
        others = {k: one for k, one in named if one.requires_grad and id(one) not in owned}
        found = reaches([losses[name] for name in names], [*others.values()])
        stay = [name for name, is_reached in zip(others, found) if is_reached]
        if stay:
            optimizers = " and ".join(type(group.optimizer).__name__ for group in self.groups)
            several = "" if len(stay) == 1 else f" and {len(stay) - 1} more"
            why = f"would never change {stay[0]}{several}, which {' and '.join(names)} reach"
            works = "give it these weights, too, or freeze them: requires_grad_(False)"
            raise SettingError("optimizer", optimizers, why, works)


def _declared_names(loss_module: nn.Module) -> list[str]:
    """Return the names of losses that a module declares."""
    try:
        return losses_among(getattr(loss_module, "out_keys", None) or ())
    except (AttributeError, NotImplementedError, RuntimeError):  # a property of TorchRL's
        return []
