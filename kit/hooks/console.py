"""Console output with the plan, progress and ledger of a run."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, ClassVar

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kit.hooks.base import KitHook
from kit.hooks.policy import BestPolicy
from kit.logging.files import from_here
from kit.steps.table import measured, plural

_SHOWN = (
    ("episode/return", "return"),
    ("evaluation/return", "evaluation"),
    ("time/policy_steps_per_second", "policy steps/s"),
    ("time/gradient_steps_per_second", "gradient steps/s"),
)


class Console(KitHook):
    """Prints the plan before a run, progress during the run and the ledger after it.

    A terminal shows a progress bar. Otherwise, a line is printed for every tenth of the run.

    Args:
        title: first line to print; if empty, no title is printed.
    """

    operations: ClassVar = {
        "setup": "begin",
        "post_steps": "move",
        "log_row": "show",
        "shutdown": "end",
    }

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.console = RichConsole(highlight=False, soft_wrap=True, file=sys.stdout)
        self._progress: Progress | None = None
        self._drawn = 0.0
        self._tenth = -1

    def begin(self) -> None:
        """Print the plan and, in a terminal, start the progress bar."""
        plan, done = self.trainer.plan, self._done
        self.console.print(f"\n[bold]{self.title}[/bold]\n" if self.title else "")
        lines = [plan.table()]
        if done:
            complete = ", already complete" if done == plan.length else ""
            lines.append(f"\nresumed at {done:,} {self._steps}{complete}")
        if self.trainer.folder is not None:
            lines.append(f"\nrun folder: {from_here(self.trainer.folder)}")
        self.console.print("\n".join([*lines, ""]), markup=False)
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn(f"{{task.completed:,.0f}} {self._steps}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[metrics]}"),
                console=self.console,
                refresh_per_second=5,
            )
            self._progress.start()
            total = plan.length if plan.is_exact else None
            self._task = self._progress.add_task("run", total=total, completed=done, metrics="")

    @property
    def _done(self) -> int:
        done: int = getattr(self.trainer.ledger, self.trainer.plan.axis)
        return done

    @property
    def _steps(self) -> str:
        return self.trainer.plan.axis.replace("_", " ")

    def move(self) -> None:
        """Update the progress bar, at most five times per second."""
        now = time.monotonic()
        if self._progress is not None and now - self._drawn > 0.2:
            self._drawn = now
            self._progress.update(self._task, completed=self._done)

    def show(self, row: dict[str, Any]) -> None:
        """Display the metrics of the newest row."""
        plan, latest = self.trainer.plan, self.trainer.journal.latest
        done, total = row[plan.axis], plan.length or 1
        text = "  ".join(
            f"{label} {_short(latest[name])}" for name, label in _SHOWN if name in latest
        )
        if self._progress is not None:
            self._progress.update(self._task, completed=done, metrics=text)
            return
        tenth = int(10 * done // total)
        if tenth > self._tenth:
            self._tenth = tenth
            self.console.print(f"{done:>12,} {self._steps} {100 * done / total:4.0f}%  {text}")

    def end(self) -> None:
        """Print the ledger and the last and best evaluations."""
        trainer, latest = self.trainer, self.trainer.journal.latest
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done)
            self._progress.stop()
            self._progress = None
        lines = ["", trainer.plan.table(trainer.ledger)]
        if trainer.stop_reason:
            lines.append(f"\nstopped early: {trainer.stop_reason}")
        if "evaluation/return" in latest:
            mean, std = _short(latest["evaluation/return"]), latest.get("evaluation/return_std")
            mean += "" if std is None else f" ± {_short(std)}"
            over = plural(trainer.plan.evaluation_episodes, "episode")
            lines.append(f"\nlast evaluation: return {mean} over {over}")
            lines += self._earlier_best()
        lines.append(f"seconds: {trainer.journal.elapsed:.1f}")
        if trainer.folder is not None and (trainer.folder / "curve.png").is_file():
            lines.append(f"learning curve: {from_here(trainer.folder / 'curve.png')}")
        self.console.print("\n".join(lines), markup=False)

    def _earlier_best(self) -> list[str]:
        """Return a line about the best evaluation unless the last evaluation was the best one."""
        axis = self.trainer.plan.axis
        return [
            f"best evaluation: {hook.metric.removeprefix('evaluation/')} {_short(hook.value)} "
            f"after {getattr(hook, axis):,} {self._steps}"
            for hook in self.trainer.registered_modules.values()
            if isinstance(hook, BestPolicy)
            and hook.value is not None
            and getattr(hook, axis) != self._done
        ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else measured(value)
