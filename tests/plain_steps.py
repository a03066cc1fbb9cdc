"""Gradient steps as everybody writes them, to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, get_total_norm
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from kit.fast.optimizers import RMSprop as FixedRMSprop
from kit.update import Update

OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: Adam(p, lr=0.01),
    "Adam, one by one": lambda p: Adam(p, lr=0.01, foreach=False),
    "Adam, fused": lambda p: Adam(p, lr=0.01, eps=1e-5, fused=True),
    "Adam, amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01, fused=True),
    "AdamW, fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "SGD, fused": lambda p: SGD(p, lr=0.01, fused=True),
    "SGD, momentum": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    "SGD, foreach": lambda p: SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "Adagrad, fused": lambda p: Adagrad(p, lr=0.01, fused=True),
    "RMSprop": lambda p: RMSprop(p, lr=0.01),
    "RMSprop, the kit's": lambda p: FixedRMSprop(p, lr=0.01, eps=1e-5),
}
"""Each kind of optimiser, and of its implementations."""
READ_ON_THE_HOST = {
    "KLPENPPOLoss": "if kl.mean() > self.dtarg",
    "DistributionalDQNLoss": "if (log_softmax_values > 0).any()",
}
"""Losses of TorchRL that decide something on the host, and where; they run eagerly."""


def plain_step(
    loss: nn.Module,
    optimizers: Mapping[str, Optimizer] | Optimizer,
    minibatch: TensorDictBase,
    max_grad_norm: float | None = None,
    clip_value: float | None = None,
) -> TensorDictBase:
    """A gradient step as everybody writes it."""
    losses = loss(minibatch)
    if isinstance(optimizers, Optimizer):
        pairs = [(optimizers, sum(v for k, v in losses.items() if k.startswith("loss")))]
    else:
        pairs = [(optimizer, losses[name]) for name, optimizer in optimizers.items()]
    for optimizer, total in pairs:
        owned = (p for group in optimizer.param_groups for p in group["params"])
        parameters = [p for p in owned if p.requires_grad]
        total.backward(inputs=parameters, retain_graph=True)
    for optimizer, _ in pairs:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:  # autograd may give two of them one tensor
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        if max_grad_norm is not None:
            clip_norm(parameters, max_grad_norm)
        if clip_value is not None:
            clip_grad_value_(parameters, clip_value)
        optimizer.step()
        optimizer.zero_grad()
    return losses.detach()


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of gradients as one vector; PyTorch's norm of their norms rounds differently."""
    norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
    torch.testing.assert_close(norm, get_total_norm(gradients), rtol=1e-6, atol=0)
    return norm


def clip_norm(parameters: Sequence[Tensor], largest: float) -> None:
    """PyTorch's ``clip_grad_norm_``, of that norm."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    factor = (largest / (norm_of(gradients) + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def state_of(loss: nn.Module, *optimizers: Optimizer) -> dict[str, Tensor]:
    """Weights, buffers and what optimisers remember."""
    state = {name: tensor.clone() for name, tensor in loss.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for index, values in optimizer.state_dict()["state"].items():
            for name, tensor in values.items():
                if isinstance(tensor, Tensor):
                    state[f"optimizer {number} {index} {name}"] = tensor.clone()
    return state


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def eagerly(update: Update, minibatches: Iterable[TensorDictBase]) -> None:
    for minibatch in minibatches:
        update(minibatch)


def programs(update: Update) -> int:
    """Whole gradient steps that were traced."""
    return sum(t.programs for (_, kind), t in update.traced_step.traced.items() if kind == "step")
