"""Loggers for rows of metrics: CSV, W&B, TensorBoard and any TorchRL logger."""

from __future__ import annotations

import contextlib
import os
import secrets
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl.record.loggers import Logger

from kit.logging.csv_file import FILES, CsvFile, Row, joined
from kit.logging.files import WriteError, as_folder, make_folder
from kit.steps import SettingError
from kit.steps.errors import one_of, place_of
from kit.steps.values import flat

AXES = ("policy_steps", "env_steps", "gradient_steps", "time/seconds")
"""Columns that can be used as the x-axis of other columns."""


class RowLogger:
    """Base class for loggers. Subclasses must implement only ``log_row``.

    Attributes:
        axis: column for the x-axis; set before ``start``. Offline runs use ``gradient_steps``.
        continues: whether the log already contains rows of the run; set before ``start``.
        begins_anew: whether a resumed run starts a new log, so that config and earlier rows are
            logged again.
    """

    axis = "policy_steps"
    continues = False
    begins_anew = False

    def start(self) -> None:
        """Start logging. Called when the run begins."""

    def log_row(self, row: Row) -> None:
        """Log one row of counters and metrics, keyed by name."""

    def log_text(self, name: str, text: str) -> None:
        """Log a string, such as the plan or the final step counts."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the config of the run."""

    def log_video(self, name: str, file: Path, row: Row) -> None:
        """Log a video (MP4 file) that was recorded after ``row`` was logged."""

    def log_policy(self, folder: Path, row: Row) -> None:
        """Log the trained policy (a folder with config and weights) and the run's final counts."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`, and drop later rows."""

    def close(self) -> None:
        """Finish logging."""


class CsvLogger(RowLogger):
    """Writes rows to ``metrics.csv`` and their times to ``times.csv``.

    Times are stored separately, because they differ between identical runs. A killed and resumed
    run therefore writes exactly the same ``metrics.csv`` as an uninterrupted run.

    Args:
        folder: folder for both files.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = as_folder(folder)
        self._files = {name: CsvFile(self.folder / f"{name}.csv") for name in FILES}

    def start(self) -> None:
        """Create the folder.

        Raises:
            SettingError: if the folder contains rows that this run does not continue.
        """
        make_folder(self.folder)
        for file in () if self.continues else self._files.values():
            file.reject_earlier_rows()

    def log_row(self, row: Row) -> None:
        """Append a row to both files. New names become new columns."""
        times = {name: value for name, value in row.items() if name.startswith("time/")}
        self._files["metrics"].append({name: v for name, v in row.items() if name not in times})
        if times:
            steps = {self.axis: row[self.axis]} if self.axis in row else {}
            self._files["times"].append({**steps, **times})

    def rows(self) -> list[dict[str, float | int]]:
        """Return the rows written so far, with their times."""
        return joined(*(file.all_rows()[: file.rows] for file in self._files.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return the columns and the number of rows of both files."""
        return {name: file.state_dict() for name, file in self._files.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`, and drop later rows."""
        for name, file in self._files.items():
            file.load_state_dict(state_dict[name])


class TorchRLLogger(RowLogger):
    """Adapter for TorchRL's loggers.

    Args:
        logger: TorchRL logger, or a function that creates it when the run begins.
    """

    def __init__(self, logger: Logger | Callable[[], Logger]) -> None:
        self._make = logger
        self.logger: Any = logger if isinstance(logger, Logger) else None

    def start(self) -> None:
        """Create the logger if it was passed as a function."""
        if self.logger is None:
            self.logger = self._make()  # type: ignore[operator]

    def log_row(self, row: Row) -> None:
        """Log a row, with its policy steps (offline: gradient steps) as the x-axis value."""
        self.logger.log_metrics(dict(row), step=int(row.get(self.axis, 0)))

    def log_text(self, name: str, text: str) -> None:
        """Log a string if the logger supports strings."""
        with contextlib.suppress(NotImplementedError, AttributeError):
            self.logger.log_str(name, text, step=0)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the config with flat names such as ``env.id``, which some loggers require."""
        plain = (str, int, float, bool)
        settings = {n: v if isinstance(v, plain) else str(v) for n, v in flat(config).items()}
        self.logger.log_hparams(settings)

    def close(self) -> None:
        """Close the underlying writer, if it has a ``close`` method."""
        close = getattr(getattr(self.logger, "experiment", None), "close", None)
        if callable(close):
            close()


class WandbLogger(TorchRLLogger):
    """Logs to Weights & Biases through TorchRL's logger.

    Without credentials, runs are written to disk and can be uploaded with ``wandb sync``. The
    default x-axis is policy steps (offline: gradient steps); env steps, gradient steps and seconds
    are also available. W&B's environment variables are respected.

    Args:
        folder: run folder, to which W&B writes.
        project: W&B project; ``None``: ``WANDB_PROJECT``, or ``kit``.
        name: name of the run; ``None``: name of its folder.
        id: ID of a run to continue; ``None``: ``WANDB_RUN_ID``, or a new ID.

    Raises:
        SettingError: if W&B would read its settings from a run folder.
    """

    def __init__(
        self,
        folder: Path | str,
        project: str | None = None,
        name: str | None = None,
        id: str | None = None,
    ) -> None:
        super().__init__(self._make_wandb)
        self.id = id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self.folder = as_folder(folder)
        self.project = project or os.environ.get("WANDB_PROJECT") or "kit"
        self.run_name = name or self.folder.name
        _check_settings_of_wandb(self.folder)

    def _make_wandb(self) -> Logger:
        import wandb
        from torchrl.record.loggers.wandb import WandbLogger as Wandb

        self.folder.mkdir(parents=True, exist_ok=True)
        # An online run's earlier rows are on the server. An offline run starts a new folder.
        self.begins_anew = offline = not _logged_in()
        logger = Wandb(
            exp_name=self.run_name,
            save_dir=str(self.folder),
            id=self.id,
            project=self.project,
            settings=wandb.Settings(silent=True),
            log_env_packages=False,  # packages would overwrite the config's "env" group
            **({"mode": "offline"} if offline else {}),
        )
        for axis in AXES:
            logger.experiment.define_metric(axis)
        logger.experiment.define_metric("*", step_metric=self.axis)
        return logger

    def log_row(self, row: Row) -> None:
        """Log one row."""
        self.logger.experiment.log(dict(row))

    def log_video(self, name: str, file: Path, row: Row) -> None:
        """Log a video with the step counts of its row."""
        import wandb

        steps = {axis: row[axis] for axis in AXES if axis in row}
        video = wandb.Video(str(file), format=file.suffix[1:])
        self.logger.experiment.log({**steps, name: video})

    def log_policy(self, folder: Path, row: Row) -> None:
        """Log the policy as the model artifact ``policy-<run ID>``."""
        import wandb

        run = self.logger.experiment
        model = wandb.Artifact(f"policy-{run.id}", type="model", metadata=dict(row))
        for file in (path for path in sorted(folder.rglob("*")) if path.is_file()):
            model.add_file(str(file), name=str(file.relative_to(folder)), policy="immutable")
        run.log_artifact(model)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the config with nested groups."""
        self.logger.log_hparams(dict(config))

    def log_text(self, name: str, text: str) -> None:
        """Log a string in the run's summary and as a file."""
        run = self.logger.experiment
        run.summary[name] = text
        path = Path(run.dir) / f"{name}.txt"
        path.write_text(text + "\n", encoding="utf-8")
        run.save(str(path), base_path=run.dir, policy="now")

    def state_dict(self) -> dict[str, Any]:
        """Return the ID of the W&B run."""
        return {"id": self.id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the W&B run with the saved ID."""
        self.id = str(state_dict["id"])

    def close(self) -> None:
        """Finish the W&B run."""
        if self.logger is not None:
            self.logger.experiment.finish()


def _check_settings_of_wandb(run: Path) -> None:
    """Raise SettingError if W&B would read settings from a run folder.

    Such settings, which W&B itself never writes, could redirect the API key to another host.
    """
    here = Path.cwd()
    in_run = (here / "config.yaml").exists() and any(
        (here / name).exists() for name in ("plan.txt", "metrics.csv", "checkpoints")
    )
    for folder in {run, here} if in_run or here.is_relative_to(run.resolve()) else {run}:
        for file in (folder / name / "settings" for name in ("wandb", ".wandb")):
            if file.exists():
                reason = f"would read its settings from a run folder: {file}"
                hint = "remove that file, or move it to your project's folder"
                raise SettingError("logger", "wandb", reason, hint)


def _logged_in() -> bool:
    """Return whether W&B has credentials, without prompting for them."""
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return False
    import wandb

    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # older versions do not support prompt=False
        return bool(wandb.api.api_key)
    except Exception:
        return False


class TensorBoardLogger(TorchRLLogger):
    """Logs to TensorBoard with TorchRL's logger. A resumed run replaces rows after its checkpoint.

    Args:
        folder: run folder; events are written to its subfolder ``tensorboard``.
    """

    def __init__(self, folder: Path | str) -> None:
        from torchrl.record.loggers.tensorboard import TensorboardLogger

        super().__init__(lambda: TensorboardLogger("tensorboard", str(folder)))
        self.folder = as_folder(folder) / "tensorboard"
        self._next = 0

    def start(self) -> None:
        """Start a new event file that replaces all rows after the last saved row."""
        earlier = self.folder.is_dir() and any(self.folder.iterdir())
        super().start()
        if earlier:
            from torch.utils.tensorboard import SummaryWriter

            self.logger.experiment.close()
            self.logger.experiment = SummaryWriter(self.logger.log_dir, purge_step=self._next)

    def log_row(self, row: Row) -> None:
        """Log all metrics of a row."""
        super().log_row(row)
        self._next = int(row.get(self.axis, 0)) + 1

    def log_text(self, name: str, text: str) -> None:
        """Log a string, indented so that TensorBoard does not format it as Markdown."""
        self.logger.experiment.add_text(name, textwrap.indent(text, "    "), self._next)

    def state_dict(self) -> dict[str, Any]:
        """Return the first step that no logged row covers."""
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._next = int(state_dict["next"])


class LoggerError(RuntimeError):
    """Raised when an exception occurs in a logger."""

    def __init__(self, logger: RowLogger, error: BaseException) -> None:
        self.logger, self.error = logger, error
        inner = getattr(logger, "logger", None)  # TorchRL logger
        name = type(logger if inner is None else inner).__name__
        what = " ".join(f"{type(error).__name__}: {error}".split())
        super().__init__(f"logger {name} raised {what}{place_of(error)}")


@contextlib.contextmanager
def named_in_errors(logger: RowLogger) -> Iterator[None]:
    """Convert exceptions from third-party loggers to LoggerError."""
    try:
        yield
    except (SettingError, WriteError, LoggerError):
        raise
    except Exception as error:
        raise LoggerError(logger, error) from error


LOGGERS = ("csv", "wandb", "tensorboard", "none")


def make_loggers(
    names: str | Sequence[str], folder: Path | str, *, run_name: str = ""
) -> list[RowLogger]:
    """Create loggers by name. A :class:`CsvLogger` is always included.

    Args:
        names: names from ``LOGGERS``, as a sequence or a comma-separated string.
        folder: run folder.
        run_name: name of the run in W&B, unless ``WANDB_NAME`` is set.

    Raises:
        SettingError: if a name is unknown.
    """
    wanted = names.split(",") if isinstance(names, str) else list(names)
    loggers: list[RowLogger] = [CsvLogger(folder)]
    for name in dict.fromkeys(entry.strip().lower() for entry in wanted):
        if name == "wandb":
            named = os.environ.get("WANDB_NAME") or run_name or None
            loggers.append(WandbLogger(folder, name=named))
        elif name == "tensorboard":
            loggers.append(TensorBoardLogger(folder))
        elif name:
            one_of("logger", name, LOGGERS)
    return loggers
