"""Measuring: several things in turn, medians, ratios, and a table that says on what machine."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

TREE = Path(__file__).parents[1]
RESULTS = TREE / "benchmarks" / "results"


def interleaved(
    cases: Mapping[str, Callable[[], float]], repeats: int = 3, warm_up: bool = True
) -> dict[str, list[float]]:
    """Run every case in turn, ``repeats`` times, so that a noisy minute hits all of them.

    Args:
        cases: each returns its figure (a rate, a time) when called.
        repeats: rounds that count.
        warm_up: whether a round comes before them that does not.

    Returns:
        The figures of each case, in the order of the rounds.
    """
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for round_number in range(repeats + warm_up):
        for name, case in cases.items():
            figure = case()
            if round_number >= warm_up:
                figures[name].append(figure)
    return figures


def processor_time(step: Callable[[], Any], steps: int, unit: float = 1e3) -> Callable[[], float]:
    """Return a case: the processor time of a step, the mean of several.

    Args:
        step: makes it.
        steps: of which the mean is taken.
        unit: of the figure, in parts of a second: milliseconds by default.
    """

    def case() -> float:
        began = time.process_time()
        for _ in range(steps):
            step()
        return (time.process_time() - began) / steps * unit

    return case


def environment(threads: int = 1, tree: Path = TREE) -> dict[str, str]:
    """Return the environment variables of a process that is measured.

    Bytecode is kept, as that of packages from PyPI is: where ``PYTHONDONTWRITEBYTECODE`` is set,
    every start would compile the whole kit.

    Args:
        threads: PyTorch's.
        tree: the folder whose kit it imports.
    """
    variables = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": str(threads)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def median(figures: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(figures)


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios round by round."""
    return statistics.median(a / b for a, b in zip(above, below))


def machine(threads: int, also: Sequence[str] = ()) -> str:
    """Return one line about what was measured on.

    Args:
        threads: PyTorch's threads.
        also: further packages whose versions matter, installed or not.
    """
    from kit.fast.products import are_faster

    products = "oneDNN" if are_faster() else "MKL"
    names = ("torch", "torchrl", "tensordict", "gymnasium", *also)
    versions = ", ".join(f"{name} {_version(name)}" for name in names)
    cores = f"{os.cpu_count()} cores ({platform.machine()}, matrix products: {products})"
    python = platform.python_version()
    return f"{date.today()}, {cores}, PyTorch threads: {threads}, Python {python}, {versions}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: first column left, the others right."""
    lines = [list(header), ["---", *["--:"] * (len(header) - 1)], *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_results(name: str, title: str, text: str) -> Path:
    """Write ``benchmarks/results/<name>.md``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.md"
    path.write_text(f"# {title}\n\n{text}\n")
    return path
