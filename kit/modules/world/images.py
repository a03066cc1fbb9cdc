"""Image encoders and decoders for world models."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from kit.modules.world.layers import Blocks, Dense, Norm, Perceptron, init_weight
from kit.modules.world.sizes import Size
from kit.steps import SettingError

SMALLEST = 4
"""Minimum side length, in pixels, of the last stage's output."""
FACTORS = (2, 3, 4, 4)
"""Channels of each stage as multiples of ``Size.depth``; further stages use the last multiple."""


def stages(shape: tuple[int, ...]) -> int:
    """Return how often an image must be halved for its shorter side to have 4 to 7 pixels.

    Raises:
        SettingError: if the sides are too small or cannot be halved that often.
    """
    count = int(math.log2(max(min(shape[:2]) / SMALLEST, 1)))
    if not count or any(side % 2**count for side in shape[:2]):
        reason = "The image's sides must be at least 8 pixels and divisible by 2 in each stage"
        raise SettingError("observation", list(shape), reason, "Resize it to 64 x 64 pixels")
    return count


class _Convolution(nn.Conv2d):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, 5, padding=2)
        init_weight(self.weight, in_channels * 25)
        assert self.bias is not None
        nn.init.zeros_(self.bias)


class _ChannelNorm(Norm):
    """RMSNorm over the channels of ``[rows, channels, height, width]``, followed by SiLU."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value.movedim(1, -1)).movedim(-1, 1)


def _channels(size: Size, count: int) -> list[int]:
    return [size.depth * FACTORS[min(stage, len(FACTORS) - 1)] for stage in range(count)]


class ImageEncoder(nn.Module):
    """Encodes images with stages of convolution, max-pooling, RMSNorm and SiLU.

    The architecture follows the code of Hafner et al. (2025). Images are ``[height, width,
    channels]``, and ``out_features`` is the size of the output vector.
    """

    def __init__(self, shape: tuple[int, ...], size: Size) -> None:
        super().__init__()
        widths = _channels(size, stages(shape))
        parts: list[nn.Module] = []
        for before, after in zip([shape[-1], *widths], widths):
            parts += [_Convolution(before, after), nn.MaxPool2d(2), _ChannelNorm(after)]
        self.layers = nn.Sequential(*parts)
        sides = [side // 2 ** len(widths) for side in shape[:2]]
        self.out_features = widths[-1] * sides[0] * sides[1]

    def forward(self, image: Tensor) -> Tensor:
        """Return vectors ``[..., out_features]`` for images ``[..., height, width, channels]``."""
        found = self.layers(image.flatten(0, -4).movedim(-1, 1) - 0.5)
        return found.reshape(*image.shape[:-3], self.out_features)  # type: ignore[no-any-return]


class ImageDecoder(nn.Module):
    """Decodes features to images ``[height, width, channels]`` in [0, 1] by upsampling."""

    def __init__(self, shape: tuple[int, ...], size: Size) -> None:
        super().__init__()
        widths = _channels(size, stages(shape))[::-1]
        sides = [side // 2 ** len(widths) for side in shape[:2]]
        self.first = (widths[0], *sides)
        out, blocks = math.prod(self.first), size.blocks
        self.size, self.codes = size, size.stoch * size.classes
        self.from_deter = Blocks(blocks, size.deter // blocks, out // blocks, fan_in=size.deter)
        self.from_stoch = nn.Sequential(
            Perceptron(self.codes, 2 * size.units, 1), Dense(2 * size.units, out)
        )
        self.norm = _ChannelNorm(widths[0])
        parts: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            parts += [nn.Upsample(scale_factor=2), _Convolution(before, after), _ChannelNorm(after)]
        self.layers = nn.Sequential(
            *parts, nn.Upsample(scale_factor=2), _Convolution(widths[-1], shape[-1])
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return images ``[..., height, width, channels]`` from features ``[..., features]``."""
        flat = features.reshape(-1, features.shape[-1])
        stoch, deter = flat.split([self.codes, self.size.deter], -1)  # type: ignore[no-untyped-call]
        blocks = deter.unflatten(-1, (self.size.blocks, -1)).transpose(0, 1)
        mixed = self.from_deter(blocks).transpose(0, 1).reshape(len(flat), -1)
        mixed = (mixed + self.from_stoch(stoch)).unflatten(-1, self.first)
        image = torch.sigmoid(self.layers(self.norm(mixed))).movedim(1, -1)
        return image.reshape(*features.shape[:-1], *image.shape[1:])
