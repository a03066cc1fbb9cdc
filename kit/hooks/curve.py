"""Hook that draws the learning curve of a run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kit.hooks.base import KitHook
from kit.logging.picture import BLUE, GREY, curve_axes, save_picture


class LearningCurve(KitHook):
    """Writes ``curve.png``, a plot of training and evaluation returns against policy steps.

    For offline runs, the x-axis shows gradient steps.

    Args:
        folder: run folder that contains ``metrics.csv``.
        title: title of the plot.
    """

    operations: ClassVar = {"shutdown": "draw"}

    def __init__(self, folder: Path, title: str = "") -> None:
        self.folder, self.title = folder, title

    def draw(self) -> None:
        """Plot the returns that ``metrics.csv`` contains so far."""
        metrics = self.folder / "metrics.csv"
        if metrics.is_file():
            draw_curve(metrics, self.folder / "curve.png", self.title, self.trainer.plan.axis)


def draw_curve(metrics: Path, picture: Path, title: str = "", axis: str = "policy_steps") -> None:
    """Plot the returns in a ``metrics.csv`` file.

    Args:
        metrics: CSV file with metrics.
        picture: PNG file to write.
        title: title of the plot.
        axis: column for the x-axis.

    Raises:
        WriteError: if the picture cannot be written. An existing picture is left unchanged.
    """
    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = curve_axes()
    steps, returns = _column(rows, axis, "episode/return")
    if len(steps):
        (training,) = axes.plot(steps, returns, color=GREY, lw=1.0, label="training episodes")
        training.set_zorder(2.5)  # above the thicker line, so that neither line hides the other
    steps, returns = _column(rows, axis, "evaluation/return")
    if len(steps):
        spread, std = _column(rows, axis, "evaluation/return_std")
        label = "evaluation"
        if np.array_equal(spread, steps):  # custom evaluators may not report a standard deviation
            band = (returns - std, returns + std)
            axes.fill_between(steps, *band, color=BLUE, alpha=0.18, linewidth=0)
            label += " (± std)"
        axes.plot(steps, returns, "o-", color=BLUE, lw=2.5, ms=5, label=label)
    axes.set_xlabel(axis.replace("_", " "))
    axes.set_ylabel("return of an episode")
    axes.set_title(title)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")
    save_picture(figure, picture)


def _column(rows: list[dict[str, str]], axis: str, name: str) -> NDArray[np.float64]:
    """Return an array ``[2, rows]`` of steps and metric values from rows that have the metric."""
    found = [(row[axis], row[name]) for row in rows if row.get(name)]
    return np.array(found, float).reshape(-1, 2).T
