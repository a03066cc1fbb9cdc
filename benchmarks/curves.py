"""Learning curves of the runs in ``results/learning.csv``, as ``results/learning.png``.

A panel for each case: mean return of training episodes in each twentieth of the run, over its
seeds, with the interquartile band; dashed, the return that evaluations are to reach.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from numpy.typing import NDArray

COLUMNS, WIDTH, HEIGHT = 5, 2.6, 1.9
"""panels side by side, and inches of each."""
INK = "#1f5f8b"


def numbers(curves: Sequence[str]) -> NDArray[np.float64]:
    """Curves ``[seeds, parts]`` from their texts; nan in parts in which no episode ended."""
    parts = [[math.nan if part == "-" else float(part) for part in one.split()] for one in curves]
    return np.array(parts)


def panel(axes: Axes, case: str, steps: int, curves: NDArray[np.float64], target: float) -> None:
    """Draw the curves of a case."""
    known = ~np.isnan(curves).all(0)
    curves, parts = curves[:, known], curves.shape[1]
    at = ((np.arange(parts) + 0.5) * steps / parts)[known]
    low, high = np.nanpercentile(curves, [25, 75], axis=0)
    axes.fill_between(at, low, high, color=INK, alpha=0.2, linewidth=0)
    axes.plot(at, np.nanmean(curves, 0), color=INK, linewidth=1.2)
    axes.axhline(target, color="0.5", linewidth=0.8, linestyle="--")
    seeds = f"{len(curves)} seed{'s' if len(curves) > 1 else ''}"
    axes.set_title(f"{case} ({seeds})", fontsize=6.5)
    axes.set_xlim(0, steps)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(labelsize=6, length=2)
    axes.spines[["top", "right"]].set_visible(False)


def draw(cases: Mapping[str, tuple[int, Sequence[str], float]], path: Path) -> None:
    """Draw all cases.

    Args:
        cases: policy steps, curves of the seeds and the return to reach, by name.
        path: of the picture.
    """
    rows = -(-len(cases) // COLUMNS)
    figure = Figure(figsize=(COLUMNS * WIDTH, rows * HEIGHT), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False).flat
    for (case, (steps, curves, target)), axes in zip(cases.items(), panels):
        panel(axes, case, steps, numbers(curves), target)
    for axes in panels:
        axes.set_axis_off()
    figure.supxlabel("policy steps", fontsize=8)
    figure.supylabel("return of training episodes", fontsize=8)
    figure.savefig(path, dpi=110)
