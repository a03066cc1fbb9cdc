"""Errors of one rank end all ranks, and the others know who reports the error."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import __version__
from kit.distributed import RankError, Ranks
from kit.hooks import Hook
from kit.trainer import Trainer, meeting
from kit.trainer.checkpoint import Checkpoints
from tests.distributed.processes import run_ranks
from tests.distributed.test_requests import tiny_trainer

pytestmark = pytest.mark.slow


class Breaks(Hook):
    """Breaks the run on rank 1 in the second iteration."""

    kind = "step"

    def __init__(self, how: str) -> None:
        self.how = how

    def register(self, trainer: Any, name: str | None = None) -> None:
        super().register(trainer, name)
        trainer.register_op("post_optim", self.act)

    def act(self) -> None:
        trainer: Any = self.trainer
        if trainer.ranks.rank == 1 and trainer.ledger.iterations == 1:
            if self.how == "raises":
                raise ValueError("broken by rank 1")
            for weight in trainer.loss_module.parameters():
                weight.data.fill_(torch.nan)


def broken(ranks: Ranks, how: str, folder: Path | None) -> str:
    if how == "full disk" and ranks.rank == 1:

        def fails(self: Any, path: Path) -> Path:
            raise OSError(28, "No space left on device")

        Checkpoints._own = fails  # type: ignore[method-assign]
    hooks = [] if how == "full disk" else [Breaks(how)]
    trainer: Trainer = tiny_trainer(ranks, hooks, folder=folder)
    try:
        trainer.run()
    except Exception as error:
        is_shown = ranks.report(error) and not getattr(error, "reported", False)
        shutil.rmtree(folder / f"{ranks.rank}", ignore_errors=True) if folder else None
        return f"{type(error).__name__} {is_shown} {error}"
    return "no error"


@pytest.mark.parametrize(
    ("how", "expected"),
    [("raises", "HookError True hook Breaks.act"), ("full disk", "WriteError True")],
)
def test_only_rank_at_fault_shows_its_error(how, expected, tmp_path):
    other, at_fault = run_ranks(broken, 2, how, tmp_path)
    assert at_fault.startswith(expected)
    assert other.startswith("RankError False")
    if how == "full disk":
        assert not [*tmp_path.glob("checkpoints/checkpoint-*")]


def test_weights_that_become_nan_on_one_rank_end_the_run():
    first, second = run_ranks(broken, 2, "nan", None)
    assert first.startswith("NonFiniteError True")  # rank 0 has the metrics of all ranks
    assert second.startswith("RankError False")


def versioned(ranks: Ranks) -> str:
    if ranks.rank == 1:
        meeting.__version__ = "0.0.1"
    try:
        tiny_trainer(ranks).run()
    except (ValueError, RankError) as error:
        return str(error)
    return ""


def test_other_version_of_kit_is_rejected_with_both_versions():
    first, second = run_ranks(versioned, 2)
    assert first.startswith(f"kit='{__version__}' differs from 0.0.1 on rank 1")
    assert second.startswith("kit='0.0.1' differs from ")
