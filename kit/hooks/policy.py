"""Hooks that keep the best evaluated policy and save the final policy."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from kit.hooks.base import HookedTrainer, KitHook
from kit.logging.files import as_folder, make_folder, write_whole
from kit.logging.loggers import RowLogger
from kit.steps.errors import SettingError, nearest_first, one_of


class BestPolicy(KitHook):
    """Keeps the weights and normalisation statistics of the best evaluation so far.

    On ties, the latest evaluation wins, because early policies may reach the maximum return by
    chance in a few episodes. Checkpoints contain the best policy, so a resumed run keeps it. Play
    the best policy with ``kit evaluate RUN --best``, or copy it into the trainer with
    :meth:`restore`.

    Args:
        metric: name of a metrics column that evaluations report.
        mode: whether larger (``max``) or smaller (``min``) values are better.

    Attributes:
        value: best value of the metric; ``None`` before the first evaluation.
        policy_steps: policy steps at the best evaluation.
        gradient_steps: gradient steps at the best evaluation.
        states: state dicts of the best policy, keyed by component name.
    """

    operations: ClassVar = {"log_row": "look", "shutdown": "end"}
    saved = ("value", "policy_steps", "gradient_steps", "states")

    def __init__(
        self, metric: str = "evaluation/return", *, mode: Literal["max", "min"] = "max"
    ) -> None:
        self.metric, self.mode = metric, one_of("mode", mode, ("max", "min"))
        self.value: float | None = None
        self.policy_steps = self.gradient_steps = 0
        self.states: dict[str, Any] = {}
        self._columns: set[str] = set()

    def end(self) -> None:
        """Warn if no evaluation reported the metric."""
        if self.value is None and self._columns:
            near = nearest_first(self.metric, sorted(self._columns))[0]
            what = f"BestPolicy never found the metric {self.metric!r}, so no policy was kept"
            warnings.warn(f"{what}. The most similar column is {near!r}.", stacklevel=2)

    def look(self, row: dict[str, Any]) -> None:
        """Keep the current policy if the row's evaluation equals or beats the best one so far."""
        value = row.get(self.metric)
        if value is None and any(name.startswith("evaluation/") for name in row):
            self._columns |= row.keys()
        if value is None or not self._is_better(float(value)):
            return
        self.value = float(value)
        self.policy_steps, self.gradient_steps = row["policy_steps"], row["gradient_steps"]
        parts = self.trainer.policy_parts()
        self.states = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return value == value  # NaN is never kept as the best value
        return value >= self.value if self.mode == "max" else value <= self.value

    def restore(self) -> None:
        """Load the weights and statistics of the best evaluation into the trainer's components.

        Raises:
            SettingError: if no policy has been evaluated, or the trainer has other components.
        """
        parts = self.trainer.policy_parts()
        if parts.keys() != self.states.keys():
            reason = (
                f"has the components {sorted(self.states)}, but the trainer has {sorted(parts)}"
            )
            raise SettingError("best", self.metric, reason, "build a trainer with these components")
        for name, part in parts.items():
            part.load_state_dict(copy.deepcopy(self.states[name]))


class SavePolicy(KitHook):
    """Saves the policy to a folder at the end of a run and passes the folder to the loggers.

    The folder contains the config, and the last and best weights with their normalisation
    statistics. The folder omits the replay buffer, optimiser and metrics, so it is small enough to
    share. ``kit evaluate``, ``SavedRun`` and ``init_from`` accept the folder like a run folder. W&B
    stores the folder as a model. A failed run writes no folder, and a resumed run overwrites it.
    """

    # "setup" is needed for a resumed run that has already finished and writes no checkpoint.
    operations: ClassVar = {"setup": "write_last", "save": "write_last"}

    def __init__(self, folder: Path | str) -> None:
        self.folder = as_folder(folder)

    def register(self, trainer: HookedTrainer, name: str | None = None) -> None:
        """Register with a trainer that writes checkpoints.

        Raises:
            SettingError: if the run has no folder, and therefore no checkpoints.
        """
        super().register(trainer, name)
        if trainer.folder is None:
            reason = "is written with the last checkpoint, but this run has no run folder"
            raise SettingError(
                "SavePolicy", str(self.folder), reason, "pass the trainer folder=..."
            )

    def write_last(self) -> None:
        """Write the policy folder if the run has ended.

        Raises:
            WriteError: if the folder cannot be written.
        """
        trainer = self.trainer
        if not (trainer.schedule.done or trainer.stop_reason):
            return
        make_folder(self.folder)
        settings = yaml.safe_dump(trainer.config, sort_keys=False, allow_unicode=True)
        write_whole(self.folder / "config.yaml", settings)
        trainer.save_policy(self.folder)
        for logger in trainer.journal.loggers:
            if isinstance(logger, RowLogger):
                logger.log_policy(self.folder, trainer.ledger.counters())
