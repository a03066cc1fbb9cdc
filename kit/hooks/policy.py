"""The trained policy alone, without what a run needs to go on."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import yaml

from kit.hooks.base import Hook, HookedTrainer
from kit.logging.files import make_folder, write_whole
from kit.logging.loggers import RowLogger
from kit.steps import SettingError


class SavePolicy(Hook):
    """Writes a folder with the policy alone at the end of a run, and gives it to the loggers.

    It has the settings of the run and the last and the best weights with their normalisation, but
    no replay buffer, optimiser or rows: small enough to be sent to somebody. ``python -m
    kit.evaluate``, ``SavedRun`` and ``start_from`` read it as they read a run folder; W&B keeps it
    as a model. A run that ends by an error writes none; one that is resumed writes it anew.

    Args:
        folder: which is written.
    """

    operations: ClassVar = {"save": "write_last"}

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

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
        """Write the folder with the last checkpoint of the run.

        Raises:
            NotSaved: if it cannot be written.
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
