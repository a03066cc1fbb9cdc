"""Layers of DreamerV3: RMSNorm, perceptrons with its initial weights, two-hot numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NORM_EPS = 1e-4


def symlog(value: Tensor) -> Tensor:
    """Signed logarithm ``sign(x) ln(1 + |x|)`` (Hafner et al. 2025, eq. 9)."""
    return value.sign() * value.abs().log1p()


def symexp(value: Tensor) -> Tensor:
    """Inverse of :func:`symlog`: ``sign(x) (exp(|x|) - 1)``."""
    return value.sign() * value.abs().expm1()


class NormSiLU(torch.autograd.Function):
    """``silu(n * w)`` of ``n = x / sqrt(mean(x^2) + eps)``, in few passes over memory."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
        """RMSNorm over the last dimension (Zhang and Sennrich 2019, eq. 4), then SiLU."""
        norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
        scale = torch.addcmul(eps, norm, norm, value=1 / len(weight)).rsqrt()
        normal = value * scale
        scaled = normal * weight
        ctx.save_for_backward(normal, scale, scaled, weight)
        return functional.silu(scaled)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """With ``g`` of ``n * w``: ``scale (g w - n mean(g n w))``, and ``g n`` of the weight."""
        normal, scale, scaled, weight = ctx.saved_tensors
        gradient = torch.ops.aten.silu_backward(gradients[0], scaled)
        product = gradient * normal
        total = (product @ weight).unsqueeze(-1)
        own = torch.addcmul(gradient * weight, normal, total, value=-1 / len(weight)) * scale
        return own, product.flatten(0, -2).sum(0), None


def init_weight(weight: Tensor, fan_in: int, scale: float = 1.0) -> None:
    """Draw from a normal distribution truncated at two deviations, of variance ``1 / fan_in``."""
    deviation = 1.1368 / math.sqrt(fan_in)  # truncation makes the variance smaller
    with torch.no_grad():
        nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        weight.mul_(scale)


class Dense(nn.Linear):
    """A linear layer with DreamerV3's initial weights, times ``scale``, and biases of 0."""

    def __init__(self, in_features: int, out_features: int, scale: float = 1.0) -> None:
        self._scale = scale
        super().__init__(in_features, out_features)

    def reset_parameters(self) -> None:
        """Draw initial weights."""
        init_weight(self.weight, self.in_features, self._scale)
        nn.init.zeros_(self.bias)


class Blocks(nn.Module):
    """A linear layer of blocks that do not mix, on ``[blocks, rows, in_features]``.

    Args:
        blocks: number of blocks.
        in_features: width of a block's input.
        out_features: width of a block's output.
        fan_in: inputs of the whole layer, for its initial weights.
    """

    def __init__(self, blocks: int, in_features: int, out_features: int, fan_in: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(blocks, 1, out_features))
        init_weight(self.weight, fan_in)

    def forward(self, value: Tensor) -> Tensor:
        """``[blocks, rows, out_features]``."""
        return torch.baddbmm(self.bias, value, self.weight)


class Norm(nn.Module):
    """RMSNorm over the last dimension, then SiLU."""

    eps: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.register_buffer("eps", torch.tensor(NORM_EPS), persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        """Normalised and activated, of the same shape."""
        return NormSiLU.apply(value.float(), self.weight, self.eps)  # type: ignore[no-untyped-call, no-any-return]


class Perceptron(nn.Sequential):
    """Layers of a linear map, RMSNorm and SiLU; a linear map at the end where it has an output.

    Args:
        in_features: width of the input.
        units: width of the hidden layers.
        layers: number of hidden layers.
        out_features: width of the output; ``None`` ends with the last hidden layer.
        out_scale: factor of the output's initial weights; 0 begins with outputs of 0.
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
    """A linear layer for logits of an odd number of bins, with initial weights of 0.

    It has one output more, which is -inf: products and exponentials are slow on odd widths.
    """

    def __init__(self, in_features: int, bins: int) -> None:
        super().__init__(in_features, bins, 0.0)

    def forward(self, value: Tensor) -> Tensor:
        """Logits ``[..., bins + 1]``."""
        weight = functional.pad(self.weight, (0, 0, 0, 1))
        bias = functional.pad(self.bias, (0, 1), value=-torch.inf)
        return functional.linear(value, weight, bias)


class TwoHot(nn.Module):
    """Numbers as distributions over bins that are spaced exponentially (Hafner et al. 2025, eq. 8).

    Attributes:
        bins: their values, ``[255]``: ``symexp`` of equal distances from -20 to 20, exactly
            symmetric around 0.
    """

    bins: Tensor

    def __init__(self) -> None:
        super().__init__()
        below = symexp(torch.linspace(-20, 0, 128))
        self.register_buffer("bins", torch.cat([below, -below[:-1].flip(0)]))

    def head(self, features: int, units: int, layers: int) -> nn.Module:
        """A network to logits ``[..., bins + 1]``; at first its numbers are 0."""
        hidden = Perceptron(features, units, layers)
        return nn.Sequential(*hidden, _Bins(units, len(self.bins)))

    def mean(self, logits: Tensor) -> Tensor:
        """Expected number, ``[...]`` of logits ``[..., bins]``, after which others are -inf.

        The first probability, which equal logits have in common, is taken from all: their number
        is exactly 0 though bins reach 4.85e8, since bins add up to 0.
        """
        weights = logits.float().softmax(-1)[..., : len(self.bins)]
        with torch.autocast(logits.device.type, enabled=False):  # bins are far apart in 16 bits
            return (weights - weights[..., :1]) @ self.bins

    def loss(self, logits: Tensor, *targets: Tensor) -> Tensor:
        """Sum of the cross entropies with several targets, ``[...]``.

        A target's distribution is on the two bins next to it, so that its mean is the target.

        Args:
            logits: ``[..., bins]``, after which others are -inf.
            *targets: numbers, ``[...]``; outside of the bins as the outermost.
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
    """One-hot samples by inverting cumulative probabilities.

    Args:
        probabilities: ``[..., classes]``.
        uniform: random numbers in [0, 1), ``[...]``.
    """
    classes = probabilities.shape[-1]
    cumulative = probabilities.cumsum(-1).contiguous()
    chosen = torch.searchsorted(cumulative, uniform.unsqueeze(-1)).clamp(max=classes - 1)
    rows = torch.eye(classes, device=uniform.device).index_select(0, chosen.flatten())
    return rows.view(probabilities.shape)
