"""The look of learning curves, and how a picture is written."""

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
    """Make a picture with axes, and no lines yet."""
    from matplotlib.figure import Figure  # its pyplot would take as long again, for windows
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7, 4.2), dpi=150)
    axes = figure.subplots()
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def save_picture(figure: Figure, path: Path) -> None:
    """Write a picture as a PNG file, completely or not at all.

    Raises:
        WriteError: if it cannot be written; one that was there before is untouched.
    """
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    write_whole(path, drawn.getvalue())
