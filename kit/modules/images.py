"""Convolutional networks for observations with images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.data import Bounded

from kit.modules.networks import Flatten
from kit.steps import SettingError

Kernels = Sequence[Sequence[int]]
"""Channels, kernel size and stride of each convolution."""

NATURE: Kernels = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""The convolutions of Mnih et al. (2015); a hidden layer of 512 follows, with relu throughout."""


def is_image(spec: Any) -> bool:
    """Whether a spec is of images: bytes ``[num_envs, ...]`` with three or four dimensions each."""
    bytes_ = isinstance(spec, Bounded) and spec.dtype == torch.uint8
    return bytes_ and len(spec.shape) in (4, 5)


class Convolutions(nn.Module):
    """Convolutions with relu over images of bytes, which become numbers in [0, 1] here.

    Args:
        shape: of an image, ``[channels, height, width]``, or channels last where there are at most
            four. Stacked frames are in front: ``[frames, height, width, channels]``, or channels
            before height where there are at most four.
        layers: channels, kernel size and stride of each convolution.
        orthogonal: whether weights start orthogonal with gain sqrt(2), and biases at zero.

    Attributes:
        out_features: width of the output.

    Raises:
        SettingError: if the images are too small for the layers.
    """

    def __init__(self, shape: Sequence[int], layers: Kernels, *, orthogonal: bool = False) -> None:
        super().__init__()
        self._stacked = len(shape) == 4
        few_last, few_first = shape[-1] <= 4, shape[-3] <= 4
        self._last = few_last > few_first or (self._stacked and few_last == few_first)
        self._ndim = len(shape)
        channels = math.prod(shape[:-3]) * shape[-1 if self._last else -3]
        height, width = shape[-3:-1] if self._last else shape[-2:]
        convolutions: list[nn.Module] = []
        for out, kernel, stride in layers:
            if kernel > min(height, width):
                why = f"are too large for images of shape {list(shape)}"
                works = "use smaller kernels and strides, such as [[16,3,2],[16,3,1]]"
                raise SettingError("convolutions", [list(layer) for layer in layers], why, works)
            layer = nn.Conv2d(channels, out, kernel, stride)
            if orthogonal:
                nn.init.orthogonal_(layer.weight, 2**0.5)
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
            convolutions += [layer, nn.ReLU()]
            channels = out
            height, width = ((size - kernel) // stride + 1 for size in (height, width))
        self.layers = nn.Sequential(*convolutions)
        self.out_features = channels * height * width

    def forward(self, image: Tensor) -> Tensor:
        """Return ``[..., out_features]``."""
        leading = image.shape[: image.ndim - self._ndim]
        rows = image.reshape(math.prod(leading), *image.shape[len(leading) :])
        if self._last:
            rows = rows.movedim(-1, -3)
        if self._stacked:
            rows = rows.flatten(1, 2)
        # With channels last in memory, training takes two thirds of the time (CPU, minibatch 256).
        pixels = rows.to(torch.float32, memory_format=torch.channels_last) / 255
        return self.layers(pixels).reshape(*leading, self.out_features)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Joins images, each through convolutions of its own, and all other inputs into one vector.

    Args:
        specs: spec of each input, each with the environment's batch dimension in front.
        layers: see :class:`Convolutions`.
        orthogonal: see :class:`Convolutions`.

    Attributes:
        out_features: width of the vector.
    """

    is_vector = False

    def __init__(self, specs: Sequence[Any], layers: Kernels, *, orthogonal: bool = False) -> None:
        super().__init__()
        self._images = [is_image(spec) for spec in specs]
        self.convolutions = nn.ModuleList(
            Convolutions(spec.shape[1:], layers, orthogonal=orthogonal)
            for spec, image in zip(specs, self._images) if image
        )  # fmt: skip
        self.flatten = Flatten([s for s, image in zip(specs, self._images) if not image])
        widths = [int(c.out_features) for c in self.convolutions]  # type: ignore[arg-type]
        self.out_features = sum(widths) + self.flatten.out_features

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return ``[..., out_features]``."""
        images = [value for value, image in zip(inputs, self._images) if image]
        others = [value for value, image in zip(inputs, self._images) if not image]
        parts = [network(value) for network, value in zip(self.convolutions, images)]
        if others:
            parts.append(self.flatten(*others))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
