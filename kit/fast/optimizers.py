"""Optimisers whose steps are fixed sequences of tensor operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from kit.fast.vectors import joined, parts_of, vector_of


class RMSprop(torch.optim.RMSprop):
    """RMSprop with a step whose operations do not depend on the learning rate.

    PyTorch's RMSprop has no fused step. For a small network, its step takes as long as computing
    the loss and its gradients. This class has the same state and the same results up to rounding.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        alpha: Decay rate of the mean square.
        eps: Constant added to the root mean square.
        like_tensorflow: Whether the mean square is initially 1 instead of 0, and ``eps`` is added
            before the root is taken, as in TensorFlow 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        like_tensorflow: bool = False,
    ) -> None:
        super().__init__(params, lr=lr, alpha=alpha, eps=eps)
        self.like_tensorflow = like_tensorflow
        for group in self.param_groups:
            group["fused"] = True  # marks the step as traceable

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Perform an optimisation step; closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            if parameters:
                self._step(group, parameters)

    def _step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        new = [one for one in parameters if not self.state[one]]
        for one in new:
            counter = torch.zeros((), device=one.device)  # as in fused optimisers
            square_avg = torch.full_like(one, float(self.like_tensorflow))
            self.state[one] |= {"step": counter, "square_avg": square_avg}
        if new:
            _join(self, parameters, "square_avg")
        states = [self.state[one] for one in parameters]
        torch._foreach_add_([state["step"] for state in states], 1)
        squares = [state["square_avg"] for state in states]
        square = vector_of(squares)
        gradient = vector_of([one.grad for one in parameters])  # type: ignore[misc]
        square.mul_(group["alpha"]).addcmul_(gradient, gradient, value=1 - group["alpha"])
        rate = group["lr"]
        eps = group["eps"]
        root = square.add(eps).sqrt_() if self.like_tensorflow else square.sqrt().add_(eps)
        change = gradient / root
        change.mul_(rate.to(change) if isinstance(rate, Tensor) else rate)
        torch._foreach_sub_(parameters, parts_of(change, parameters))
        if joined(squares) is None:
            torch._foreach_copy_(squares, parts_of(square, squares))


_JOINED = ("step", "square_avg")
"""Optimiser state that is stored in one tensor for all parameters of a group."""

_FUSED = (Adam, AdamW, SGD, Adagrad, RMSprop)


def step_is_fixed(optimizers: Sequence[Optimizer]) -> bool:
    """Return whether the next step of each optimiser performs the same operations as later steps.

    This is true for fused optimisers without hooks, starting with their second step.
    """
    for optimizer in optimizers:
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if type(optimizer) not in _FUSED or hooks:
            return False
        if not all(_is_fixed(optimizer, group) for group in optimizer.param_groups):
            return False
    return True


def _is_fixed(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if not group.get("fused"):
        return False
    has_state = any(parameter in optimizer.state for parameter in group["params"])
    return has_state or (isinstance(optimizer, SGD) and not group["momentum"])


class FusedOptimizers:
    """Stores the learning rates and step counters of fused optimisers in shared tensors.

    Traced graphs then use changed learning rates and update all counters with one operation.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [o for o in optimizers if type(o) in _FUSED]
        self._rates: dict[tuple[int, int], Tensor] = {}
        self.update()

    def update(self) -> None:
        """Move new learning rates and step counters to the shared tensors."""
        self.take_rates()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for name in _JOINED if group.get("fused") else ():
                    _join(optimizer, group["params"], name)

    def take_rates(self) -> None:
        """Move learning rates that were set as plain numbers to the shared tensors."""
        for number, optimizer in enumerate(self._optimizers):
            for place, group in enumerate(optimizer.param_groups):
                if type(group["lr"]) is not Tensor and group.get("fused"):
                    group["lr"] = self._filled((number, place), group)

    def _filled(self, place: tuple[int, int], group: dict[str, Any]) -> Tensor:
        if place not in self._rates:
            device = group["params"][0].device  # GPU kernels expect float32 rates
            kind = torch.float64 if device.type == "cpu" else torch.float32
            self._rates[place] = torch.zeros((), dtype=kind, device=device)
        return self._rates[place].fill_(group["lr"])


def _join(optimizer: Optimizer, parameters: Sequence[Tensor], name: str) -> None:
    """Replace an optimiser's state tensors of this name with views of one shared tensor."""
    first = optimizer.state.get(parameters[0], {}).get(name)
    if first is None or not first.is_cpu or first._is_view():
        return
    states = [optimizer.state[one] for one in parameters if one in optimizer.state]
    entries = [state[name] for state in states]
    kinds = {(one.device, one.dtype, one.is_contiguous()) for one in entries}
    if kinds == {(first.device, first.dtype, True)}:
        whole = torch.cat([one.flatten() for one in entries])
        for state, part in zip(states, parts_of(whole, entries)):
            state[name] = part
