"""Recorder that collects counters and metrics and writes one row per log point."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from kit.distributed import Ranks
from kit.envs.episodes import Episode, info_means, mean
from kit.logging.loggers import CsvLogger, RowLogger, named_in_errors
from kit.logging.metrics import MetricMeans
from kit.steps import SettingError


class MetricsRecorder:
    """Collects metrics during training and writes one row per log point.

    Losses and floats logged by hooks are averaged between rows. For integers, the last value is
    logged. Device tensors are read only when a row is written.

    Args:
        loggers: loggers that receive the rows.
        axis: counter for the x-axis.
        ranks: processes whose metrics a row combines; ``None``: only this process.

    Attributes:
        metrics: metrics from the gradient steps since the last row.
        latest: latest value of each column.
    """

    def __init__(
        self,
        loggers: Sequence[RowLogger],
        axis: str = "policy_steps",
        ranks: Ranks | None = None,
    ) -> None:
        self.loggers, self.axis, self.ranks = list(loggers), axis, ranks or Ranks()
        self.metrics = MetricMeans()
        self.latest: dict[str, float | int] = {}
        self._noted = MetricMeans()
        self._numbers: dict[str, list[float]] = {}
        self._warned: set[str] = set()
        self._hook_metrics: set[str] = set()
        self._trainer_metrics: set[str] = set()
        self._best = -math.inf  # highest evaluation return
        self._seconds = 0.0
        self._spent: dict[str, float] = {}
        self._began = time.perf_counter()
        self._last = (0, 0.0)
        self._begun: list[RowLogger] = []  # loggers started in this process or before a resume
        self._open: list[RowLogger] = []

    # ------------------------------------------------------------------ during the loop
    def start(self, steps: int, config: Mapping[str, Any], plan: str) -> None:
        """Start the clock and the loggers.

        Args:
            steps: initial value of the x-axis counter; nonzero after a resume.
            config: config of the run.
            plan: plan as a text table.
        """
        self._began = time.perf_counter() - self._seconds
        self._last = (steps, self._seconds)
        for logger in self.loggers:
            logger.axis, logger.continues = self.axis, logger in self._begun
            with named_in_errors(logger):
                logger.start()
                self._open.append(logger)
                if logger.continues and not getattr(logger, "begins_anew", False):
                    continue
                if config:
                    logger.log_config(config)
                logger.log_text("plan", plan)
                for row in self._earlier_rows(logger):
                    logger.log_row(row)
        self._begun = list(self.loggers)

    def _earlier_rows(self, logger: RowLogger) -> list[dict[str, float | int]]:
        """Return the rows from before a resume if the logger does not have them."""
        files = [logger for logger in self.loggers if isinstance(logger, CsvLogger)]
        if not files or files[0] not in self._begun or logger in files:
            return []
        return files[0].rows()

    def spent(self, what: str, began: float) -> None:
        """Add the seconds since ``began`` (a ``perf_counter()`` time) to the total for ``what``."""
        self._spent[what] = self._spent.get(what, 0.0) + time.perf_counter() - began

    def note(self, metrics: Mapping[str, Any], *, of_hooks: bool = False) -> None:
        """Record metrics for the next row: the mean of floats, or the last value of integers.

        Values that are not numbers are omitted with a warning.

        Args:
            metrics: values keyed by name.
            of_hooks: whether hooks, rather than the trainer, log the metrics.

        Raises:
            SettingError: if a hook and the trainer log metrics with the same name.
        """
        names = self._hook_metrics if of_hooks else self._trainer_metrics
        if not names.issuperset(metrics):
            names.update(metrics)
            reject_existing_columns(self._hook_metrics & self._trainer_metrics)
        for name, value in metrics.items():
            if isinstance(value, np.generic):
                value = value.item()
            if isinstance(value, Tensor) and value.numel() == 1:
                self._noted.add({name: value.reshape(()).clone()})  # a hook may reuse the tensor
            elif isinstance(value, (float, int)):
                self._numbers.setdefault(name, []).append(value)
            else:
                self._warn_of_omitted(name, value)

    def evaluated(self, result: Mapping[str, Any]) -> bool:
        """Record an evaluation for the next row.

        Returns:
            Whether the ``evaluation/return`` is at least as high as in all previous evaluations.
        """
        self.note(result)
        value = float(result.get("evaluation/return", math.nan))
        is_best = not math.isnan(value) and value >= self._best
        self._best = value if is_best else self._best
        return is_best

    def _warn_of_omitted(self, name: str, value: Any) -> None:
        if name not in self._warned:
            self._warned.add(name)
            what = f"Metric {name!r} is a {type(value).__name__} rather than a number"
            warnings.warn(f"{what}, so it is not logged.", stacklevel=5)

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far, including the time before a resume."""
        return time.perf_counter() - self._began

    # ------------------------------------------------------------------ at a log point
    def write_row(
        self, counters: Mapping[str, int], episodes: Sequence[Episode]
    ) -> dict[str, float | int]:
        """Write and return a row with all metrics since the last row.

        With several ranks, all ranks call this method and return the same metrics. Episode columns
        cover the episodes of all ranks. Other metrics are means over the ranks that have them.

        Raises:
            SettingError: if a recorded metric has the name of another column.
        """
        own = (list(episodes), self.metrics.take(), self._take_noted())
        found = self.ranks.gather_objects(own, "row")
        episodes = [episode for finished, _, _ in found for episode in finished]
        row: dict[str, float | int] = {**counters, **episode_columns(episodes)}
        trained = _over_ranks([metrics for _, metrics, _ in found])
        row |= {f"train/{name}": value for name, value in trained.items()}
        noted = _over_ranks([metrics for _, _, metrics in found])
        times = self._times(counters[self.axis])
        reject_existing_columns(noted.keys() & (row | times).keys())
        row |= noted | times
        self.latest |= row
        for logger in self.loggers:
            with named_in_errors(logger):
                logger.log_row(dict(row))
        return row

    def _take_noted(self) -> dict[str, float | int]:
        """Return each recorded metric: its last value if all values are integers, else the mean."""
        counts = self._noted.counts()
        row: dict[str, float | int] = dict(self._noted.take())
        for name, values in self._numbers.items():
            count = counts.get(name, 0)
            if not count and all(isinstance(value, int) for value in values):
                row[name] = int(values[-1])
            else:
                average, number = mean(values), len(values)
                total = row.get(name, 0.0) * count + average * number
                row[name] = total / (count + number) if count else average
        self._numbers = {}
        return row

    def _times(self, steps: int) -> dict[str, float]:
        self._seconds = self.elapsed
        before, seconds = self._last
        self._last = (steps, self._seconds)
        elapsed = max(self._seconds - seconds, 1e-9)
        times = {"time/seconds": self._seconds}
        times[f"time/{self.axis}_per_second"] = (steps - before) / elapsed
        for what, spent in self._spent.items():
            times[f"time/{what}"] = spent / elapsed
        self._spent = {}
        return times

    def close(self, ledger: str) -> None:
        """Log the final table of planned and actual step counts, and close all loggers."""
        with contextlib.ExitStack() as last_first:
            for logger in self._open:
                last_first.callback(_finish, logger, ledger)
            self._open = []

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """Return the metrics for the next row and the states of the loggers."""
        return {
            "seconds": self.elapsed,
            "best": self._best,
            "latest": dict(self.latest),
            "metrics": self.metrics.state_dict(),
            "noted": self._noted.state_dict(),
            "numbers": {name: list(values) for name, values in self._numbers.items()},
            "loggers": [[_kind(logger), logger.state_dict()] for logger in self.loggers],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`, and drop later rows."""
        self._seconds = float(state_dict["seconds"])
        self._best = float(state_dict.get("best", -math.inf))  # missing from old checkpoints
        self.latest = dict(state_dict["latest"])
        self.metrics.load_state_dict(state_dict["metrics"])
        self._noted.load_state_dict(state_dict["noted"])
        self._numbers = {name: list(values) for name, values in state_dict["numbers"].items()}
        saved = list(state_dict["loggers"])
        for logger in self.loggers:  # the loggers may have changed since the save
            place = next((n for n, (kind, _) in enumerate(saved) if kind == _kind(logger)), None)
            if place is not None:
                logger.load_state_dict(saved.pop(place)[1])
                self._begun.append(logger)


def _finish(logger: RowLogger, ledger: str) -> None:
    with named_in_errors(logger):
        try:
            logger.log_text("ledger", ledger)
        finally:
            logger.close()


def reject_existing_columns(names: Iterable[str]) -> None:
    """Raise SettingError for hook metrics that would replace other columns."""
    for name in sorted(names):
        reason = "is an existing column, which the hook's metric would replace"
        raise SettingError("metric", name, reason, f"use another name, such as hook/{name}")


def episode_columns(episodes: Sequence[Episode], prefix: str = "episode") -> dict[str, float]:
    """Return columns with statistics of returns, and means of lengths and ``info`` entries.

    Args:
        episodes: finished episodes. If there are none, no columns are returned.
        prefix: prefix of the column names, as in ``episode/return``.
    """
    if not episodes:
        return {}
    returns = [episode.episode_return for episode in episodes]
    columns = {
        "return": statistics.fmean(returns),
        "return_std": statistics.pstdev(returns),
        "return_min": min(returns),
        "return_max": max(returns),
    }
    lengths = [episode.length for episode in episodes if episode.length]
    if lengths:
        columns["length"] = statistics.fmean(lengths)
    # kit's columns replace info entries with the same name, such as "return".
    return {f"{prefix}/{name}": value for name, value in (info_means(episodes) | columns).items()}


def _over_ranks(found: Sequence[Mapping[str, float | int]]) -> dict[str, float | int]:
    """Return the mean of each metric over the ranks that have it; for integers, the first value."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    values = {name: [m[name] for m in found if name in m] for name in names}
    return {
        name: one[0] if isinstance(one[0], int) or len(one) == 1 else mean(one)
        for name, one in values.items()
    }


def _kind(logger: RowLogger) -> str:
    return type(logger).__name__
