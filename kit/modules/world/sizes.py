"""Sizes of DreamerV3's networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kit.steps.errors import one_of, whole_number


@dataclass(frozen=True)
class Size:
    """Widths of all networks (Hafner et al. 2025, table of model sizes)."""

    deter: int
    """Width of the deterministic state."""
    hidden: int
    """Width of the projections around the recurrence."""
    classes: int
    """Classes of each discrete latent."""
    units: int
    """Width of encoder, decoder and heads."""
    depth: int
    """Channels of the first stage for images; later ones have 2, 3, 4, 4 times as many."""
    stoch: int = 32
    """Number of discrete latents."""
    blocks: int = 8
    """Blocks of the recurrence."""

    @property
    def bytes_stored(self) -> int:
        """Bytes of a latent as a replay buffer keeps it."""
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
"""By name: parameters with images, from 1m on as published; nano and tiny are for one CPU core."""


def size_of(
    size: str | Size, sizes: Mapping[str, Size] = SIZES, latents: int | None = None
) -> Size:
    """The widths of a named size.

    Args:
        size: its name, or widths.
        sizes: by name.
        latents: discrete latents; ``None``: as many as the size has.

    Raises:
        SettingError: if there is no such size, or there are no latents.
    """
    if not isinstance(size, Size):
        size = sizes[one_of("size", size, [*sizes])]
    if latents is None:
        return size
    return replace(size, stoch=whole_number("latents", latents, at_least=1))
