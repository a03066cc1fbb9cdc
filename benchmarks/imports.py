"""What importing costs, in fresh processes.

Run with ``python -m benchmarks.imports``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measure import (
    environment,
    interleaved,
    machine,
    markdown_table,
    median,
    write_results,
)

STATEMENTS = {
    "import torch": "import torch",
    "import torchrl": "import torchrl",
    "TorchRL's parts that kit uses": (
        "import torchrl.collectors, torchrl.objectives, torchrl.trainers, torchrl.data, "
        "torchrl.envs, torchrl.modules, torchrl.checkpoint, torchrl.record"
    ),
    "import kit": "import kit",
    "import kit.steps": "import kit.steps",
    "everything of kit": (
        "import kit.trainer, kit.collectors, kit.envs.make, kit.update, kit.hooks, "
        "kit.runs.run_folder"
    ),
    "kit steps words (the command)": "from kit.__main__ import main; main(['steps', 'words'])",
}


def seconds_of(statement: str) -> float:
    """Run a statement in a new interpreter and return the seconds."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", statement],
        env=environment(),
        check=False,
        capture_output=True,
    )
    return time.perf_counter() - began


def main(repeats: int = 5) -> Path:
    """Measure, write the table and return its path."""
    cases = {name: lambda s=statement: seconds_of(s) for name, statement in STATEMENTS.items()}
    seconds = interleaved(cases, repeats)
    rows = [[name, f"{median(figures):.2f}"] for name, figures in seconds.items()]
    over = median(seconds["everything of kit"]) - median(seconds["TorchRL's parts that kit uses"])
    text = (
        f"{machine(1)}; medians of {repeats} interleaved rounds.\n\n"
        f"{markdown_table(['', 'seconds'], rows)}\n\n"
        f"All of kit costs {over:+.2f} s beyond the parts of TorchRL that it uses."
    )
    return write_results("imports", "Imports", text)


if __name__ == "__main__":
    print(main().read_text())
