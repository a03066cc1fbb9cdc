"""Values follow their schedule exactly, from the first iteration to the end of the run."""

from __future__ import annotations

import pytest
import torch

from kit.hooks import Anneal, AnnealLearningRate
from kit.steps import SettingError, make_schedule
from tests.tiny import off_policy_plan, on_policy_plan, ppo_trainer, sac_trainer


def rows_of(trainer) -> list[dict]:
    rows: list[dict] = []
    trainer.register_op("log_row", lambda row: rows.append(dict(row)))
    trainer.run()
    return rows


def test_a_learning_rate_falls_once_per_iteration_and_ends_exactly():
    trainer = ppo_trainer(on_policy_plan(), log_every=16)
    optimizer = trainer.optimizer
    trainer.add(AnnealLearningRate(optimizer, make_schedule("linear", 1.0, 0.0, 64)))
    used: list[float] = []
    trainer.register_op("post_optim", lambda: used.append(float(optimizer.param_groups[0]["lr"])))
    rows = rows_of(trainer)
    assert used == [1.0] * 4 + [0.75] * 4 + [0.5] * 4 + [0.25] * 4
    assert [row["schedule/learning_rate"] for row in rows] == [1.0, 0.75, 0.5, 0.25]
    assert float(optimizer.param_groups[0]["lr"]) == 0.0


def test_any_counter_can_be_followed():
    trainer = sac_trainer(off_policy_plan(), log_every=1)
    durations = {"policy_steps": 40, "iterations": 20, "gradient_steps": 31}
    values = {name: torch.tensor(0.0) for name in durations}

    class Target:
        pass

    target = Target()
    target.__dict__.update(values)
    for counter, duration in durations.items():
        schedule = make_schedule("linear", 1.0, 0.0, duration)
        trainer.add(Anneal(target, counter, schedule, counter=counter))
    rows = rows_of(trainer)
    used = {name: [row[f"schedule/{name}"] for row in rows] for name in durations}
    assert used["policy_steps"] == pytest.approx([1 - n / 40 for n in range(40)])
    assert used["iterations"] == pytest.approx([max(1 - n / 20, 0) for n in range(40)])
    assert used["gradient_steps"] == pytest.approx([1.0] * 10 + [1 - n / 31 for n in range(1, 31)])
    assert [float(value) for value in values.values()] == [0.0, 0.0, 0.0]


def test_all_groups_of_an_optimiser_or_one_of_them_are_set():
    one, two = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    trainer = ppo_trainer(on_policy_plan())
    optimizer = torch.optim.Adam([{"params": [one]}, {"params": [two]}], lr=0.1)
    half = make_schedule("constant", 0.5, 0.5, 1)
    trainer.add(Anneal(optimizer.param_groups[1], "lr", half, name="second"))
    trainer.run()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    again = ppo_trainer(on_policy_plan())
    again.add(AnnealLearningRate(optimizer, half))
    again.run()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_a_tensor_is_filled_where_it_is_and_a_number_is_replaced():
    class Target:
        def __init__(self) -> None:
            self.tensor, self.number = torch.tensor(1.0), 1.0

    target = Target()
    kept = target.tensor
    trainer = ppo_trainer(on_policy_plan())
    for name in ("tensor", "number"):
        trainer.add(Anneal(target, name, make_schedule("linear", 1.0, 0.5, 64)))
    rows = rows_of(trainer)
    assert target.tensor is kept
    assert (float(kept), target.number) == (0.5, 0.5)
    assert rows[-1]["schedule/tensor"] == rows[-1]["schedule/number"] == 0.625


def test_what_a_loss_reads_is_annealed_although_the_loss_is_traced():
    """The clip range goes to zero: at the end, every ratio but 1 is clipped."""
    trainer = ppo_trainer(on_policy_plan(), log_every=16)
    schedule = make_schedule("linear", 0.9, 0.0, 48)
    trainer.add(Anneal(trainer.loss_module, "clip_epsilon", schedule))
    fractions = [row["train/clip_fraction"] for row in rows_of(trainer)]
    assert fractions[0] == 0.0
    assert fractions[-1] > 0.5


def test_a_resumed_run_goes_on_with_the_value_it_had(tmp_path):
    def annealed(**parts):
        trainer = ppo_trainer(on_policy_plan(), log_every=16, **parts)
        schedule = make_schedule("linear", 1.0, 0.0, 64)
        return trainer, AnnealLearningRate(trainer.optimizer, schedule)

    first, hook = annealed(folder=tmp_path, checkpoint_every=32)
    first.add(hook)
    first.run()
    checkpoint = sorted((tmp_path / "checkpoints").iterdir())[0]
    again, hook = annealed()
    again.add(hook)
    again.load(checkpoint)
    rows = rows_of(again)
    assert [row["schedule/learning_rate"] for row in rows] == [0.5, 0.25]


def test_an_attribute_or_a_counter_that_does_not_exist_is_refused():
    trainer = ppo_trainer(on_policy_plan())
    schedule = make_schedule("constant", 1.0, 1.0, 1)
    with pytest.raises(SettingError, match="attribute='epsilon' is not an attribute of Clip"):
        Anneal(trainer.loss_module, "epsilon", schedule)
    with pytest.raises(SettingError, match="counter='steps' is not a counter"):
        trainer.add(Anneal(trainer.loss_module, "clip_epsilon", schedule, counter="steps"))
