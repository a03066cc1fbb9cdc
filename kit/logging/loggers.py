"""Where rows of metrics go: CSV files, W&B, TensorBoard, any TorchRL logger."""

from __future__ import annotations

import contextlib
import csv
import difflib
import io
import math
import os
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger

from kit.dialects.files import flat
from kit.logging.files import NotSaved, append, make_folder, write_whole
from kit.steps import SettingError

Row = Mapping[str, float | int]
AXES = ("policy_steps", "env_steps", "gradient_steps", "time/seconds")
"""Columns against which every other one can be drawn."""


class RowLogger:
    """Takes one row of metrics per log point. All but ``log_row`` do nothing unless overridden.

    Attributes:
        axis: column against which the others are drawn; the trainer sets it before ``start``, to
            ``gradient_steps`` where the plan is offline.
        begins_anew: whether a resumed run begins a new log, to which settings and earlier rows are
            written again.
    """

    axis = "policy_steps"
    begins_anew = False

    def start(self) -> None:
        """Begin to write: called when the run begins, not when it is built."""

    def log_row(self, row: Row) -> None:
        """Write one row: counters and metrics by name."""

    def log_text(self, name: str, text: str) -> None:
        """Keep a text: the plan, the final table."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Keep the settings of the run."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`, dropping later rows."""

    def close(self) -> None:
        """Finish writing."""


class CsvLogger(RowLogger):
    """One row per log point in ``metrics.csv``, and its times in ``times.csv``.

    Times are separate because they differ from run to run: ``metrics.csv`` of a run that was
    killed and resumed is the file of the uninterrupted run, byte for byte. Texts and settings are
    files of the run folder.

    Args:
        folder: where both files are.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        paths = {name: self.folder / f"{name}.csv" for name in ("metrics", "times")}
        self._files = {name: _CsvFile(path) for name, path in paths.items()}

    def start(self) -> None:
        """Make the folder."""
        make_folder(self.folder)

    def log_row(self, row: Row) -> None:
        """Append to both files; a name not seen before becomes a new column."""
        times = {name: value for name, value in row.items() if name.startswith("time/")}
        self._files["metrics"].append({name: v for name, v in row.items() if name not in times})
        if times:
            steps = {self.axis: row[self.axis]} if self.axis in row else {}
            self._files["times"].append({**steps, **times})

    def rows(self, of_others: bool = False) -> list[dict[str, float | int]]:
        """The rows written so far, with their times.

        Args:
            of_others: whether all that are in the files are meant, and not this logger's alone.
        """
        metrics, times = (file.rows_written(of_others) for file in self._files.values())
        if len(times) != len(metrics):
            times = [{} for _ in metrics]
        return [row | spent for row, spent in zip(metrics, times)]

    def state_dict(self) -> dict[str, Any]:
        """Columns and number of rows."""
        return {name: file.state_dict() for name, file in self._files.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Drop the rows written later."""
        for name, file in self._files.items():
            file.load_state_dict(state_dict[name])


def read_rows(folder: Path | str) -> list[dict[str, float | int]]:
    """The rows that a run has logged to its folder, with their times.

    Args:
        folder: of the run, with ``metrics.csv``.

    Raises:
        SettingError: if there are none.
    """
    rows = CsvLogger(folder).rows(of_others=True)
    if not rows:
        raise SettingError("folder", str(folder), "has no rows", "give the folder of a run")
    return rows


class _CsvFile:
    """A CSV file of growing columns, whose damages by others are noticed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self.rows = 0
        self._last: tuple[float, ...] = ()  # position in the run of the last row
        self._size = 0  # bytes of the file

    def append(self, row: Row) -> None:
        new = [name for name in row if name not in self.columns]
        changed = self.rows and _size(self.path) != self._size
        if new or changed:
            before = self._rows_left() if self.rows else []
            self.columns += new
            self._rewrite(before)
        append(self.path, self._lines([row]))
        self.rows, self._last = self.rows + 1, _position(row)
        self._size = _size(self.path)

    def rows_written(self, of_others: bool = False) -> list[dict[str, float | int]]:
        rows = self._read()[: None if of_others else self.rows]
        return [{name: _number(text) for name, text in row.items() if text} for row in rows]

    def _rows_left(self) -> list[dict[str, str]]:
        """The rows written so far; a warning says how many are lost."""
        rows = [row for row in self._read() if _position(row) <= self._last][: self.rows]
        if len(rows) < self.rows:
            what = f"{self.path} was damaged: {len(rows)} of {self.rows} rows are left"
            warnings.warn(f"{what}; the run goes on with these", stacklevel=6)
        self.rows = len(rows)
        return rows

    def _read(self) -> list[dict[str, str]]:
        """The rows that can be read, also where the header is lost or lines are torn.

        Raises:
            NotSaved: if the system does not let us read them, or it is no file.
        """
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            what = f"{self.path} cannot be read: {error.strerror}"
            raise NotSaved(f"{what}; it is left as it is") from error
        lines = list(csv.reader(io.StringIO(text.replace("\0", ""), newline="")))
        header = self.columns
        if lines and lines[0][: len(header)] == header:
            header = lines.pop(0)
        return [dict(zip(header, line)) for line in lines if len(line) == len(header)]

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write header and rows to a new file that takes the place of the old one."""
        header = dict(zip(self.columns, self.columns))
        write_whole(self.path, self._lines([header, *rows]))

    def _lines(self, rows: Sequence[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore", lineterminator="\n")
        writer.writerows(rows)
        return text.getvalue()

    def state_dict(self) -> dict[str, Any]:
        return {"columns": list(self.columns), "rows": self.rows, "last": list(self._last)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.columns, self.rows = list(state_dict["columns"]), int(state_dict["rows"])
        self._last = tuple(state_dict["last"])
        if self.rows:
            self._rewrite(self._rows_left())
            self._size = _size(self.path)


_POSITION = ("policy_steps", "gradient_steps", "time/seconds")


def _position(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Position in the run of a row; an unreadable one is beyond all."""
    try:
        return tuple(float(row[name]) for name in _POSITION if row.get(name) not in (None, ""))
    except ValueError:
        return (math.inf,)


def _number(text: str) -> float | int:
    """An integer as an integer, anything else as a float."""
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _size(path: Path) -> int:
    """Bytes of a file; -1 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


class TorchRLLogger(RowLogger):
    """Any of TorchRL's loggers, one row at a time.

    Args:
        logger: TorchRL's logger, or a function that makes it when the run begins.
    """

    def __init__(self, logger: Logger | Callable[[], Logger]) -> None:
        self._make = logger
        self.logger: Any = logger if isinstance(logger, Logger) else None

    def start(self) -> None:
        """Make the logger, if it is still to be made."""
        if self.logger is None:
            self.logger = self._make()  # type: ignore[operator]

    def log_row(self, row: Row) -> None:
        """Log all metrics of a row at its policy step; offline, at its gradient step."""
        self.logger.log_metrics(dict(row), step=int(row.get(self.axis, 0)))

    def log_text(self, name: str, text: str) -> None:
        """Log a text, where the logger can."""
        with contextlib.suppress(NotImplementedError, AttributeError):
            self.logger.log_str(name, text, step=0)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the settings of the run, one by one (``env.id``): not all loggers take groups."""
        plain = (str, int, float, bool)
        settings = {n: v if isinstance(v, plain) else str(v) for n, v in flat(config).items()}
        self.logger.log_hparams(settings)

    def close(self) -> None:
        """Close the underlying writer, where it has one."""
        close = getattr(getattr(self.logger, "experiment", None), "close", None)
        if callable(close):
            close()


class WandbLogger(TorchRLLogger):
    """Weights & Biases, through TorchRL's logger: one row per log point, offline if need be.

    It never asks: without credentials, runs are written to disk, to be uploaded by ``wandb sync``.
    Every metric can be drawn against policy steps (the default, gradient steps where the run is
    offline), env steps, gradient steps or seconds.

    Args:
        folder: run folder; W&B writes below it.
        project: W&B project.
        name: name of the run.
        id: of a run to continue; ``None``: a new one.
    """

    def __init__(
        self, folder: Path, project: str = "kit", name: str | None = None, id: str | None = None
    ) -> None:
        super().__init__(self._make_wandb)
        self.id = id or secrets.token_hex(4)
        self.folder, self.project, self.run_name = folder, project, name or folder.name

    def _make_wandb(self) -> Logger:
        import wandb
        from torchrl.record.loggers.wandb import WandbLogger as Wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        # Online the server has the earlier rows; offline each start writes a folder of its own.
        self.begins_anew = offline = not _logged_in()
        logger = Wandb(
            exp_name=self.run_name,
            save_dir=str(self.folder),
            id=self.id,
            project=self.project,
            settings=wandb.Settings(silent=True),
            log_env_packages=False,  # under "env", where the run's settings are
            **({"mode": "offline"} if offline else {}),
        )
        for axis in AXES:
            logger.experiment.define_metric(axis)
        logger.experiment.define_metric("*", step_metric=self.axis)
        return logger

    def log_row(self, row: Row) -> None:
        """Log one row, once."""
        self.logger.experiment.log(dict(row))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the settings of the run, in their groups."""
        self.logger.log_hparams(dict(config))

    def log_text(self, name: str, text: str) -> None:
        """Keep a text in the run's summary and as a file."""
        run = self.logger.experiment
        run.summary[name] = text
        path = Path(run.dir) / f"{name}.txt"
        path.write_text(text + "\n", encoding="utf-8")
        run.save(str(path), base_path=run.dir, policy="now")

    def state_dict(self) -> dict[str, Any]:
        """The id of the run."""
        return {"id": self.id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the same W&B run."""
        self.id = str(state_dict["id"])

    def close(self) -> None:
        """Finish the run."""
        if self.logger is not None:
            self.logger.experiment.finish()


def _logged_in() -> bool:
    """Whether W&B has credentials, without asking for them."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return False
    import wandb

    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # older versions do not take prompt=False
        return bool(wandb.api.api_key)
    except Exception:
        return False


LOGGERS = ("csv", "wandb", "tensorboard", "none")


def make_loggers(
    names: str | Sequence[str], folder: Path, *, run_name: str = ""
) -> list[RowLogger]:
    """Make the loggers called ``names``; the CSV file is always written.

    Args:
        names: of ``LOGGERS``, several separated by commas.
        folder: run folder.
        run_name: name of the run in W&B.

    Raises:
        SettingError: if a name is unknown or its package is missing.
    """
    wanted = names.replace("+", ",").split(",") if isinstance(names, str) else list(names)
    loggers: list[RowLogger] = [CsvLogger(folder)]
    for name in (entry.strip().lower() for entry in wanted):
        if name == "wandb":
            loggers.append(WandbLogger(folder, name=run_name or None))
        elif name == "tensorboard":
            loggers.append(_tensorboard(folder))
        elif name not in LOGGERS and name:
            near = difflib.get_close_matches(name, LOGGERS, n=1, cutoff=0.4)
            raise SettingError("logger", name, "is not a logger", near or list(LOGGERS))
    return loggers


def _tensorboard(folder: Path) -> TorchRLLogger:
    try:
        import tensorboard  # noqa: F401
        from torchrl.record.loggers.tensorboard import TensorboardLogger
    except ImportError:
        why = "needs the package tensorboard"
        works = "pip install 'torchrl-kit[tensorboard]'"
        raise SettingError("logger", "tensorboard", why, works) from None
    return TorchRLLogger(lambda: TensorboardLogger("tensorboard", str(folder)))
