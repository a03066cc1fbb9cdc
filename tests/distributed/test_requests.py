"""Requests of one rank take effect on all ranks together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from kit.distributed import Ranks
from kit.hooks import Hook, StopWhen, TargetKL
from kit.trainer import Trainer
from tests.distributed.processes import run_ranks
from tests.tiny import on_policy_plan, ppo_parts


def tiny_trainer(ranks: Ranks, hooks: list[Any] = [], **changes: Any) -> Trainer:  # noqa: B006
    plan = on_policy_plan(total_policy_steps=64 * ranks.size, world_size=ranks.size)
    torch.manual_seed(ranks.rank)  # the networks of rank 0 count
    parts = ppo_parts(plan, total_frames=64)
    return Trainer(plan, **parts, ranks=ranks, hooks=hooks, log_every=64, **changes)


def outcome(trainer: Trainer) -> dict[str, Any]:
    trainer.run()
    ledger = trainer.ledger
    return {
        "iterations": ledger.iterations, "gradient_steps": ledger.local_gradient_steps,
        "skipped": ledger.local_skipped_gradient_steps, "log": trainer.ranks.log,
        "reason": trainer.stop_reason, "plan": ledger.compare(trainer.plan),
        "saved": trainer.checkpoints.saved_at, "row": dict(trainer.journal.latest),
    }  # fmt: skip


class Asks(Hook):
    """Makes a request on rank 1 in the second iteration."""

    kind = "step"

    def __init__(self, stage: str, request: str) -> None:
        self.stage, self.request = stage, request

    def register(self, trainer: Any, name: str | None = None) -> None:
        super().register(trainer, name)
        trainer.register_op(self.stage, self.ask)

    def ask(self, *_: Any) -> None:
        trainer: Any = self.trainer
        if trainer.ranks.rank == 1 and trainer.ledger.iterations == 1:
            getattr(trainer, self.request)()


def asked(ranks: Ranks, stage: str, request: str, folder: Path | None) -> dict[str, Any]:
    settings = {"folder": folder, "checkpoint_every": 128}
    return outcome(tiny_trainer(ranks, [Asks(stage, request)], **settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "iterations"), [("pre_collect", 2), ("post_epoch", 2), ("post_steps", 1)]
)
def test_stop_of_one_rank_stops_all_after_same_iteration(stage, iterations):
    first, second = run_ranks(asked, 2, stage, "request_stop", None)
    assert first["log"] == second["log"]
    assert first["iterations"] == second["iterations"] == iterations
    assert first["reason"] == second["reason"] == "a hook requested it"
    assert first["plan"] == second["plan"] == []


@pytest.mark.slow
def test_checkpoint_request_of_one_rank_saves_all(tmp_path):
    found = run_ranks(asked, 2, "post_optim", "request_checkpoint", tmp_path)
    assert found[0]["log"] == found[1]["log"]
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert checkpoints == ["checkpoint-000000000064", "checkpoint-000000000128"]
    assert all((tmp_path / "checkpoints" / name / "rank-00001").is_dir() for name in checkpoints)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["post_optim", "post_epoch"])
def test_skip_of_one_rank_skips_same_gradient_steps_on_all(stage):
    first, second = run_ranks(asked, 2, stage, "skip_rest_of_update", None)
    assert first["log"] == second["log"]
    assert first["skipped"] == second["skipped"] == 2
    assert first["plan"] == second["plan"] == []


def diverged(ranks: Ranks) -> dict[str, Any]:
    trainer = tiny_trainer(ranks, [TargetKL(0.1)])

    def pretend() -> None:
        trainer.last_metrics = {"kl_approx": torch.tensor([0.0, 0.4][ranks.rank])}

    trainer.stages.register("post_optim", pretend)
    return outcome(trainer)


@pytest.mark.slow
def test_target_kl_uses_mean_over_ranks():
    first, second = run_ranks(diverged, 2)
    assert first["skipped"] == second["skipped"] == 8  # mean 0.2 > 1.5 * 0.1


class SkipsSecondEpoch(Hook):
    """Ends each update phase after its first epoch, on rank 1."""

    kind = "step"
    operations: ClassVar = {"post_epoch": "skip"}

    def skip(self) -> None:
        trainer: Any = self.trainer
        if trainer.ranks.rank == 1:
            trainer.skip_rest_of_update()


def resumed(ranks: Ranks, folder: Path) -> dict[str, Any]:
    stop = Asks("post_optim", "request_stop")
    first = tiny_trainer(ranks, [SkipsSecondEpoch(), stop], folder=folder)
    first.run()
    again = {"folder": folder, "resume_from": first.last_checkpoint}
    return outcome(tiny_trainer(ranks, [SkipsSecondEpoch()], **again))


@pytest.mark.slow
def test_resumed_ranks_skip_updates_from_first_iteration_on(tmp_path):
    first, second = run_ranks(resumed, 2, tmp_path)
    assert first["iterations"] == 4
    assert first["skipped"] == second["skipped"] == 8  # 2 of 4 gradient steps in each iteration


def stopped_by_row(ranks: Ranks) -> dict[str, Any]:
    return outcome(tiny_trainer(ranks, [StopWhen("episode/return", reached=0.0)]))


@pytest.mark.slow
def test_row_has_metrics_of_all_ranks():
    first, second = run_ranks(stopped_by_row, 2)
    assert first["iterations"] == second["iterations"]
    ignored = {name for name in first["row"] if name.startswith(("time/", "local_"))}
    rows = [{k: v for k, v in one["row"].items() if k not in ignored} for one in (first, second)]
    assert rows[0] == rows[1]
    row = first["row"]
    assert row["env_steps"] == first["row"]["local_env_steps"] + second["row"]["local_env_steps"]
    assert row["episodes"] == first["row"]["local_episodes"] + second["row"]["local_episodes"]


def evaluated_long(ranks: Ranks) -> float:
    trainer = tiny_trainer(ranks)
    ranks.wait("start")
    began = time.monotonic()

    def slow_evaluation(number: int) -> dict[str, float]:
        time.sleep(6.0)
        return {"evaluation/return": float(number)}

    trainer.evaluate = slow_evaluation  # type: ignore[assignment]
    slow_evaluation.episodes = 1  # type: ignore[attr-defined]
    trainer.evaluations(1)
    return time.monotonic() - began


@pytest.mark.slow
def test_evaluation_may_take_longer_than_timeout():
    assert min(run_ranks(evaluated_long, 2, timeout=5.0)) >= 6.0


def drifted(ranks: Ranks) -> str:
    trainer = tiny_trainer(ranks)
    buffer = torch.full((2,), float(ranks.rank))
    trainer.loss_module.register_buffer("drift", torch.zeros(2))
    trainer.register_op("post_optim", lambda: trainer.loss_module.drift.copy_(buffer))
    try:
        trainer.run()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_difference_between_ranks_ends_run_and_names_tensor():
    for message in run_ranks(drifted, 2):
        assert message.startswith("loss_module.drift differs between rank 0 and rank 1")
