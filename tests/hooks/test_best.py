"""The policy of the best evaluation is kept, resumed and evaluated."""

from __future__ import annotations

import math

import pytest
import torch

import recipes.bc
import recipes.dqn
import recipes.ppo
from kit.evaluate import SavedRun, main
from kit.experiment import EnvConfig
from kit.hooks import BestPolicy
from kit.steps import StepPlan
from kit.steps.settings import OfflineSteps, OffPolicySteps, OnPolicySteps
from kit.trainer import Trainer
from tests.errors import raises_setting
from tests.short_runs import tiny_config
from tests.stored import NAMES, read_stored
from tests.tiny import on_policy_plan, ppo_parts, ppo_trainer, weights


def told(hook: BestPolicy, values: list[float | None], **trainer):
    """Run four iterations that log these values; return the trainer and its weights after each."""
    made = ppo_trainer(on_policy_plan(), log_every=16, hooks=[hook], **trainer)
    given, after = iter(values), []

    def tell(_):
        value = next(given)
        after.append({name: value.clone() for name, value in weights(made).items()})
        return None if value is None else {"score": value}

    made.register_op("post_steps_log", tell)
    made.run()
    return made, after


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("max", [3.0, 1.0, 3.0, 2.0], 2),  # of equals the latest
        ("max", [1.0, 3.0, 2.0, 2.9], 1),
        ("min", [1.0, 3.0, 0.0, 3.0], 2),
        ("max", [None, 1.0, None, 0.5], 1),
        ("max", [math.nan, -2.0, math.nan, -3.0], 1),
        ("min", [math.nan, 2.0, math.nan, 3.0], 1),
    ],
)
def test_restore_loads_weights_of_best_value(mode, values, best):
    hook = BestPolicy("score", mode=mode)
    trainer, after = told(hook, values)
    assert hook.value == values[best]
    assert hook.policy_steps == (best + 1) * trainer.plan.frames_per_batch
    last = weights(trainer)
    assert any(not torch.equal(last[name], after[best][name]) for name in last)
    hook.restore()
    assert all(torch.equal(value, after[best][name]) for name, value in weights(trainer).items())


def test_restored_weights_do_not_alias_best_weights():
    hook = BestPolicy("score")
    trainer, after = told(hook, [3.0, 1.0, 1.0, 1.0])
    for _ in range(2):
        hook.restore()
        assert torch.equal(next(iter(weights(trainer).values())), next(iter(after[0].values())))
        with torch.no_grad():
            for value in weights(trainer).values():
                value.zero_()


def test_unknown_metric_warning_suggests_nearest_column(tmp_path):
    config = tiny_config(tmp_path, log_dir=None, keep_best=False)
    trainer = recipes.ppo.build(config, hooks=[BestPolicy("evaluation/retrun")])
    with pytest.warns(UserWarning, match=r"the metric 'evaluation/retrun'.*'evaluation/return'"):
        trainer.run()


def test_best_policy_allows_run_without_training():
    plan = StepPlan(total_policy_steps=64, num_envs=2, steps_per_env=8, final_evaluation=False)
    collector = ppo_parts(on_policy_plan(num_envs=2, steps_per_env=8))["collector"]
    hook = BestPolicy("iterations")
    Trainer(plan, collector=collector, hooks=[hook], log_every=16, progress=False).run()
    hook.restore()
    assert hook.value == 4


def test_best_policy_rejects_unknown_mode():
    with raises_setting("mode"):
        BestPolicy(mode="most")


# ---------------------------------------------------------------------- in recipes
def ppo(tmp_path, steps=256, **settings):
    return recipes.ppo.Config(
        env=EnvConfig(num_envs=2, normalize_observation=True),
        steps=OnPolicySteps(
            total_policy_steps=steps, steps_per_env=16, update_epochs=2, minibatch_size=32,
            evaluation_every=32, evaluation_episodes=3,
        ),
        learning_rate=0.05, hidden_sizes=[8], log_dir=str(tmp_path), progress=False, **settings,
    )  # fmt: skip


def returns(folder):
    """Returns of evaluations by policy steps."""
    header, *rows = ((folder / "metrics.csv").read_text()).splitlines()
    names = header.split(",")
    found = [dict(zip(names, row.split(","))) for row in rows]
    return {
        int(row["policy_steps"]): float(row["evaluation/return"])
        for row in found
        if row["evaluation/return"]
    }


def test_saved_run_evaluates_policy_of_best_evaluation(tmp_path, capsys):
    trainer = recipes.ppo.build(ppo(tmp_path))
    trainer.run()
    found = returns(trainer.folder)
    best = max(found, key=lambda steps: (found[steps], steps))
    assert best < 256, "or the last one is the best, and nothing is shown"
    saved = SavedRun(trainer.folder, best=True)
    assert saved.policy_steps == best
    number = sorted(found).index(best)
    evaluator = saved.trainer.evaluate
    assert evaluator(number)["evaluation/return"] == found[best], "with its normalisation"
    saved.close()
    main([str(trainer.folder), "--best", "--episodes", "2"])
    assert f"after {best} policy steps" in capsys.readouterr().out


def test_resumed_run_restores_best_policy(tmp_path):
    whole = recipes.ppo.build(ppo(tmp_path / "whole"))
    whole.run()
    stopped = recipes.ppo.build(ppo(tmp_path / "stopped"))
    stopped.register_op("post_steps", lambda: stopped.ledger.iterations < 4 or stop(stopped))
    stopped.run()
    again = recipes.ppo.build(ppo(tmp_path / "stopped", resume=str(stopped.folder)))
    again.run()
    one, other = (trainer.registered_modules["best_policy"] for trainer in (whole, again))
    assert (one.value, one.policy_steps) == (other.value, other.policy_steps)
    one.restore(), other.restore()
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(again)[name])


def stop(trainer):
    trainer.request_stop("enough")


def test_offline_best_policy_reports_gradient_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("kit.experiment.read_datasets", read_stored)
    config = recipes.bc.Config(
        steps=OfflineSteps(
            gradient_steps=60, gradient_steps_per_iteration=10, minibatch_size=8,
            evaluation_every=10, evaluation_episodes=1,
        ),
        dataset=NAMES, hidden_sizes=[8], log_dir=str(tmp_path), learning_rate=0.1, seed=1,
    )  # fmt: skip
    config.env.max_episode_steps = 15
    trainer = recipes.bc.build(config)
    trainer.run()
    kept = trainer.registered_modules["best_policy"]
    assert 0 < kept.gradient_steps < 60, "or the last one is the best, and nothing is shown"
    said = f"after {kept.gradient_steps} gradient steps"
    assert said in capsys.readouterr().out
    main([str(trainer.folder), "--best", "--episodes", "1"])
    assert f"{said}, deterministic actions" in capsys.readouterr().out


def test_evaluate_rejects_best_when_not_saved(tmp_path, capsys):
    config = recipes.dqn.Config(
        steps=OffPolicySteps(
            total_policy_steps=64, steps_per_env=1, learning_starts=32, minibatch_size=8,
            evaluation_every=None,
        ),
        hidden_sizes=[8], log_dir=str(tmp_path), progress=False, keep_best=False,
    )  # fmt: skip
    trainer = recipes.dqn.build(config)
    trainer.run()
    with pytest.raises(SystemExit):
        main([str(trainer.folder), "--best"])
    assert "this run kept none" in capsys.readouterr().err


def test_user_hook_replaces_best_policy_of_recipe(tmp_path):
    mine = BestPolicy("train/loss_objective", mode="min")
    trainer = recipes.ppo.build(ppo(tmp_path, steps=64), hooks=[mine])
    assert trainer.registered_modules["best_policy"] is mine
    trainer.run()
    assert mine.value is not None
