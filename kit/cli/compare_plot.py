"""The curves of groups of runs, as a picture."""

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
    """Draw each group as the mean of its seeds in a band from the least to the greatest.

    Where some seeds lack a value, it is interpolated. Beyond the data of all, seeds are thin lines.

    Raises:
        WriteError: if it cannot be written.
    """
    figure, axes = curve_axes()
    labels = [_label(group) for group in comparison.groups]
    marks = "o" if all(len(r.steps) <= 25 for g in comparison.groups for r in g.runs) else ""
    drawn = set()
    for number, (group, label) in enumerate(zip(comparison.groups, labels)):
        dashes = DASHES[number // len(COLOURS) % len(DASHES)]
        line = {"color": COLOURS[number % len(COLOURS)], "label": label}
        drawn |= _draw_group(axes, group, marks, dashes, line)
    axes.set_xlabel(comparison.axis.replace("_", " "))
    axes.set_ylabel(comparison.column.replace("/", " ").replace("_", " "))
    axes.set_title(comparison.title)
    told = fill(", ".join(text for text in DRAWN if text in drawn), 90)
    figure.set_figheight(4.3 + 0.175 * "\n".join([told, *labels]).count("\n"))
    below = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.15), "alignment": "left"}
    axes.legend(frameon=False, handlelength=2.8, title=told, title_fontsize=9, fontsize=9, **below)
    save_picture(figure, picture)


BAND, BETWEEN, ALONE = (
    "mean of seeds in a band from least to greatest",
    "interpolated between their steps",
    "seeds alone, thin, where not all have data",
)
DRAWN = (BAND, BETWEEN, ALONE)
"""What is drawn, as the legend says it."""


def _label(group: Group) -> str:
    seeds = plural(len(group.runs), "seed")
    return fill(f"{group.name} ({seeds})" if group.name else seeds, 95)


def _draw_group(
    axes: Axes, group: Group, marks: str, dashes: str, line: dict[str, Any]
) -> set[str]:
    """Draw a group; return what the legend has to say of it."""
    steps, values, interpolated = shared(group.runs)
    drawn = {BETWEEN} if interpolated else set()
    if len(group.runs) > 1 and len(steps):
        band = values.min(0), values.max(0)
        axes.fill_between(steps, *band, color=line["color"], alpha=0.15, linewidth=0)
        drawn.add(BAND)
    axes.plot(steps, values.mean(0), marks + dashes, lw=2.2, ms=4, zorder=3, **line)
    for run in group.runs:
        for alone in _alone(run, steps):
            axes.plot(*alone, dashes, color=line["color"], lw=0.9, alpha=0.6)
            drawn.add(ALONE)
    return drawn


def shared(runs: Sequence[SeedCurve]) -> tuple[Curves, Curves, bool]:
    """The part of curves where all have data.

    Returns:
        Steps ``[steps]``, values ``[runs, steps]``, and whether some are interpolated.
    """
    first, last = max(run.steps[0] for run in runs), min(run.steps[-1] for run in runs)
    own = [{step for step in run.steps if first <= step <= last} for run in runs]
    steps = np.array(sorted(set().union(*own)), float)
    values = np.array([np.interp(steps, run.steps, run.values) for run in runs])
    return steps, values, any(len(some) < len(steps) for some in own)


def _alone(run: SeedCurve, steps: Curves) -> list[Curves]:
    """The parts of a curve before and after the steps that all have, ``[2, points]`` each."""
    points = np.array([run.steps, run.values], float)
    if not len(steps):
        return [points]
    before, after = points[:, points[0] <= steps[0]], points[:, points[0] >= steps[-1]]
    return [part for part in (before, after) if part.shape[1] > 1]
