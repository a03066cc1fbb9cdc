"""What a run says about itself: rows of counters and metrics, one per log point."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from kit.logging.loggers import RowLogger
from kit.logging.metrics import MetricMeans

if TYPE_CHECKING:
    from kit.trainer import Trainer


class Journal:
    """Gathers metrics while the loop runs and writes them, a row per log point.

    Losses are averaged over all gradient steps since the last row, and so are floats that hooks
    log; integers are the last value. Nothing on the device is read before the row is written.

    Args:
        trainer: whose run it is.
        loggers: where rows go.
    """

    def __init__(self, trainer: Trainer, loggers: Sequence[RowLogger]) -> None:
        self.trainer = trainer
        self.loggers = list(loggers)
        self.metrics = MetricMeans()
        self.seconds = 0.0
        self.latest: dict[str, float | int] = {}
        self._noted = MetricMeans()
        self._values: dict[str, float | int] = {}
        self._floats: dict[str, list[float]] = {}
        self._spent: dict[str, float] = {}
        self._began = time.perf_counter()
        self._last = (0, 0.0)
        self._resumed = False
        self._open: list[RowLogger] = []

    # ------------------------------------------------------------------ during the loop
    def start(self) -> None:
        """Start the clock and tell the loggers what will be done."""
        self._began = time.perf_counter() - self.seconds
        self._last = (self.trainer.policy_steps, self.seconds)
        for logger in self.loggers:
            logger.start()
            self._open.append(logger)
            if self._resumed:
                continue
            if self.trainer.config:
                logger.log_config(self.trainer.config)
            logger.log_text("plan", self.trainer.plan.table())

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the seconds of a block to those spent on ``what``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self._spent[what] = self._spent.get(what, 0.0) + spent

    def log(self, stage: str, batch: Any) -> None:
        """Note what the hooks of a log stage return."""
        for metrics in self.trainer.stages.log(stage, batch):
            self.note(metrics)

    def log_summary(self, gradient_steps: int) -> None:
        """Note what hooks say to the mean metrics of an update phase."""
        if self.trainer.stages["post_optim_complete_log"]:
            means = self.metrics.peek()
            for metrics in self.trainer.stages.log(
                "post_optim_complete_log", gradient_steps, means
            ):
                self.note(metrics)

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Keep metrics for the next row: floats and tensors are averaged, integers replaced."""
        for name, value in metrics.items():
            if name == "log_pbar":
                continue
            self.trainer._log_dict[name] = [value]
            if isinstance(value, np.generic):
                value = value.item()
            if isinstance(value, Tensor):
                if value.numel() == 1:
                    self._noted.add({name: value.reshape(())})
            elif isinstance(value, float):
                self._floats.setdefault(name, []).append(value)
            elif isinstance(value, int):
                self._values[name] = int(value)

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far, those before a resume included."""
        return time.perf_counter() - self._began

    # ------------------------------------------------------------------ at a log point
    def write_row(self) -> None:
        """Write a row with everything since the last one."""
        trainer = self.trainer
        trainer.source.count_environment(trainer.ledger)
        row: dict[str, float | int] = dict(trainer.ledger.counters())
        row |= self._episodes()
        row |= {f"train/{name}": value for name, value in self.metrics.take().items()}
        row |= self._noted.take() | {n: statistics.fmean(v) for n, v in self._floats.items()}
        row |= self._values | self._times()
        self._values, self._floats = {}, {}
        self.latest |= row
        for logger in self.loggers:
            logger.log_row(row)
        trainer.stages.row(row)

    def _episodes(self) -> dict[str, float | int]:
        episodes = self.trainer.source.take_episodes()
        if not episodes:
            return {}
        returns = [episode.episode_return for episode in episodes]
        row: dict[str, float | int] = {
            "episode/return": statistics.fmean(returns),
            "episode/return_std": statistics.pstdev(returns),
            "episode/return_min": min(returns),
            "episode/return_max": max(returns),
        }
        lengths = [episode.length for episode in episodes if episode.length]
        if lengths:
            row["episode/length"] = statistics.fmean(lengths)
        return row

    def _times(self) -> dict[str, float]:
        self.seconds = self.elapsed
        steps, seconds = self._last
        self._last = (self.trainer.policy_steps, self.seconds)
        elapsed = max(self.seconds - seconds, 1e-9)
        times = {"time/seconds": self.seconds}
        times["time/policy_steps_per_second"] = (self.trainer.policy_steps - steps) / elapsed
        for what, spent in self._spent.items():
            times[f"time/{what}"] = spent / elapsed
        self._spent = {}
        return times

    def close(self) -> None:
        """Keep the final table and finish every logger."""
        table = self.trainer.plan.table(self.trainer.ledger)
        with contextlib.ExitStack() as last_first:
            for logger in self._open:
                last_first.callback(logger.close)
                last_first.callback(logger.log_text, "ledger", table)
            self._open = []

    # ------------------------------------------------------------------ in and out
    def state_dict(self) -> dict[str, Any]:
        """Return what the next row will be made of, and where the loggers are."""
        return {
            "seconds": self.elapsed,
            "latest": dict(self.latest),
            "metrics": self.metrics.state_dict(),
            "noted": self._noted.state_dict(),
            "values": dict(self._values),
            "floats": {name: list(values) for name, values in self._floats.items()},
            "loggers": [[_kind(logger), logger.state_dict()] for logger in self.loggers],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; rows logged later are forgotten."""
        self.seconds = float(state_dict["seconds"])
        self.latest = dict(state_dict["latest"])
        self.metrics.load_state_dict(state_dict["metrics"])
        self._noted.load_state_dict(state_dict["noted"])
        self._values, self._floats = dict(state_dict["values"]), dict(state_dict["floats"])
        saved = list(state_dict["loggers"])
        for logger in self.loggers:  # which may be others than before
            for entry in saved:
                if entry[0] == _kind(logger):
                    logger.load_state_dict(entry[1])
                    saved.remove(entry)
                    break
        self._resumed = True


def _kind(logger: RowLogger) -> str:
    return type(logger).__name__
