"""Restart of a trainer, so that its plan can run again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit.collectors.episode import EpisodeCollector
from kit.collectors.plan_fit import Refusal
from kit.collectors.registry import step_counts
from kit.collectors.rollout import VectorCollector
from kit.hooks.evaluation import Evaluator
from kit.logging.metrics_recorder import MetricsRecorder
from kit.steps import RunSchedule, StepLedger
from kit.trainer.torchrl_batches import counted
from kit.update import Update


def in_restarted(folder: Path | None, collector: Any) -> Iterator[Refusal]:
    """Yield errors if a trainer's plan cannot be run again."""
    if folder is not None:
        reason = "contains the run so far, which another run would overwrite"
        hint = "use log_dir=null, or build another trainer with init_from"
        yield "folder", str(folder), reason, hint
    if not isinstance(collector, (VectorCollector, EpisodeCollector)):
        reason = "cannot start again"
        yield "collector", type(collector).__name__, reason, ["vector", "episode"]


def restart_parts(trainer: Any, seed: int) -> None:
    """Restart the counts, schedules, metrics, environments and the replay buffer of a trainer."""
    plan, before = trainer.plan, trainer.schedule
    periods = {"log_every": before.log_every, "checkpoint_every": before.checkpoint_every}
    trainer.schedule, trainer.ledger = RunSchedule(plan, **periods), StepLedger(plan.world_size)
    trainer.journal = MetricsRecorder(trainer.journal.loggers, plan.axis, trainer.ranks)
    counts = step_counts(plan)
    trainer.collector.begin_again(seed, counts["init_random_frames"])
    if isinstance(trainer.collector, EpisodeCollector):
        trainer.collector.prefill_random = counts.get("prefill_random", False)
    trainer.batches = counted(trainer.collector, plan)
    trainer.batches.evaluate = trainer.evaluate
    if isinstance(trainer.evaluate, Evaluator) and trainer.evaluate.env.is_closed:
        trainer.evaluate.env.reopen()
    if hasattr(trainer.buffer, "empty"):
        trainer.buffer.empty()
    if isinstance(trainer.update, Update):
        trainer.update.begin_run()
