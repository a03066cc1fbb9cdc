"""The optimisers of an update, the losses they minimise, and whether these fit together."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from kit.steps import SettingError
from kit.steps.errors import whole_number


@dataclass
class Group:
    """One optimiser and the losses it minimises (empty: all)."""

    name: str
    optimizer: Optimizer
    losses: tuple[str, ...]
    period: int
    """gradient steps between two steps of this optimiser."""
    steps: int = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "steps" and name in vars(self):
            raise another(name, value)
        super().__setattr__(name, value)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that the optimiser has now, those included that are frozen at the moment."""
        return [one for group in self.optimizer.param_groups for one in group["params"]]


def another(field: str, value: Any) -> SettingError:
    """The refusal of a part that takes the place of one of an update."""
    given = value if isinstance(value, int) else type(value).__name__
    why = "is another one than this update's programs, checks and checkpoints are about"
    return SettingError(field, given, why, "make another Update with it")


def groups_of(
    optimizer: Optimizer | Mapping[str, Optimizer],
    every: Mapping[str, int],
    loss_module: nn.Module,
) -> tuple[Group, ...]:
    """Optimisers with their losses and periods.

    Raises:
        SettingError: if an argument is invalid, or ``""`` is given for a loss module that does not
            declare its other losses.
    """
    named = {"": optimizer} if isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(named, Mapping):
        works = "give one of torch.optim over loss.parameters(), or several by name of their loss"
        raise SettingError("optimizer", optimizer, "is no optimiser", works)
    for name in every:
        if name not in named:
            works = [*filter(None, named)] or "give each loss an optimiser of its own"
            raise SettingError("every", name, "is not a loss with an optimiser of its own", works)
    others = [name for name in _losses_of(loss_module) if name not in named]
    if len(named) > 1 and "" in named and not others:
        why = "is the optimizer of all other losses, and the loss module declares none"
        raise SettingError("optimizer", "", why, "name its losses, or list them in out_keys")
    groups = []
    for one in dict.fromkeys(named.values()):
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            why = "computes the loss several times in one step, and here it is computed once"
            raise SettingError("optimizer", type(one).__name__, why, ["Adam", "RMSprop", "SGD"])
        weights = [weight for group in one.param_groups for weight in group["params"]]
        if any(weight.is_inference() for weight in weights if not is_lazy(weight)):
            why = "is over weights that were made in torch.inference_mode(), which never learn"
            raise SettingError("optimizer", type(one).__name__, why, "make networks outside of it")
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


def losses_among(names: Iterable[Any]) -> list[str]:
    """The names of losses among those of a loss module's outputs."""
    return [name for name in names if isinstance(name, str) and name.startswith("loss")]


def check_names(groups: Sequence[Group], losses: Sequence[str], loss_module: nn.Module) -> None:
    """Refuse an optimiser for a loss that does not exist, and a loss without an optimiser.

    A temperature that is fixed needs none: TorchRL's losses of it depend on no parameter.
    """
    named = [name for group in groups for name in group.losses]
    fixed = _fixed(loss_module)
    for name in named:
        if name not in losses:
            raise SettingError("optimizer", name, "is not a loss of the loss module", losses)
    left = [name for name in losses if name not in {*named, *fixed}]
    if named and left:
        why = f"leaves {' and '.join(left)} without an optimiser"
        works = "name an optimiser for it as well (several losses may share one)"
        raise SettingError("optimizer", named, why, works)


def _fixed(loss_module: nn.Module) -> set[str]:
    return {"loss_alpha"} if getattr(loss_module, "fixed_alpha", False) else set()


def _losses_of(loss_module: nn.Module) -> list[str]:
    """Names of the losses that the module says it has."""
    try:
        return losses_among(getattr(loss_module, "out_keys", None) or ())
    except (AttributeError, NotImplementedError, RuntimeError):  # a property of TorchRL's
        return []


def declared_losses(loss_module: nn.Module, groups: Sequence[Group]) -> list[str]:
    """Names of the losses that the module says it has, if these include all that are named."""
    declared = _losses_of(loss_module)
    return declared if {name for group in groups for name in group.losses} <= {*declared} else []


def gradients_of(
    group: Group, losses: TensorDictBase, retain_graph: bool
) -> Sequence[Tensor | None]:
    """The gradients of the sum of a group's losses.

    Raises:
        SettingError: if a loss is not there, or a parameter has a hook that would not be called.
    """
    names = group.losses or losses_among(losses.keys())
    for name in names or ["loss"]:
        if name not in losses.keys():
            why = f"is not among what the loss module returns this time, {list(losses.keys())}"
            raise SettingError("optimizer", name, why, "return each loss in every gradient step")
    parts = [losses.get(name).float() for name in names]
    total, parameters = sum(parts[1:], parts[0]), group.parameters
    learning = [p for p in parameters if p.requires_grad]  # others are frozen
    if not (learning and total.requires_grad):
        return [None] * len(parameters)
    if any(p._post_accumulate_grad_hooks for p in learning):
        name = "register_post_accumulate_grad_hook"
        why = "of a parameter is not called: gradients are computed, not accumulated"
        raise SettingError("hook", name, why, "use register_hook, or a hook of the trainer")
    found = iter(torch.autograd.grad(total, learning, retain_graph=retain_graph, allow_unused=True))
    return [next(found) if p.requires_grad else None for p in parameters]


def as_losses(loss_module: nn.Module, returned: Any) -> TensorDictBase:
    """The outputs of a loss module, checked."""
    name = type(loss_module).__name__
    works = 'return TensorDict({"loss": loss}) with a loss that is one number'
    if not isinstance(returned, TensorDictBase):
        kind = type(returned).__name__
        raise SettingError("loss_module", name, f"returns a {kind}, not a TensorDict", works)
    if any(isinstance(value, TensorDictBase) for value in returned.values()):
        returned = returned.flatten_keys(".")  # entropies of several actions: entropy.gear_entropy
    for key, value in returned.items():
        if not isinstance(value, Tensor):
            why = f"returns {key!r}, which is a {type(value).__name__}, and metrics are tensors"
            raise SettingError("loss_module", name, why, "leave it out, or log it by a hook")
        if not value.numel() or value.is_complex():
            kind = f"shape {list(value.shape)}, {value.dtype}"
            why = f"returns {key!r}, of which there is no mean ({kind})"
            raise SettingError("loss_module", name, why, "leave it out, or give a real number")
    for loss in losses_among(returned.keys()):
        if returned.get(loss).numel() != 1:
            why = f"returns a {loss} of shape {list(returned.get(loss).shape)}, not one number"
            raise SettingError("loss_module", name, why, 'take its mean (reduction="mean")')
    return returned


def check_reached(
    group: Group,
    found: Sequence[Tensor | None],
    losses: TensorDictBase,
    names: Sequence[str],
    loss_module: nn.Module,
) -> None:
    """Refuse weights that no loss reaches where a loss is cut off from all weights, or misnamed.

    Args:
        group: of which losses may leave weights alone that nothing in them uses.
        found: gradients of its parameters.
        losses: outputs of the loss module.
        names: those that are minimised.
        loss_module: has names for its weights.

    Raises:
        SettingError: if there are some: they would never change.
    """
    pairs = zip(group.parameters, found)
    left = [one for one, gradient in pairs if one.requires_grad and gradient is None]
    if not left:
        return
    known = {id(one): name for name, one in loss_module.named_parameters()}
    first, kind = known.get(id(left[0]), "a weight"), type(loss_module).__name__
    for name in group.losses or names:
        if not losses[name].requires_grad and name not in _fixed(loss_module):
            why = f"returns a {name} without a gradient, and no other changes {first}"
            works = "leave out detach() and no_grad(), or freeze it: requires_grad_(False)"
            raise SettingError("loss_module", kind, why, works)
    others = [name for name in losses.keys() if name not in names and losses[name].requires_grad]
    for name in others:
        total = losses[name].sum()
        reached = torch.autograd.grad(total, left, retain_graph=True, allow_unused=True)
        if any(gradient is not None for gradient in reached):
            why = f"returns {name}, which alone reaches {first} and is not minimised"
            raise SettingError("loss_module", kind, why, f"call it loss_{name}, or detach it")


def check_weights(
    groups: Sequence[Group], losses: TensorDictBase, names: Sequence[str], loss_module: nn.Module
) -> None:
    """Refuse weights that are to be learnt, that the losses reach, and that no optimiser has.

    Raises:
        SettingError: if there are some: they would never change.
    """
    learnt = {id(one) for group in groups for one in group.parameters}
    others = {
        name: one
        for name, one in loss_module.named_parameters()
        if one.requires_grad and id(one) not in learnt
    }
    with_gradients = [losses[name] for name in names if losses[name].requires_grad]
    if not others or not with_gradients:
        return
    found = torch.autograd.grad(
        with_gradients, [*others.values()], retain_graph=True, allow_unused=True
    )
    stay = [name for name, gradient in zip(others, found) if gradient is not None]
    if stay:
        optimizers = " and ".join(type(group.optimizer).__name__ for group in groups)
        several = "" if len(stay) == 1 else f" and {len(stay) - 1} more"
        why = f"would never change {stay[0]}{several}, which {' and '.join(names)} reach"
        works = "give it these weights, too, or freeze them: requires_grad_(False)"
        raise SettingError("optimizer", optimizers, why, works)
