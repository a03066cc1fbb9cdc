"""A trainer without a collector trains on stored transitions, counted by gradient steps."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console as RichConsole
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.objectives import IQLLoss, SoftUpdate
from torchrl.record.loggers.csv import CSVLogger
from torchrl.trainers import LogScalar

from kit.collectors import VectorCollector
from kit.envs import make_env
from kit.hooks import AnnealLearningRate, Console, Evaluator, LearningCurve
from kit.logging.loggers import CsvLogger, TorchRLLogger
from kit.modules import make_action_value, make_actor, make_value
from kit.steps import Linear, StepPlan
from kit.trainer import Trainer
from kit.update import Update
from tests.errors import raises_setting
from tests.tiny import Rows, on_policy_plan, ppo_parts, weights


def offline_plan(**changes: Any) -> StepPlan:
    """Five iterations of ten gradient steps."""
    settings = {
        "iterations": 5, "steps_per_env": 0, "gradient_steps_per_iteration": 10,
        "minibatch_size": 8, "final_evaluation": False,
    }  # fmt: skip
    return StepPlan(**{**settings, **changes})


def stored_transitions(rows: int = 200) -> TensorDictReplayBuffer:
    """Transitions of random actions."""
    collector = VectorCollector(make_env("Pendulum-v1", 1, seed=7), None, frames_per_batch=rows)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=8)
    buffer.extend(next(iter(collector)).reshape(-1).exclude("collector"))
    collector.shutdown()
    return buffer


def iql_parts(seed: int = 0) -> dict[str, Any]:
    """The parts of a small implicit Q-learning, by the name of the trainer's argument."""
    buffer = stored_transitions()
    torch.manual_seed(seed)
    env = make_env("Pendulum-v1", 1)
    actor = make_actor(env, (8,), continuous="tanh_normal", orthogonal=False)
    loss = IQLLoss(actor, make_action_value(env, (8,)), make_value(env, (8,)))
    loss.make_value_estimator(gamma=0.99)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    update = Update(loss, optimizer, target_updater=SoftUpdate(loss, tau=0.005))
    return {"collector": None, "buffer": buffer, "update": update, "progress": False}


# ---------------------------------------------------------------------- counting
def test_ledger_matches_plan_without_policy_steps():
    plan = offline_plan(pretrain_steps=3)
    trainer = Trainer(plan, **iql_parts())
    before = weights(trainer)
    ledger = trainer.run()
    assert (ledger.iterations, ledger.policy_steps, ledger.env_steps) == (5, 0, 0)
    assert (ledger.gradient_steps, ledger.samples) == (53, 53 * 8)
    assert ledger.compare(plan) == []
    after = weights(trainer)
    assert any(not torch.equal(after[name], before[name]) for name in before)


def test_rows_checkpoints_and_evaluations_follow_gradient_steps(tmp_path):
    plan, rows, parts = (
        offline_plan(evaluation_every=20, evaluation_episodes=1),
        Rows(),
        iql_parts(),
    )
    evaluate = Evaluator(
        make_env("Pendulum-v1", 1, max_episode_steps=5), parts["update"].loss_module.actor_network,
        episodes=1,
    )  # fmt: skip
    trainer = Trainer(
        plan, **parts, evaluate=evaluate, logger=rows, log_every=30, checkpoint_every=20,
        folder=tmp_path,
    )  # fmt: skip
    saved: list[int] = []
    save = trainer.save
    trainer.save = lambda: saved.append(trainer.ledger.gradient_steps) or save()
    trainer.run()
    assert [row["gradient_steps"] for row in rows.rows] == [20, 30, 40, 50]
    evaluated = [row["gradient_steps"] for row in rows.rows if "evaluation/return" in row]
    assert evaluated == [20, 40]
    assert saved == [20, 40, 50]
    assert "50" in trainer.last_checkpoint.name


def test_schedule_counts_gradient_steps_and_rejects_policy_steps():
    parts = iql_parts()
    (optimizer,) = parts["update"].optimizers.values()
    falling = Linear(1.0, 0.0, 100)
    trainer = Trainer(offline_plan(), **parts, hooks=[AnnealLearningRate(optimizer, falling)])
    trainer.run()
    assert optimizer.param_groups[0]["lr"] == 0.5
    trainer = Trainer(offline_plan(), **iql_parts())
    for schedule in (falling, "linear"):
        with raises_setting("counter"):
            trainer.add(AnnealLearningRate(optimizer, schedule, counter="policy_steps"))


# ---------------------------------------------------------------------- what is shown
def test_loggers_and_curve_use_gradient_steps_as_axis(tmp_path, monkeypatch):
    drawn: list[Axes] = []
    subplots = Figure.subplots
    monkeypatch.setattr(Figure, "subplots", lambda self: drawn.append(subplots(self)) or drawn[-1])
    loggers = [CsvLogger(tmp_path), TorchRLLogger(CSVLogger("here", log_dir=str(tmp_path)))]
    trainer = Trainer(
        offline_plan(), **iql_parts(), logger=loggers, hooks=[LearningCurve(tmp_path)], log_every=10
    )
    trainer.register_op(
        "post_steps_log", lambda _: {"evaluation/return": 1, "evaluation/return_std": 0}
    )
    trainer.run()
    steps = [10, 20, 30, 40, 50]
    (curve,) = drawn
    assert curve.get_lines()[0].get_xdata().tolist() == steps
    assert curve.get_xlabel() == "gradient steps"
    (scalars,) = tmp_path.glob("here/scalars/evaluation/return.csv")
    assert [int(line.split(",")[0]) for line in scalars.read_text().split()] == steps
    times = (tmp_path / "times.csv").read_text().splitlines()
    assert times[0].startswith("gradient_steps,time/seconds,time/gradient_steps_per_second")
    assert [int(line.split(",")[0]) for line in times[1:]] == steps


@pytest.mark.parametrize("terminal", [False, True])
def test_console_reports_progress_in_gradient_steps(terminal):
    console, stream = Console(), io.StringIO()
    console.console = RichConsole(file=stream, force_terminal=terminal, width=200, soft_wrap=True)
    Trainer(offline_plan(), **iql_parts(), hooks=[console], log_every=10).run()
    lines = [line.split() for line in stream.getvalue().splitlines() if "% " in line]
    if terminal:
        assert "50 gradient steps" in stream.getvalue()
        assert "100%" in stream.getvalue()
    else:
        assert [line[0] for line in lines] == ["10", "20", "30", "40", "50"]
        assert [line[3] for line in lines] == ["20%", "40%", "60%", "80%", "100%"]
    assert "policy steps/s" not in stream.getvalue()
    assert "gradient steps/s" in stream.getvalue()


# ---------------------------------------------------------------------- what is refused
def test_trainer_requires_collector_when_plan_collects():
    online = on_policy_plan()
    collecting = ppo_parts(online)
    with raises_setting("collector"):
        Trainer(online, **{**collecting, "collector": None})


def test_trainer_rejects_hook_on_collected_batches():
    with raises_setting("stage"):
        Trainer(offline_plan(), **iql_parts(), hooks=[LogScalar(("next", "reward"))])
