"""Styling and saving of learning curve plots."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from kit.logging.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, BLUE = "#9aa5b1", "#1f6feb"


def curve_axes() -> tuple[Figure, Axes]:
    """Create a figure with empty, styled axes."""
    from matplotlib.figure import Figure  # faster to import than pyplot
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7, 4.2), dpi=150)
    axes = figure.subplots()
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG file atomically.

    Raises:
        WriteError: if the file cannot be written. An existing file is left unchanged.
    """
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    write_whole(path, drawn.getvalue())
