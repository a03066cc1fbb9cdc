"""Every stage runs, in order, as documented; what could never run is refused."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.optim import SGD, Adam
from torchrl.trainers import DefaultOptimizationStepper
from torchrl.trainers import Trainer as TorchRLTrainer

import recipes.crossq
import recipes.td3
from kit.config.plain import from_plain
from kit.envs.episodes import Episode
from kit.hooks import AnnealLearningRate, TargetKL
from kit.logging.metrics_recorder import episode_columns
from kit.steps.schedules import Constant
from kit.trainer import Trainer
from kit.trainer.stages import STAGES, HookError
from kit.update import Update
from tests.errors import raises_setting
from tests.fuzz.random_configs import small_config
from tests.tiny import (
    Rows,
    assert_equal,
    off_policy_plan,
    on_policy_plan,
    ppo_parts,
    ppo_trainer,
    sac_trainer,
    weights,
)

TORCHRL_STAGES = [
    "setup", "batch_process", "pre_steps_log", "pre_optim_steps", "pre_epoch_log", "pre_epoch",
    "process_optim_batch", "process_loss", "optimizer", "post_loss", "post_optim",
    "post_optim_log", "post_epoch_log", "post_epoch", "post_optim_complete_log", "post_steps",
    "post_steps_log", "shutdown",
]  # fmt: skip
KIT_STAGES = {
    "load", "pre_collect", "episodes", "post_backward", "evaluation", "log_row", "save",
    "post_save", "error",
}  # fmt: skip


def listen(trainer: Trainer, stages: list[str], seen: list) -> None:
    """Register an observer at each stage that notes the stage and what it is called with."""

    def note(stage, *arguments):
        seen.append((stage, *arguments))

    for stage in stages:
        trainer.register_op(stage, functools.partial(note, stage))


# ---------------------------------------------------------------------- when they run
def test_stages_extend_torchrl_stages():
    assert [name for name in STAGES if name not in KIT_STAGES] == TORCHRL_STAGES
    assert len(STAGES) == len(TORCHRL_STAGES) + len(KIT_STAGES)
    literal = TorchRLTrainer.register_op.__annotations__["dest"]
    assert all(
        f"'{name}'" in str(literal) or f'"{name}"' in str(literal) for name in TORCHRL_STAGES
    )


def test_stages_run_in_loop_order():
    plan = on_policy_plan(total_policy_steps=32)
    parts = ppo_parts(plan)
    trainer = Trainer(plan, **parts, log_every=16)
    seen: list = []
    others = [name for name in STAGES if name not in ("optimizer", "post_backward", "episodes")]
    listen(trainer, others, seen)
    optimizer = trainer.optimizer

    def step(losses, clip_grad_norm, clip_norm, index):
        seen.append(("optimizer", losses, clip_grad_norm, clip_norm, index))
        sum(v for k, v in losses.items() if k.startswith("loss")).backward()
        optimizer.step()
        optimizer.zero_grad()

    trainer.register_op("optimizer", step)
    trainer.run()
    gradient_step = [
        "process_optim_batch", "post_loss", "process_loss", "optimizer", "post_optim",
        "post_optim_log",
    ]  # fmt: skip
    epoch = ["pre_epoch_log", "pre_epoch", *gradient_step * 2, "post_epoch_log", "post_epoch"]
    iteration = [
        "pre_collect", "batch_process", "pre_steps_log", "pre_optim_steps", *epoch * 2,
        "post_optim_complete_log",
        "post_steps", "post_steps_log", "log_row",
    ]  # fmt: skip
    assert [name for name, *_ in seen] == ["setup", *iteration * 2, "shutdown"]


def test_stages_pass_documented_arguments():
    trainer = ppo_trainer()
    seen: list = []
    listen(trainer, [name for name in STAGES if name not in ("optimizer", "process_loss")], seen)
    trainer.run()
    called = {name: arguments for name, *arguments in seen}
    batches = ("batch_process", "pre_steps_log", "pre_epoch", "pre_epoch_log", "post_epoch_log",
               "post_steps_log")  # fmt: skip
    for name in batches:
        (batch,) = called[name]
        assert batch.shape == (2, 8), name
    for name in ("process_optim_batch", "post_loss", "post_optim_log"):
        (minibatch,) = called[name]
        assert minibatch.shape == (8,), name
        assert "advantage" in minibatch, name
    steps, means = called["post_optim_complete_log"]
    assert steps == 16
    assert isinstance(means, TensorDictBase)
    assert {"loss_objective", "loss_critic", "grad_norm"} <= set(means.keys())
    (row,) = called["log_row"]
    assert row["policy_steps"] == 64
    for name in ("setup", "pre_collect", "pre_optim_steps", "post_backward", "post_optim",
                 "post_epoch", "post_steps", "shutdown"):  # fmt: skip
        assert called[name] == []


def test_hook_added_during_run_receives_complete_minibatches():
    """Before, entries that the loss does not read were left out."""
    trainer, seen = sac_trainer(off_policy_plan()), []

    def later():
        if trainer.ledger.iterations == 30:
            trainer.register_op("process_optim_batch", seen.append)

    trainer.register_op("post_steps", later)
    trainer.run()
    assert len(seen) == 10
    for minibatch in seen:
        assert set(minibatch.keys(True, True)) >= set(trainer.buffer.buffer[:].keys(True, True))


def test_register_op_passes_keywords_to_every_call():
    trainer = ppo_trainer()
    seen = []
    trainer.register_op("post_steps", lambda *, factor: seen.append(factor), factor=3)
    trainer.run()
    assert seen == [3] * 4


def test_update_runs_only_pre_epoch_without_due_gradient_steps():
    trainer = sac_trainer(off_policy_plan(total_policy_steps=12))
    seen: list = []
    update_stages = [n for n, s in STAGES.items() if s.needs == "update"]
    listen(trainer, [n for n in update_stages if n not in ("optimizer", "process_loss")], seen)
    listen(trainer, ["post_steps", "post_steps_log"], seen)
    trainer.run()
    names = [name for name, *_ in seen]
    nothing_due = ["pre_epoch", "post_steps", "post_steps_log"]
    assert names[:27] == nothing_due * 9  # learning starts at the tenth step
    assert names.count("post_steps") == 12
    assert names.count("pre_optim_steps") == names.count("post_optim") == 3


# ---------------------------------------------------------------------- what they change
def test_batch_process_uses_returned_batch_and_ignores_none():
    trainer = ppo_trainer()
    rewards = []
    reward = ("next", "reward")
    trainer.register_op("batch_process", lambda b: b.clone().set(reward, b[reward] * 2))
    trainer.register_op("batch_process", lambda b: None)
    trainer.register_op("batch_process", lambda b: b.clone().set(reward, b[reward] + 1))
    trainer.register_op("pre_steps_log", lambda b: rewards.append(b[reward].unique().tolist()))
    trainer.run()
    assert rewards == [[3.0]] * 4


def test_process_loss_changes_losses_before_backward():
    plan = on_policy_plan()
    plain = Trainer(plan, **ppo_parts(plan))
    plain.run()
    same = Trainer(plan, **ppo_parts(plan))
    same.register_op("process_loss", lambda minibatch, losses: None)
    same.run()
    assert_equal(weights(plain), weights(same))
    without = Trainer(plan, **ppo_parts(plan))
    start = weights(without)

    def no_critic(minibatch, losses):
        assert minibatch.numel() == 8
        return losses.set("loss_critic", losses["loss_critic"] * 0)

    without.register_op("process_loss", no_critic)
    without.run()
    critic = [name for name in start if "critic" in name and "weight" in name]
    assert critic
    assert all(torch.equal(weights(without)[name], start[name]) for name in critic)


@pytest.mark.parametrize("recipe", [recipes.td3, recipes.crossq])
def test_process_loss_observer_does_not_change_delayed_updates(recipe):
    runs = []
    for stages in ([], ["process_loss"]):
        trainer, rows = recipe.build(from_plain(recipe.Config, small_config(recipe.Config))), Rows()
        trainer.journal.loggers.append(rows)
        listen(trainer, stages, [])
        trainer.run()
        metrics = {k: v for k, v in rows.rows[-1].items() if not k.startswith("time/")}
        runs.append((weights(trainer), metrics))
    (plain, plain_row), (seen, seen_row) = runs
    assert_equal(plain, seen)
    assert plain_row == seen_row


def test_process_loss_receives_all_accumulated_minibatches():
    plan = on_policy_plan(minibatch_size=6, minibatches_per_gradient_step=2)
    closed = Trainer(plan, **ppo_parts(plan))
    closed.run()
    opened = Trainer(plan, **ppo_parts(plan))
    sizes: list[int] = []
    opened.register_op("process_loss", lambda m, losses: sizes.append(m.numel()))
    opened.run()
    assert sizes == [6, 6, 4] * 2 * 4
    for name, value in weights(closed).items():
        torch.testing.assert_close(weights(opened)[name], value, rtol=1e-4, atol=1e-6)


def test_metrics_of_every_log_stage_reach_the_row():
    plan, rows = on_policy_plan(), Rows()
    trainer = Trainer(plan, **ppo_parts(plan), logger=rows, log_every=64)
    values = {
        "pre_steps_log": 1.0, "pre_epoch_log": 2, "post_optim_log": torch.tensor(3.0),
        "post_epoch_log": np.float32(4.0), "post_steps_log": np.int64(5),
    }  # fmt: skip
    for stage, value in values.items():
        trainer.register_op(stage, lambda batch, s=stage, v=value: {s: v, "log_pbar": True})
    trainer.register_op(
        "post_optim_complete_log",
        lambda n, means: {"steps_told": n, "mean_loss": means["loss_critic"]},
    )
    trainer.register_op("post_steps_log", lambda batch: TensorDict({"as_tensordict": 7.0}))
    trainer.run()
    (row,) = rows.rows
    for stage, value in values.items():
        assert row[stage] == float(value)
    assert row["steps_told"] == 16
    assert row["mean_loss"] > 0
    assert row["as_tensordict"] == 7.0
    assert "log_pbar" not in row


def test_rows_average_float_metrics_and_use_last_integer():
    plan, rows = on_policy_plan(), Rows()
    trainer = Trainer(plan, **ppo_parts(plan), logger=rows, log_every=32)
    count = iter(range(1, 5))
    trainer.register_op(
        "post_steps_log", lambda batch: {"float": float(n := next(count)), "whole": n}
    )
    trainer.run()
    assert [(row["float"], row["whole"]) for row in rows.rows] == [(1.5, 2), (3.5, 4)]


def test_recorder_copies_tensor_metrics_updated_in_place():
    plan, rows = on_policy_plan(), Rows()
    trainer = Trainer(plan, **ppo_parts(plan), logger=rows, log_every=32)
    with torch.inference_mode():
        count = torch.zeros(())

    @torch.inference_mode()
    def look(batch):
        return {"count": count.add_(1)}

    trainer.register_op("post_steps_log", look)
    trainer.run()
    assert [row["count"] for row in rows.rows] == [1.5, 3.5]


def test_rows_average_metrics_of_mixed_types():
    plan, rows = on_policy_plan(), Rows()
    trainer = Trainer(plan, **ppo_parts(plan), logger=rows, log_every=64)
    given = iter([0, 0.5, torch.tensor(0.75), 1])
    trainer.register_op("post_steps_log", lambda batch: {"mixed": next(given)})
    trainer.run()
    assert [row["mixed"] for row in rows.rows] == [0.5625]


def test_update_phase_metrics_average_its_own_gradient_steps():
    trainer = ppo_trainer(log_every=64)
    steps: list[float] = []
    phases: list[tuple[float, float]] = []
    trainer.register_op("post_optim", lambda: steps.append(float(trainer.last_metrics["ESS"])))
    trainer.register_op(
        "post_optim_complete_log",
        lambda n, means: phases.append((float(means["ESS"]), np.mean(steps[-4:]))),
    )
    trainer.run()
    told, wanted = zip(*phases)
    assert len(told) == 4
    assert told == pytest.approx(wanted)


@pytest.mark.parametrize("values", [(np.inf, -np.inf), (1e308, 1e308)])
def test_undefined_metric_means_become_nan(values):
    rows = Rows()
    trainer = ppo_trainer(on_policy_plan(total_policy_steps=32), logger=rows, log_every=32)
    given = iter(values)
    trainer.register_op("post_steps_log", lambda batch: {"of_a_hook": next(given)})
    trainer.run()
    assert np.isnan(rows.rows[0]["of_a_hook"])
    episodes = [Episode(0, 1.0, 1, 1, True, {"of_info": value}) for value in values]
    assert np.isnan(episode_columns(episodes)["episode/of_info"])


# ---------------------------------------------------------------------- gradients
def descend(loss: nn.Module, **settings: Any) -> Update:
    """An update whose steps show the gradients: descent with a learning rate of 1."""
    return Update(loss, SGD(loss.parameters(), lr=1.0, fused=True), **settings)


PATHS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "traced": ({}, {}, []),
    "eager": ({"compile": False}, {}, []),
    "accumulated": ({}, {"minibatches_per_gradient_step": 2}, []),
    "open": ({}, {}, ["process_loss"]),
}  # fmt: skip
"""Settings of the update, changes of the plan, and further stages with a hook."""


@pytest.mark.parametrize("path", PATHS)
def test_post_backward_hooks_read_and_change_gradients(path):
    settings, changes, stages = PATHS[path]
    plan = on_policy_plan(**changes)
    parts = ppo_parts(plan)
    loss = parts["update"].loss_module
    trainer = Trainer(plan, **{**parts, "update": descend(loss, **settings)})
    before, norms = {}, []

    def double():
        for parameter in loss.parameters():
            before[parameter] = parameter.detach().clone(), parameter.grad.clone()
            parameter.grad *= 2

    def compare():
        gradients = torch.cat([gradient.flatten() for _, gradient in before.values()])
        norms.append((trainer.last_metrics["grad_norm"], 2 * gradients.norm()))
        for parameter, (value, gradient) in before.items():
            assert torch.equal(parameter, value - 2 * gradient)
            assert parameter.grad is None

    trainer.register_op("post_backward", double)
    trainer.register_op("post_optim", compare)
    listen(trainer, stages, [])
    trainer.run()
    assert len(norms) == trainer.ledger.gradient_steps > 0
    torch.testing.assert_close(*map(torch.stack, zip(*norms)))


def test_post_backward_hooks_that_read_change_nothing():
    plan, runs, norms = on_policy_plan(), [], []

    def look(parameters):
        norms.append(torch.stack([parameter.grad.norm() for parameter in parameters]))

    for hooked in (False, True):
        parts = ppo_parts(plan)
        loss = parts["update"].loss_module
        update = Update(loss, Adam(loss.parameters(), fused=True), max_grad_norm=0.1)
        trainer = Trainer(plan, **{**parts, "update": update})
        if hooked:
            trainer.register_op("post_backward", functools.partial(look, [*loss.parameters()]))
        trainer.run()
        assert (((0,), "step") in update.traced_step.traced) != hooked
        runs.append(weights(trainer))
    assert_equal(*runs)
    assert len(norms) == trainer.ledger.gradient_steps


def test_post_backward_hooks_can_skip_parameter():
    trainer = ppo_trainer()
    first = next(trainer.loss_module.parameters())
    start = first.detach().clone()
    trainer.register_op("post_backward", lambda: setattr(first, "grad", None))
    trainer.run()
    assert torch.equal(first, start)


def test_run_rejects_post_backward_with_optimizer_hook():
    trainer = ppo_trainer()
    trainer.register_op("post_backward", lambda: None)
    trainer.register_op("optimizer", lambda *arguments: None)
    with raises_setting("stage"):
        trainer.run()


# ---------------------------------------------------------------------- the kit's own stages
def test_evaluation_hooks_receive_result_and_best_flag():
    plan = on_policy_plan(evaluation_every=16, evaluation_episodes=1, final_evaluation=True)
    returns, seen = iter([1.0, 3.0, float("nan"), 2.0, 3.0]), []

    def evaluate(number):
        return {"evaluation/return": next(returns)}

    evaluate.episodes, evaluate.close = 1, lambda: None
    trainer = ppo_trainer(plan, evaluate=evaluate)
    trainer.register_op("evaluation", lambda result, is_best: seen.append((result, is_best)))
    trainer.run()
    assert [is_best for _, is_best in seen] == [True, True, False, False, True][: len(seen)]
    assert [result["evaluation/return"] for result, _ in seen][:2] == [1.0, 3.0]
    assert len(seen) >= 4


def test_episodes_hooks_receive_each_episode_once(tmp_path):
    rows, seen = Rows(), []
    parts = {"logger": rows, "log_every": 48, "folder": tmp_path, "checkpoint_every": 32}
    trainer = ppo_trainer(on_policy_plan(total_policy_steps=96), **parts)
    trainer.register_op("episodes", lambda episodes: seen.extend(episodes))
    trainer.run()
    assert len(seen) == trainer.ledger.episodes > 1
    counts = [row["episodes"] for row in rows.rows]
    lengths = [row["episode/length"] for row in rows.rows]
    per_row = [now - before for now, before in zip(counts, [0, *counts])]
    assert sum(n * length for n, length in zip(per_row, lengths)) == pytest.approx(
        sum(episode.length for episode in seen)
    )


def test_row_after_resume_includes_episodes_before_checkpoint(tmp_path):
    plan = on_policy_plan(total_policy_steps=96)

    def trained(folder, stops, **parts):
        rows = Rows()
        trainer = ppo_trainer(plan, folder=folder, log_every=96, logger=rows, **parts)
        trainer.register_op("episodes", lambda episodes: None)
        if stops:
            trainer.register_op("post_save", lambda path: trainer.request_stop())
        trainer.run()
        return trainer.last_checkpoint, rows.rows[-1]

    _, plain = trained(tmp_path / "plain", stops=False)
    last, _ = trained(tmp_path / "again", stops=True, checkpoint_every=48)
    _, again = trained(tmp_path / "again", stops=False, resume_from=last)
    names = ("episode/return", "episode/return_std", "episodes")
    assert [plain[name] for name in names] == [again[name] for name in names]


def test_load_and_post_save_hooks_receive_checkpoint_path(tmp_path):
    plan, saved, loaded = on_policy_plan(), [], []
    trainer = ppo_trainer(plan, folder=tmp_path, checkpoint_every=16)
    trainer.register_op("load", loaded.append)
    trainer.register_op("post_save", lambda path: saved.append((path, path.exists())))
    trainer.run()
    assert (len(saved), saved[-1]) == (4, (trainer.last_checkpoint, True))
    assert loaded == []
    again = ppo_trainer(plan.replace(total_policy_steps=96), resume_from=saved[-1][0])
    again.register_op("setup", lambda: loaded.append("setup"))
    again.register_op("load", loaded.append)
    again.run()
    assert loaded == ["setup", saved[-1][0]]


def test_error_hooks_receive_error_that_ended_run():
    trainer, seen = ppo_trainer(), []
    trainer.register_op("post_steps", lambda: 1 / 0)
    trainer.register_op("error", seen.append)
    trainer.register_op("error", lambda error: [][1])
    trainer.register_op("shutdown", lambda: seen.append("shutdown"))
    with pytest.raises(HookError, match="ZeroDivisionError") as raised:
        trainer.run()
    assert seen == [raised.value, "shutdown"]
    assert "IndexError" in raised.value.__notes__[0]


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "stage", [name for name, stage in STAGES.items() if stage.needs == "update"]
)
def test_register_op_rejects_update_stage_without_update(stage):
    plan = on_policy_plan(update_epochs=None, minibatch_size=None)
    parts = ppo_parts(plan)
    del parts["update"], parts["advantage"]
    with raises_setting("stage"):
        Trainer(plan, **parts).register_op(stage, lambda *a: None)


def test_register_op_rejects_setup_after_run_starts():
    trainer = ppo_trainer()
    trainer.register_op("post_steps", lambda: trainer.register_op("setup", lambda: None))
    with pytest.raises(HookError, match="stage='setup' never runs"):
        trainer.run()


def test_hook_registered_during_setup_runs_in_setup():
    trainer, seen = ppo_trainer(), []
    trainer.register_op("setup", lambda: trainer.register_op("setup", lambda: seen.append(1)))
    trainer.run()
    assert seen == [1]


@pytest.mark.parametrize("stage", ["process_loss", "optimizer", "post_backward"])
def test_run_rejects_gradient_step_stages_with_torchrl_stepper(stage):
    plan = on_policy_plan()
    parts = ppo_parts(plan)
    update = parts.pop("update")
    trainer = Trainer(
        plan, **parts, update=DefaultOptimizationStepper(), loss_module=update.loss_module,
        optimizer=update.optimizers["optimizer"],
    )  # fmt: skip
    trainer.register_op(stage, lambda *arguments: None)
    with raises_setting("stage"):
        trainer.run()
    assert trainer.ledger.policy_steps == 0


@pytest.mark.parametrize(
    ("stage", "function"),
    [
        ("setup", lambda batch: None),
        ("post_steps", lambda batch: None),
        ("batch_process", lambda: None),
        ("pre_steps_log", lambda: {}),  # noqa: PIE807
        ("process_loss", lambda losses: losses),
        ("optimizer", lambda losses: losses),
        ("post_optim_complete_log", lambda steps: {}),
        ("log_row", lambda: None),
    ],
)
def test_register_op_rejects_incompatible_signature(stage, function):
    with raises_setting("hook"):
        ppo_trainer().register_op(stage, function)


def test_register_op_rejects_unexpected_keywords():
    with raises_setting("hook"):
        ppo_trainer().register_op("post_steps", lambda: None, factor=3)


def test_add_rejects_duplicate_hook_name():
    trainer = ppo_trainer(hooks=[TargetKL(0.1)])
    with raises_setting("hook"):
        trainer.add(TargetKL(0.2))
    trainer.add(TargetKL(0.2), "second_target_kl")
    optimizer = trainer.optimizer
    trainer.add(AnnealLearningRate(optimizer, Constant(1e-3)))
    with raises_setting("hook"):
        trainer.add(AnnealLearningRate(optimizer, Constant(1e-3)))
