"""The command ``kit compare``: seed statistics for saved runs, grouped by settings.

Run it::

    kit compare runs/ppo
    kit compare runs/ppo/sweeps/20250101-120000 --plot compared.png
    kit compare runs/ppo runs/sac --column episode/return
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from kit.logging.files import WriteError
from kit.runs.comparison import COLUMN, FOR_IQM, Comparison, SeedCurve, compare, ranges
from kit.steps import SettingError
from kit.steps.table import text_table


def table(comparison: Comparison) -> str:
    """Return a text table of the groups, followed by a legend and notes."""
    groups = comparison.groups
    cells = {
        "group": [group.name or "all runs" for group in groups],
        "seeds": [f"{len(g.runs)} ({ranges([run.seed for run in g.runs])})" for g in groups],
        "policy steps": [_span([run.policy_steps for run in group.runs]) for group in groups],
        "last": _numbers([group.mean for group in groups], [group.std for group in groups]),
        "max": _numbers([group.greatest for group in groups]),
        "IQM": _numbers([group.interquartile_mean for group in groups]),
        "gradient steps": [_span([run.gradient_steps for run in group.runs]) for group in groups],
        "seconds": [_seconds(group.runs) for group in groups],
    }
    header = [name for name, column in cells.items() if any(column)]
    rows = list(zip(*(cells[name] for name in header)))
    legend = [
        f"{name:<10}{text.format(column=comparison.column, seeds=FOR_IQM)}"
        for name, text in _LEGEND.items()
        if name in header
    ]
    remarks = [fill(remark, 100, break_on_hyphens=False) for remark in comparison.remarks]
    parts = [comparison.title, text_table(header, rows), "\n".join(legend), "\n".join(remarks)]
    return "\n\n".join(filter(None, parts))


_LEGEND = {
    "last": "last value of {column}, mean ± standard deviation over seeds",
    "max": "maximum value of each seed, mean over seeds",
    "IQM": "interquartile mean of the last values (needs {seeds} seeds)",
    "seconds": "seconds until the last value, mean over seeds",
}
"""Descriptions of the table columns, keyed by column name."""


def _numbers(
    values: Sequence[float | None], spreads: Sequence[float | None] | None = None
) -> list[str]:
    """Format the values and standard deviations of a column with four significant digits."""
    largest = max((abs(v) for v in values if v is not None and math.isfinite(v)), default=0.0)
    digits = min(max(3 - math.floor(math.log10(largest)), 0), 8) if largest else 1
    cells = []
    for value, spread in zip(values, spreads or [None] * len(values)):
        deviation = "" if spread is None else f" ± {spread:,.{digits}f}"
        cells.append("" if value is None else f"{value:,.{digits}f}{deviation}")
    return cells


def _span(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def _seconds(runs: Sequence[SeedCurve]) -> str:
    known = [run.seconds for run in runs if run.seconds is not None]
    return f"{statistics.fmean(known):,.1f}" if len(known) == len(runs) else ""


def main(words: Sequence[str]) -> int:
    """Run the command ``kit compare``. Return the exit code: 0, or 2 after an error."""
    parser = argparse.ArgumentParser(
        prog="kit compare",
        description="Compare saved runs. Runs that differ only in their seed are one group.",
    )
    text = "run folder, folder that contains runs, or sweep folder"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=text)
    parser.add_argument(
        "--column", default=COLUMN, help=f"column of metrics.csv (default: {COLUMN})"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="plot the curves")
    given = parser.parse_args(words)
    try:
        compared = compare(given.runs, given.column)
        print(table(compared))
        if given.plot is not None:
            from kit.cli.compare_plot import draw  # importing matplotlib is slow

            given.plot.parent.mkdir(parents=True, exist_ok=True)
            draw(compared, given.plot)
            print(f"\nplot: {given.plot}")
    except (SettingError, WriteError, OSError) as error:
        print(f"kit: {error}", file=sys.stderr)
        return 2
    return 0
