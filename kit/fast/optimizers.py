"""Which optimisers' steps are fixed lists of tensor operations, and what these read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT


class RMSprop(torch.optim.RMSprop):
    """PyTorch's RMSprop, whose step here is the same list of operations at any learning rate.

    PyTorch's has no fused step: each takes as long as loss and gradients of a small network. This
    one has the same state, and its results up to the order of the last two products.

    Args:
        params: parameters or their groups.
        lr: learning rate.
        alpha: decay of the mean square.
        eps: added to its root.
    """

    def __init__(
        self, params: ParamsT, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8
    ) -> None:
        super().__init__(params, lr=lr, alpha=alpha, eps=eps)
        for group in self.param_groups:
            group["fused"] = True  # as far as programs are concerned

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step; there is no closure."""
        assert closure is None
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            if parameters:
                self._step(group, parameters)

    def _step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for one in parameters:
            if not self.state[one]:
                self.state[one] |= {"step": torch.zeros(()), "square_avg": torch.zeros_like(one)}
        gradients: list[Any] = [one.grad for one in parameters]
        squares = [self.state[one]["square_avg"] for one in parameters]
        torch._foreach_add_([self.state[one]["step"] for one in parameters], 1)
        torch._foreach_mul_(squares, group["alpha"])
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - group["alpha"])
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        changes = torch._foreach_div(gradients, roots)
        rate = group["lr"]
        torch._foreach_mul_(changes, rate.to(changes[0]) if isinstance(rate, Tensor) else rate)
        torch._foreach_sub_(parameters, changes)


_FUSED = (Adam, AdamW, SGD, Adagrad, RMSprop)


def step_is_fixed(optimizers: Sequence[Optimizer]) -> bool:
    """Whether the next step of each of the optimisers is the same list of operations as later ones.

    That of PyTorch's fused optimisers is, from the second step on, and without hooks.
    """
    return all(
        type(optimizer) in _FUSED
        and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        and all(_is_fixed(optimizer, group) for group in optimizer.param_groups)
        for optimizer in optimizers
    )


def _is_fixed(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    has_state = any(parameter in optimizer.state for parameter in group["params"])
    return bool(group.get("fused")) and (
        has_state or (isinstance(optimizer, SGD) and not group["momentum"])
    )


class FusedOptimizers:
    """Keeps what fused optimisers read where programs see every change, and count it at once.

    Learning rates are tensors; the counters of a group's parameters are elements of one tensor.

    Args:
        optimizers: those whose groups are looked after; others than fused ones are left alone.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [o for o in optimizers if type(o) in _FUSED]
        self._rates: dict[tuple[int, int], Tensor] = {}
        self.update()

    def update(self) -> None:
        """Take over rates that were set to a number, and counters that are new."""
        for number, optimizer in enumerate(self._optimizers):
            for place, group in enumerate(optimizer.param_groups):
                if group.get("fused"):
                    if not isinstance(group["lr"], Tensor):
                        group["lr"] = self._filled((number, place), group)
                    _join_counters(optimizer, group["params"])

    def _filled(self, place: tuple[int, int], group: dict[str, Any]) -> Tensor:
        if place not in self._rates:
            device = group["params"][0].device  # kernels on a GPU read a rate there, as float32
            kind = torch.float64 if device.type == "cpu" else torch.float32
            self._rates[place] = torch.zeros((), dtype=kind, device=device)
        return self._rates[place].fill_(group["lr"])


def _join_counters(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Make the counters of parameters elements of one tensor, on the host."""
    first = optimizer.state.get(parameters[0], {}).get("step")
    if first is None or not first.is_cpu or first._is_view():
        return
    states = [optimizer.state[one] for one in parameters if one in optimizer.state]
    for state, counter in zip(states, torch.stack([state["step"] for state in states])):
        state["step"] = counter
