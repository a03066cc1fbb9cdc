"""Which optimisers' steps are fixed lists of tensor operations, and learning rates in tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

_FUSED = (Adam, AdamW, SGD, Adagrad)


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


class LearningRates:
    """Keeps learning rates of fused optimisers in tensors, so that programs see every change.

    Args:
        optimizers: those whose groups are looked after; others than fused ones are left alone.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = [o for o in optimizers if type(o) in _FUSED]
        self._tensors: dict[tuple[int, int], Tensor] = {}
        self.update()

    def update(self) -> None:
        """Fill the tensors of groups whose rate was set to a number, and put them back."""
        for number, optimizer in enumerate(self._optimizers):
            for place, group in enumerate(optimizer.param_groups):
                if group.get("fused") and not isinstance(group["lr"], Tensor):
                    group["lr"] = self._filled((number, place), group)

    def _filled(self, place: tuple[int, int], group: dict[str, Any]) -> Tensor:
        if place not in self._tensors:
            device = group["params"][0].device  # kernels on a GPU read a rate there, as float32
            kind = torch.float64 if device.type == "cpu" else torch.float32
            self._tensors[place] = torch.zeros((), dtype=kind, device=device)
        return self._tensors[place].fill_(group["lr"])
