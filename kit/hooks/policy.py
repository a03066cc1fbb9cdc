"""What is kept of a policy: that of the best evaluation, and the trained one alone at the end."""

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
    """Keeps the weights and the normalisation of the best evaluation so far; of equals, the latest.

    Where returns have a greatest value, a few episodes soon reach it by chance: of such policies
    the one that has learnt longest is kept. They are part of checkpoints, so that a resumed run
    goes on with them; ``python -m kit.evaluate RUN --best`` plays them. :meth:`restore` puts them
    in the place of the last ones.

    Args:
        metric: name of a column of the rows, of an evaluation.
        mode: whether more (``max``) or less (``min``) is better.

    Attributes:
        value: of the metric; ``None`` before the first evaluation.
        policy_steps: after which it was measured.
        gradient_steps: after which it was measured.
        states: of the best policy, by part.
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
        """Say that the metric was in no row of an evaluation, if it was in none."""
        if self.value is None and self._columns:
            near = nearest_first(self.metric, sorted(self._columns))[0]
            what = f"BestPolicy never found {self.metric!r}, so no policy was kept"
            warnings.warn(f"{what}; the column that is most like it is {near!r}", stacklevel=2)

    def look(self, row: dict[str, Any]) -> None:
        """Keep the policy if the row is of an evaluation that none before was better than."""
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
            return value == value  # NaN is never the best
        return value >= self.value if self.mode == "max" else value <= self.value

    def restore(self) -> None:
        """Give the trainer's networks and normaliser the states of the best evaluation.

        Raises:
            SettingError: if there has been no evaluation, or the trainer has other parts.
        """
        parts = self.trainer.policy_parts()
        if parts.keys() != self.states.keys():
            why = f"was kept with {sorted(self.states)}, and the trainer has {sorted(parts)}"
            raise SettingError("best", self.metric, why, "build the trainer as it was built then")
        for name, part in parts.items():
            part.load_state_dict(copy.deepcopy(self.states[name]))


class SavePolicy(KitHook):
    """Writes a folder with the policy alone at the end of a run, and gives it to the loggers.

    It has the settings of the run and the last and the best weights with their normalisation, but
    no replay buffer, optimiser or rows: small enough to be sent to somebody. ``python -m
    kit.evaluate``, ``SavedRun`` and ``init_from`` read it as they read a run folder; W&B keeps it
    as a model. A run that ends by an error writes none; one that is resumed writes it anew.
    """

    # A resumed run that has ended before, without this hook, has no checkpoint left to write.
    operations: ClassVar = {"setup": "write_last", "save": "write_last"}

    def __init__(self, folder: Path | str) -> None:
        self.folder = as_folder(folder)

    def register(self, trainer: HookedTrainer, name: str | None = None) -> None:
        """Take part in the last checkpoint of a run.

        Raises:
            SettingError: if the run has no folder, and therefore no checkpoints.
        """
        super().register(trainer, name)
        if trainer.folder is None:
            why = "is written with the last checkpoint, and this run has none"
            raise SettingError("SavePolicy", str(self.folder), why, "give the trainer a folder")

    def write_last(self) -> None:
        """Write the folder if the run has ended, with its last checkpoint.

        Raises:
            WriteError: if it cannot be written.
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
