"""DreamerV3's layers: RMSNorm with SiLU, perceptrons, block-diagonal layers and two-hot heads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NORM_EPS = 1e-4


def symlog(value: Tensor) -> Tensor:
    """Return the signed logarithm ``sign(x) ln(1 + |x|)`` (Hafner et al. 2025, eq. 9)."""
    return value.sign() * value.abs().log1p()


def symexp(value: Tensor) -> Tensor:
    """Return ``sign(x) (exp(|x|) - 1)``, the inverse of :func:`symlog`."""
    return value.sign() * value.abs().expm1()


class NormSiLU(torch.autograd.Function):
    """Fused RMSNorm and SiLU: ``silu(n * w)`` with ``n = x / sqrt(mean(x^2) + eps)``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        """Apply RMSNorm over the last dimension (Zhang and Sennrich 2019, eq. 4), then SiLU."""
        norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
        scale = torch.addcmul(eps, norm, norm, value=1 / len(weight)).rsqrt()
        normal = value * scale
        scaled = normal * weight
        ctx.save_for_backward(normal, scale, scaled, weight)
        return functional.silu(scaled)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients ``scale (g w - n mean(g n w))`` for x and ``g n`` for w.

        Here, ``g`` is the gradient for the input of SiLU, ``n * w``.
        """
        normal, scale, scaled, weight = ctx.saved_tensors
        gradient = torch.ops.aten.silu_backward(gradients[0], scaled)
        product = gradient * normal
        total = (product @ weight).unsqueeze(-1)
        result = torch.addcmul(gradient * weight, normal, total, value=-1 / len(weight)) * scale
        return result, product.flatten(0, -2).sum(0), None


def init_weight(weight: Tensor, fan_in: int, scale: float = 1.0) -> None:
    """Draw weights from a truncated normal of variance ``1 / fan_in`` and multiply by ``scale``."""
    deviation = 1.1368 / math.sqrt(fan_in)  # the factor offsets the variance lost by truncation
    with torch.no_grad():
        nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        weight.mul_(scale)


class Dense(nn.Linear):
    """A linear layer with zero biases and DreamerV3's initial weights, multiplied by ``scale``."""

    def __init__(self, in_features: int, out_features: int, scale: float = 1.0) -> None:
        self._scale = scale
        super().__init__(in_features, out_features)

    def reset_parameters(self) -> None:
        """Initialise the weights and biases."""
        init_weight(self.weight, self.in_features, self._scale)
        nn.init.zeros_(self.bias)


class Blocks(nn.Module):
    """A block-diagonal linear layer with inputs ``[blocks, rows, in_features]``.

    Args:
        blocks: number of blocks.
        in_features: input size of a block.
        out_features: output size of a block.
        fan_in: fan-in that determines the scale of the initial weights.
    """

    def __init__(self, blocks: int, in_features: int, out_features: int, fan_in: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(blocks, 1, out_features))
        init_weight(self.weight, fan_in)

    def forward(self, value: Tensor) -> Tensor:
        """Return the outputs, ``[blocks, rows, out_features]``."""
        return torch.baddbmm(self.bias, value, self.weight)


class Norm(nn.Module):
    """RMSNorm over the last dimension, followed by SiLU."""

    eps: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.register_buffer("eps", torch.tensor(NORM_EPS), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        """Return the normalised and activated input."""
        return NormSiLU.apply(value.float(), self.weight, self.eps)  # type: ignore[no-untyped-call, no-any-return]


class Perceptron(nn.Sequential):
    """Hidden layers (linear, RMSNorm, SiLU) with an optional linear output layer.

    Args:
        in_features: size of the input.
        units: size of the hidden layers.
        layers: number of hidden layers.
        out_features: size of the output layer; ``None``: no output layer.
        out_scale: multiplier of the output layer's initial weights; 0: initial outputs are 0.
    """

    def __init__(
        self,
        in_features: int,
        units: int,
        layers: int,
        out_features: int | None = None,
        out_scale: float = 1.0,
    ) -> None:
        parts: list[nn.Module] = []
        for number in range(layers):
            parts += [Dense(units if number else in_features, units), Norm(units)]
        if out_features is not None:
            parts.append(Dense(units, out_features, out_scale))
        super().__init__(*parts)


class _Bins(Dense):
    """A linear layer for the logits of an odd number of bins, with zero initial weights.

    An additional logit of -inf makes the output size even, which speeds up matrix products.
    """

    def __init__(self, in_features: int, bins: int) -> None:
        super().__init__(in_features, bins, 0.0)

    def forward(self, value: Tensor) -> Tensor:
        """Return the logits, ``[..., bins + 1]``."""
        weight = functional.pad(self.weight, (0, 0, 0, 1))
        bias = functional.pad(self.bias, (0, 1), value=-torch.inf)
        return functional.linear(value, weight, bias)


class TwoHot(nn.Module):
    """Encodes scalars as distributions over exponentially spaced bins (Hafner et al. 2025, eq. 8).

    Attributes:
        bins: values of the bins, ``[255]``: ``symexp`` of equally spaced values from -20 to 20,
            exactly symmetric around 0.
    """

    bins: Tensor

    def __init__(self) -> None:
        super().__init__()
        below = symexp(torch.linspace(-20, 0, 128))
        self.register_buffer("bins", torch.cat([below, -below[:-1].flip(0)]))

    def head(self, features: int, units: int, layers: int) -> nn.Module:
        """Create a network that predicts logits ``[..., bins + 1]`` with an initial mean of 0."""
        hidden = Perceptron(features, units, layers)
        return nn.Sequential(*hidden, _Bins(units, len(self.bins)))

    def mean(self, logits: Tensor) -> Tensor:
        """Return the mean ``[...]`` for logits ``[..., bins]``; additional logits must be -inf.

        The first probability is subtracted from all probabilities. This does not change the mean,
        because the bins sum to 0. The mean of equal logits is then exactly 0, although bins reach
        4.85e8.
        """
        weights = logits.float().softmax(-1)[..., : len(self.bins)]
        with torch.autocast(logits.device.type, enabled=False):  # float16 cannot represent the bins
            return (weights - weights[..., :1]) @ self.bins

    def loss(self, logits: Tensor, *targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropies with one or more two-hot targets, ``[...]``.

        Each target is split between its two neighbouring bins, so that the mean equals the target.

        Args:
            logits: logits ``[..., bins]``; additional logits must be -inf.
            *targets: scalars, ``[...]``, clipped to the range of the bins.
        """
        target = torch.stack(targets, -1)
        place = torch.searchsorted(self.bins, target, right=True).sub(1)
        place = place.clamp(0, len(self.bins) - 2)
        low, high = self.bins[place], self.bins[place + 1]
        weight = ((target - low) / (high - low)).clamp(0, 1)
        two = logits.float().log_softmax(-1).gather(-1, torch.cat([place, place + 1], -1))
        below, beyond = two.chunk(2, -1)
        return -torch.lerp(below, beyond, weight).sum(-1)


def sample_one_hot(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return one-hot samples by inverting cumulative probabilities.

    Args:
        probabilities: class probabilities, ``[..., classes]``.
        uniform: random numbers in [0, 1), ``[...]``.
    """
    classes = probabilities.shape[-1]
    cumulative = probabilities.cumsum(-1).contiguous()
    chosen = torch.searchsorted(cumulative, uniform.unsqueeze(-1)).clamp(max=classes - 1)
    rows = torch.eye(classes, device=uniform.device).index_select(0, chosen.flatten())
    return rows.view(probabilities.shape)
