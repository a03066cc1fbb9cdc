"""Hooks that end a run, or an update phase, say why and end it where they should."""

from __future__ import annotations

import math

import pytest
import torch

import kit.hooks.guards
from kit.hooks import NaNGuard, NonFiniteError, StopWhen, TargetKL, TimeLimit
from tests.errors import raises_setting
from tests.tiny import on_policy_plan, ppo_trainer


def stopped_after(hook, values: list[float | None], name: str = "score") -> tuple[int, str | None]:
    """Run four iterations that log these values; return how many ran and the reason to stop."""
    trainer = ppo_trainer(on_policy_plan(), log_every=16, hooks=[hook])
    given = iter(values)

    def tell(_):
        value = next(given)
        return None if value is None else {name: value}

    trainer.register_op("post_steps_log", tell)
    trainer.run()
    return trainer.ledger.iterations, trainer.stop_reason


# ---------------------------------------------------------------------- StopWhen
@pytest.mark.parametrize(
    ("settings", "values", "iterations", "reason"),
    [
        ({"reached": 5.0}, [1.0, 5.0, 9.0, 9.0], 2, "score reached 5"),
        ({"reached": 5.0}, [1.0, None, 4.9, 4.0], 4, None),
        ({"reached": 5.0, "mode": "min"}, [9.0, 7.0, 5.0, 1.0], 3, "score reached 5"),
        ({"patience": 1}, [1.0, 2.0, 2.0, 9.0], 3, "score has not been better than 2 for 1 rows"),
        ({"patience": 2}, [3.0, 1.0, 2.0, 9.0], 3, "score has not been better than 3 for 2 rows"),
        ({"patience": 2}, [3.0, None, None, None], 4, None),
        ({"patience": 2}, [3.0, 2.0, 4.0, 3.0], 4, None),
        ({"patience": 1, "mode": "min"}, [3.0, 2.0, 2.5, 1.0], 3,
         "score has not been better than 2 for 1 rows"),
        ({"patience": 2}, [math.nan, 1.0, 2.0, 3.0], 4, None),
        ({"patience": 2, "mode": "min"}, [math.nan, 3.0, 2.0, math.nan], 4, None),
        ({"patience": 1}, [1.0, math.nan, 2.0, 3.0], 2,
         "score has not been better than 1 for 1 rows"),
    ],
)  # fmt: skip
def test_stop_when_ends_run_on_target_or_lack_of_improvement(settings, values, iterations, reason):
    assert stopped_after(StopWhen("score", **settings), values) == (iterations, reason)


def test_stop_when_restores_best_value_after_resume():
    first = StopWhen("score", patience=3)
    for value in (4.0, 3.0):
        first.look({"score": value})
    second = StopWhen("score", patience=3)
    second.load_state_dict(first.state_dict())
    assert (second.best, second.waited) == (4.0, 1)


def test_stop_when_rejects_missing_condition():
    with raises_setting("reached"):
        StopWhen("score")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("reached", "5"),
        ("reached", math.nan),
        ("patience", "3"),
        ("patience", 2.5),
        ("patience", 0),
    ],
)
def test_stop_when_rejects_invalid_reached_or_patience(setting, value):
    with raises_setting(setting):
        StopWhen("score", **{setting: value})


# ---------------------------------------------------------------------- TimeLimit
def test_stop_when_rejects_unknown_mode():
    with raises_setting("mode"):
        StopWhen(reached=1.0, mode="maximum")


def test_time_limit_stops_run_after_current_iteration(monkeypatch):
    clock = iter(range(0, 1_000, 10))
    monkeypatch.setattr(kit.hooks.guards.time, "monotonic", lambda: next(clock))
    limit = TimeLimit(15)
    trainer = ppo_trainer(on_policy_plan(), hooks=[limit])
    trainer.run()
    assert trainer.ledger.iterations == 2  # seen after 10 and after 20 seconds
    assert trainer.stop_reason == "the time limit of 15 seconds was reached"


def test_stopping_hooks_have_kind_step():
    guards = TimeLimit(15), StopWhen(reached=1.0), TargetKL(0.1)
    assert {guard.kind for guard in guards} == {"step"}  # as docs/hooks.md says


# ---------------------------------------------------------------------- NaNGuard
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_guard_names_non_finite_losses_first(bad):
    trainer = ppo_trainer(on_policy_plan(), hooks=[NaNGuard()])
    row = {
        "gradient_steps": 1_234, "train/loss_critic": bad, "train/entropy": math.nan,
        "train/loss_objective": 1.0,
    }  # fmt: skip
    with pytest.raises(NonFiniteError) as raised:
        trainer.stages.fire("log_row", row)
    assert str(raised.value).startswith(
        f"after 1,234 gradient steps loss_critic is {bad}. No checkpoint was saved. Try a smaller"
    )


def test_nan_guard_names_other_metrics_when_losses_are_finite():
    trainer = ppo_trainer(on_policy_plan(), hooks=[NaNGuard()])
    with pytest.raises(NonFiniteError, match="after 1 gradient steps entropy is nan"):
        trainer.stages.fire(
            "log_row", {"gradient_steps": 1, "train/entropy": math.nan, "train/loss_a": 0.0}
        )


def test_nan_guard_checks_only_training_metrics():
    trainer = ppo_trainer(on_policy_plan(), hooks=[NaNGuard()])
    trainer.stages.fire("log_row", {"gradient_steps": 1, "mine": math.nan, "train/loss_a": 0.0})


# ---------------------------------------------------------------------- TargetKL
@pytest.mark.parametrize(("target", "epochs"), [(1e-12, 1), (1e6, 2)])
def test_target_kl_skips_rest_of_update(target, epochs):
    trainer = ppo_trainer(on_policy_plan(), hooks=[TargetKL(target, metric="loss_critic")])
    ledger = trainer.run()
    assert ledger.update_epochs == 4 * epochs
    assert ledger.gradient_steps == 4 * 2 * epochs
    assert ledger.local_skipped_gradient_steps == 4 * 2 * (2 - epochs)


@pytest.mark.parametrize(("divergence", "skips"), [(0.0149, False), (0.0151, True)])
def test_target_kl_tolerates_one_and_a_half_times_its_target(divergence, skips):
    trainer, skipped = ppo_trainer(on_policy_plan()), []
    trainer.skip_rest_of_update = lambda: skipped.append(True)
    hook = TargetKL(0.01)
    hook.register(trainer)
    trainer.last_metrics = {"kl_approx": torch.tensor(divergence)}
    hook.look()
    assert bool(skipped) == skips


def test_stop_when_suggests_nearest_column_for_unknown_metric():
    with pytest.warns(UserWarning, match=r"never found the metric 'scoer'.*column is 'score'"):
        assert stopped_after(StopWhen("scoer", reached=1.0), [1.0, 2.0, 3.0, 4.0]) == (4, None)
