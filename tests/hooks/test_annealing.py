"""Values follow their schedule exactly, from the first iteration to the end of the run."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictSequential
from torchrl.data import Bounded, OneHot
from torchrl.modules import EGreedyModule
from torchrl.trainers import LRSchedulerHook

from kit.hooks import Anneal, AnnealExploration, AnnealLearningRate
from kit.modules.exploration import GaussianNoise, OrnsteinUhlenbeckNoise
from kit.steps import Constant, Linear, make_schedule
from kit.trainer.stages import HookError
from recipes.ppo import Config, build
from tests.errors import raises_setting
from tests.tiny import Scripted, off_policy_plan, on_policy_plan, ppo_trainer, sac_trainer


def rows_of(trainer) -> list[dict]:
    rows: list[dict] = []
    trainer.register_op("log_row", lambda row: rows.append(dict(row)))
    trainer.run()
    return rows


def test_two_anneal_hooks_log_separate_columns():
    trainer = ppo_trainer(on_policy_plan(), log_every=16)
    rates = [torch.optim.SGD([torch.zeros(1)], lr=start) for start in (1.0, 8.0)]
    trainer.add(AnnealLearningRate(rates[0], "linear"), "second")
    trainer.add(AnnealLearningRate(rates[1], "linear"))
    third = AnnealLearningRate(torch.optim.SGD([torch.zeros(1)]), "linear")
    with raises_setting("hook"):
        trainer.add(third, "learning_rate")
    rows = rows_of(trainer)
    assert [row["schedule/second"] for row in rows] == [1.0, 0.75, 0.5, 0.25]
    assert [row["schedule/learning_rate"] for row in rows] == [8.0, 6.0, 4.0, 2.0]


def test_learning_rate_falls_each_iteration_to_exact_end():
    trainer = ppo_trainer(on_policy_plan(), log_every=16)
    optimizer = trainer.optimizer
    trainer.add(AnnealLearningRate(optimizer, make_schedule("linear", 1.0, 0.0, 64)))
    used: list[float] = []
    trainer.register_op("post_optim", lambda: used.append(float(optimizer.param_groups[0]["lr"])))
    rows = rows_of(trainer)
    assert used == [1.0] * 4 + [0.75] * 4 + [0.5] * 4 + [0.25] * 4
    assert [row["schedule/learning_rate"] for row in rows] == [1.0, 0.75, 0.5, 0.25]
    assert float(optimizer.param_groups[0]["lr"]) == 0.0


def test_anneal_follows_chosen_counter():
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


@pytest.mark.parametrize(
    ("counter", "counts"),
    [("env_steps", [0, 28, 54, 80]), ("episodes", [0, 4, 10, 16])],
)
@pytest.mark.parametrize("log_every", [16, 1_000])
def test_anneal_follows_env_counters_for_any_log_interval(counter, counts, log_every):
    """Two environments make 8 policy steps at a time, which are 2, 2 and 1 env steps."""
    trainer = ppo_trainer(on_policy_plan(action_repeat=2), lambda: Scripted(5), log_every=log_every)
    hook = Anneal(trainer.loss_module, "clip_epsilon", Linear(1.0, 0.0, 100), counter=counter)
    trainer.add(hook)
    used: list[float] = []
    trainer.register_op("pre_optim_steps", lambda: used.append(float(hook.value)))
    trainer.run()
    assert used == pytest.approx([1 - count / 100 for count in counts])


def test_anneal_fills_tensor_in_place_and_replaces_float():
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


def test_anneal_changes_value_in_traced_loss():
    """The clip range goes to zero: at the end, every ratio but 1 is clipped."""
    trainer = ppo_trainer(on_policy_plan(), log_every=16)
    schedule = make_schedule("linear", 0.9, 0.0, 48)
    trainer.add(Anneal(trainer.loss_module, "clip_epsilon", schedule))
    fractions = [row["train/clip_fraction"] for row in rows_of(trainer)]
    assert fractions[0] == 0.0
    assert fractions[-1] > 0.5


def test_named_schedule_rejects_initial_learning_rate_of_zero():
    trainer = ppo_trainer(on_policy_plan())
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    with raises_setting("learning_rate"):
        trainer.add(AnnealLearningRate(trainer.optimizer, "linear"))
    trainer.add(AnnealLearningRate(trainer.optimizer, "linear", end=0.1))


@pytest.mark.parametrize(
    "counter", ["env_steps", "episodes", "update_epochs", "random_policy_steps"]
)
def test_named_schedule_rejects_counter_without_known_end(counter):
    trainer = ppo_trainer(on_policy_plan())
    with raises_setting("counter"):
        trainer.add(AnnealLearningRate(trainer.optimizer, "linear", counter=counter))


@pytest.mark.parametrize("counter", ["evaluations", "evaluation_episodes"])
@pytest.mark.parametrize("schedule", ["linear", Linear(1.0, 0.0, 3)])
def test_anneal_rejects_evaluation_counters(counter, schedule):
    trainer = ppo_trainer(on_policy_plan())
    with raises_setting("counter"):
        trainer.add(AnnealLearningRate(trainer.optimizer, schedule, counter=counter))


# ---------------------------------------------------------------------- schedules by name
def columns(rows: list[dict], label: str) -> list[float]:
    return [row[f"schedule/{label}"] for row in rows]


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [1.0, 0.75, 0.5, 0.25]),
        ({"end": 0.5}, [1.0, 0.875, 0.75, 0.625]),
        ({"share_of_run": 0.5}, [1.0, 0.5, 0.0, 0.0]),
        ({"counter": "iterations"}, [1.0, 0.75, 0.5, 0.25]),
        ({"counter": "gradient_steps", "share_of_run": 0.5}, [1.0, 0.5, 0.0, 0.0]),
    ],
)
def test_named_schedule_derives_range_from_optimizer_and_plan(settings, rates):
    trainer = ppo_trainer(on_policy_plan(), log_every=16)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1.0
    trainer.add(AnnealLearningRate(trainer.optimizer, "linear", **settings))
    assert columns(rows_of(trainer), "learning_rate") == rates


def test_each_param_group_anneals_from_own_learning_rate():
    one, two = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.Adam([{"params": [one], "lr": 1.0}, {"params": [two], "lr": 0.5}])
    trainer = ppo_trainer(on_policy_plan(), log_every=16)
    trainer.add(AnnealLearningRate(optimizer, "linear"))
    used = []
    trainer.register_op(
        "post_optim", lambda: used.append([g["lr"] for g in optimizer.param_groups])
    )
    trainer.run()
    assert used[::4] == [[1.0, 0.5], [0.75, 0.375], [0.5, 0.25], [0.25, 0.125]]


def test_anneal_follows_iterations_for_unknown_episode_length():
    plan = on_policy_plan(steps_per_env=None, min_episodes=2, total_policy_steps=None, iterations=4)
    hook = AnnealLearningRate(
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), "linear"
    )
    trainer = ppo_trainer(on_policy_plan())
    trainer.plan = plan
    trainer.add(hook)
    assert hook.counter == "iterations"
    with raises_setting("counter"):
        trainer.add(AnnealExploration(egreedy(), counter="gradient_steps"))


# ---------------------------------------------------------------------- alone
def test_trainer_rejects_two_hooks_for_one_value():
    trainer = ppo_trainer(on_policy_plan())
    trainer.add(AnnealLearningRate(trainer.optimizer, "linear"))
    half = Anneal(trainer.optimizer.param_groups[0], "lr", Constant(0.5), name="half")
    with raises_setting("hook"):
        trainer.add(half)


def test_anneal_raises_error_when_other_code_sets_value():
    trainer = ppo_trainer(on_policy_plan())
    trainer.add(AnnealLearningRate(trainer.optimizer, "linear"))

    def halve():
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.5

    trainer.register_op("post_optim", halve)
    with pytest.raises(HookError, match=r"learning_rate=0\.5 was set by other code"):
        trainer.run()


@pytest.mark.parametrize("by_pytorch", [False, True])
def test_run_rejects_annealing_of_unused_optimizer(by_pytorch):
    trainer = ppo_trainer(on_policy_plan())
    same_weights = torch.optim.Adam(trainer.loss_module.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(same_weights, 0.5)
    trainer.add(LRSchedulerHook(scheduler) if by_pytorch else AnnealLearningRate(same_weights))
    with raises_setting("hook"):
        trainer.run()


def test_anneal_accepts_optimizer_of_separate_parameters():
    trainer = ppo_trainer(on_policy_plan(), log_every=16)
    own = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    trainer.add(AnnealLearningRate(own))
    assert [row["schedule/learning_rate"] for row in rows_of(trainer)] == [1.0, 0.75, 0.5, 0.25]


def test_named_schedule_rejects_start_in_middle_of_run(tmp_path):
    trainer = ppo_trainer(on_policy_plan(), folder=tmp_path)
    trainer.run()
    again = ppo_trainer(on_policy_plan()).load(trainer.last_checkpoint)
    with raises_setting("hook"):
        again.add(AnnealLearningRate(again.optimizer, "linear"))


def test_schedule_rejects_unused_loss_term():
    with raises_setting("critic_coeff"):
        build(Config(critic_coeff=0.0, critic_schedule="linear", log_dir=None, progress=False))


def test_schedule_rejects_unknown_name_and_invalid_share():
    with raises_setting("schedule"):
        AnnealExploration(egreedy(), "line")
    for share in (-0.5, 1.5):
        with raises_setting("share_of_run"):
            AnnealExploration(egreedy(), share_of_run=share)


def test_anneal_finds_param_group_after_resume(tmp_path):
    def annealed(**parts):
        trainer = ppo_trainer(on_policy_plan(), log_every=16, **parts)
        trainer.add(Anneal(trainer.optimizer.param_groups[0], "lr", Linear(1.0, 0.0, 64)))
        return trainer

    first = annealed(folder=tmp_path, checkpoint_every=32)
    first.run()
    again = annealed()
    again.load(sorted((tmp_path / "checkpoints").iterdir())[0])
    used = []
    group = lambda: again.optimizer.param_groups[0]  # noqa: E731
    again.register_op("post_optim", lambda: used.append(float(group()["lr"])))
    again.run()
    assert used[::4] == [0.5, 0.25]


# ---------------------------------------------------------------------- exploration
def egreedy() -> EGreedyModule:
    return EGreedyModule(spec=OneHot(2), eps_init=1.0, eps_end=0.2)


BOX = Bounded(-1.0, 1.0, (1,))


@pytest.mark.parametrize(
    ("noise", "attribute"),
    [
        (egreedy, "eps"),
        (lambda: GaussianNoise(spec=BOX, sigma_init=1.0, sigma_end=0.2), "sigma"),
        (lambda: OrnsteinUhlenbeckNoise(spec=BOX, eps_init=1.0, eps_end=0.2), "eps"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda noise: noise, TensorDictSequential])
def test_exploration_anneals_between_values_of_noise_module(noise, attribute, wrap):
    noise = noise()
    trainer = ppo_trainer(on_policy_plan(), log_every=16)
    trainer.add(AnnealExploration(wrap(noise), share_of_run=0.5))
    assert columns(rows_of(trainer), "exploration") == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert float(getattr(noise, attribute)) == pytest.approx(0.2)


def test_anneal_exploration_rejects_policy_without_noise():
    trainer = ppo_trainer(on_policy_plan())
    with raises_setting("policy"):
        AnnealExploration(trainer.collector.policy)


def test_logged_learning_rate_matches_rate_used_with_scheduler():
    trainer = ppo_trainer(on_policy_plan(), log_every=16)
    trainer.add(AnnealLearningRate(trainer.optimizer, "constant"))
    trainer.add(LRSchedulerHook(torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)))
    used: list[float] = []
    trainer.register_op("pre_epoch", lambda _: used.append(trainer.optimizer.param_groups[0]["lr"]))
    logged = [row["schedule/learning_rate"] for row in rows_of(trainer)]
    assert logged == list(dict.fromkeys(map(float, used)))
