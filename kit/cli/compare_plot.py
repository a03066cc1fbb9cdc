"""Plot of learning curves for groups of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kit.logging.picture import BLUE, curve_axes, save_picture
from kit.runs.comparison import Comparison, Group, SeedCurve
from kit.steps.table import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (BLUE, "#e8590c", "#2b8a3e", "#8250df", "#c2255c", "#0b7285", "#8d6e00", "#57606a")
DASHES = ("-", "--", ":")

Curves = NDArray[np.float64]


def draw(comparison: Comparison, picture: Path) -> None:
    """Plot the mean of each group, with a band from the minimum to the maximum over seeds.

    Values between the logged steps of a seed are interpolated. Where some seeds have no data, each
    of the other seeds is drawn as a thin line.

    Args:
        comparison: groups of runs to plot.
        picture: image file to write.

    Raises:
        WriteError: if the file cannot be written.
    """
    figure, axes = curve_axes()
    labels = [_label(group) for group in comparison.groups]
    marks = "o" if all(len(r.steps) <= 25 for g in comparison.groups for r in g.runs) else ""
    elements = set()
    for number, (group, label) in enumerate(zip(comparison.groups, labels)):
        dashes = DASHES[number // len(COLOURS) % len(DASHES)]
        line = {"color": COLOURS[number % len(COLOURS)], "label": label}
        elements |= _draw_group(axes, group, marks, dashes, line)
    axes.set_xlabel(comparison.axis.replace("_", " "))
    axes.set_ylabel(comparison.column.replace("/", " ").replace("_", " "))
    axes.set_title(comparison.title)
    title = fill(", ".join(text for text in ELEMENTS if text in elements), 90)
    figure.set_figheight(4.3 + 0.175 * "\n".join([title, *labels]).count("\n"))
    below = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.15), "alignment": "left"}
    axes.legend(frameon=False, handlelength=2.8, title=title, title_fontsize=9, fontsize=9, **below)
    save_picture(figure, picture)


BAND, INTERPOLATED, SINGLE = (
    "mean over seeds, band: minimum to maximum",
    "interpolated between steps",
    "thin lines: single seeds where some have no data",
)
ELEMENTS = (BAND, INTERPOLATED, SINGLE)
"""Legend descriptions of the plot elements."""


def _label(group: Group) -> str:
    seeds = plural(len(group.runs), "seed")
    return fill(f"{group.name} ({seeds})" if group.name else seeds, 95)


def _draw_group(
    axes: Axes, group: Group, marks: str, dashes: str, line: dict[str, Any]
) -> set[str]:
    """Draw a group and return the elements that the legend must describe."""
    steps, values, interpolated = shared(group.runs)
    elements = {INTERPOLATED} if interpolated else set()
    if len(group.runs) > 1 and len(steps):
        band = values.min(0), values.max(0)
        axes.fill_between(steps, *band, color=line["color"], alpha=0.15, linewidth=0)
        elements.add(BAND)
    axes.plot(steps, values.mean(0), marks + dashes, lw=2.2, ms=4, zorder=3, **line)
    for run in group.runs:
        for part in _outside(run, steps):
            axes.plot(*part, dashes, color=line["color"], lw=0.9, alpha=0.6)
            elements.add(SINGLE)
    return elements


def shared(runs: Sequence[SeedCurve]) -> tuple[Curves, Curves, bool]:
    """Return the curves over the range of steps for which all runs have data.

    Returns:
        Steps ``[steps]``, values ``[runs, steps]``, and whether values are interpolated.
    """
    first, last = max(run.steps[0] for run in runs), min(run.steps[-1] for run in runs)
    inside = [{step for step in run.steps if first <= step <= last} for run in runs]
    steps = np.array(sorted(set().union(*inside)), float)
    values = np.array([np.interp(steps, run.steps, run.values) for run in runs])
    return steps, values, any(len(part) < len(steps) for part in inside)


def _outside(run: SeedCurve, steps: Curves) -> list[Curves]:
    """Return the parts of a curve outside the shared steps, as arrays ``[2, points]``."""
    points = np.array([run.steps, run.values], float)
    if not len(steps):
        return [points]
    before, after = points[:, points[0] <= steps[0]], points[:, points[0] >= steps[-1]]
    return [part for part in (before, after) if part.shape[1] > 1]
