"""Sizes of DreamerV3's networks, from 'nano' to '400m'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kit.steps.errors import one_of, whole_number


@dataclass(frozen=True)
class Size:
    """Layer sizes of all networks (Hafner et al. 2025, table of model sizes)."""

    deter: int
    """Size of the deterministic state."""
    hidden: int
    """Hidden size of the state-space model's projections."""
    classes: int
    """Number of classes of each discrete latent."""
    units: int
    """Hidden size of encoder, decoder and heads."""
    depth: int
    """Base number of image channels; stages have 2, 3, 4 and 4 times as many."""
    stoch: int = 32
    """Number of discrete latents."""
    blocks: int = 8
    """Number of blocks in block-diagonal layers."""

    @property
    def bytes_stored(self) -> int:
        """Number of bytes that a replay buffer needs to store one latent."""
        return 2 * (self.deter + self.stoch) + 1


SIZES = {
    "nano": Size(64, 32, 8, 32, 4, stoch=8, blocks=4),
    "tiny": Size(128, 64, 8, 64, 4, stoch=8),
    "1m": Size(512, 64, 4, 64, 4),
    "12m": Size(2048, 256, 16, 256, 16),
    "25m": Size(3072, 384, 24, 384, 24),
    "50m": Size(4096, 512, 32, 512, 32),
    "100m": Size(6144, 768, 48, 768, 48),
    "200m": Size(8192, 1024, 64, 1024, 64),
    "400m": Size(12288, 1536, 96, 1536, 96),
}
"""Published sizes, keyed by parameter count, plus ``nano`` and ``tiny`` for one CPU core."""


def size_of(
    size: str | Size, sizes: Mapping[str, Size] = SIZES, latents: int | None = None
) -> Size:
    """Return the network sizes with the given name.

    Args:
        size: name of a size, or custom sizes.
        sizes: network sizes, keyed by name.
        latents: number of discrete latents; ``None``: the size's default.

    Raises:
        SettingError: if the size is unknown, or ``latents`` is less than 1.
    """
    if not isinstance(size, Size):
        size = sizes[one_of("size", size, [*sizes])]
    if latents is None:
        return size
    return replace(size, stoch=whole_number("latents", latents, at_least=1))
