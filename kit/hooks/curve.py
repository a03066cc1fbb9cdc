"""The learning curve as a picture."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kit.hooks.base import KitHook
from kit.logging.picture import BLUE, GREY, curve_axes, save_picture


class LearningCurve(KitHook):
    """Draws ``curve.png``: return against policy steps, of training and of evaluation.

    Offline it is drawn against gradient steps.

    Args:
        folder: run folder, whose ``metrics.csv`` is drawn.
        title: above the axes.
    """

    operations: ClassVar = {"shutdown": "draw"}

    def __init__(self, folder: Path, title: str = "") -> None:
        self.folder, self.title = folder, title

    def draw(self) -> None:
        """Draw the rows of ``metrics.csv`` so far."""
        metrics = self.folder / "metrics.csv"
        if metrics.is_file():
            draw_curve(metrics, self.folder / "curve.png", self.title, self.trainer.plan.axis)


def draw_curve(metrics: Path, picture: Path, title: str = "", axis: str = "policy_steps") -> None:
    """Draw the returns of a ``metrics.csv``.

    Args:
        metrics: the file of rows.
        picture: PNG file to write.
        title: above the axes.
        axis: column against which they are drawn.

    Raises:
        WriteError: if it cannot be written; one that was there before is untouched.
    """
    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = curve_axes()
    steps, returns = _column(rows, axis, "episode/return")
    if len(steps):
        (training,) = axes.plot(steps, returns, color=GREY, lw=1.0, label="training episodes")
        training.set_zorder(2.5)  # above the thicker line, so that both are seen at the maximum
    steps, returns = _column(rows, axis, "evaluation/return")
    if len(steps):
        spread, std = _column(rows, axis, "evaluation/return_std")
        label = "evaluation"
        if np.array_equal(spread, steps):  # another evaluator than the kit's may say none
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
    """Steps and values of the rows that have this metric, ``[2, rows]``."""
    found = [(row[axis], row[name]) for row in rows if row.get(name)]
    return np.array(found, float).reshape(-1, 2).T
