"""Every hook object of TorchRL registers unchanged in the kit's trainer, works, and is saved."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import (
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from torchrl.envs import Compose, GymEnv, StepCounter, TransformedEnv
from torchrl.objectives import HardUpdate, SoftUpdate, TD3Loss
from torchrl.trainers import (
    BatchSubSampler,
    ClearCudaCache,
    CountFramesLog,
    DefaultOptimizationStepper,
    EarlyStopping,
    LogScalar,
    LogTiming,
    LogValidationReward,
    LRSchedulerHook,
    MixedPrecisionOptimizationStepper,
    OptimizationStepper,
    OptimizerHook,
    ReplayBufferTrainer,
    RewardNormalizer,
    SelectKeys,
    TargetNetUpdaterHook,
    TrainerHookBase,
    UpdateWeights,
    UTDRHook,
    ValueEstimatorHook,
    algorithms,
    trainers,
)
from torchrl.trainers.algorithms.offline_to_online import (
    OfflineToOnlineAnnealHook,
    OfflineToOnlineReplayBufferHook,
)
from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper

from kit.buffers import SequenceSampler
from kit.envs import make_env
from kit.hooks import AnnealLearningRate, ScaleReward, SignReward
from kit.modules import make_action_value, make_actor
from kit.steps import StepPlan
from kit.trainer import PlanMismatchError, Trainer
from kit.trainer.stages import HookError
from kit.update import Update
from tests.errors import raises_setting
from tests.tiny import (
    Rows,
    Scripted,
    assert_equal,
    assert_same,
    collector_of,
    evaluator_for,
    off_policy_plan,
    on_policy_plan,
    ppo_parts,
    ppo_trainer,
    sac_parts,
    sac_trainer,
    transitions_buffer,
    weights,
)

REWARD = ("next", "reward")
TESTED: set[type] = set()


def runs(*hooks: type) -> Callable[[Any], Any]:
    """Mark a test as the one of these hooks."""
    TESTED.update(hooks)
    return lambda test: test


def last_row(trainer: Trainer) -> dict[str, Any]:
    """Run and return the newest value of every metric."""
    trainer.run()
    return trainer.journal.latest


def bare_ppo(plan: StepPlan, *leave_out: str, **parts: Any) -> Trainer:
    """A trainer that lacks some parts, and still has loss and optimiser for hooks to find."""
    own = ppo_parts(plan)
    update = own["update"]
    kept = {name: part for name, part in own.items() if name not in leave_out}
    found = {"loss_module": update.loss_module, "optimizer": update.optimizers["optimizer"]}
    return Trainer(plan, **{**found, **kept, **parts})


class WholeBatch:
    """Gives the whole batch for every gradient step; a hook cuts the minibatch from it."""

    def extend(self, batch: TensorDictBase, keys: Any = ()) -> None:
        del keys
        self.batch = batch

    def epoch(self, plan: StepPlan, limit: int) -> Iterator[list[TensorDictBase]]:
        del plan
        return iter([[self.batch]] * limit)

    def update_priority(self, minibatch: TensorDictBase) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


# ---------------------------------------------------------------------- all of them
def test_file_covers_every_torchrl_hook_class():
    modules = {inspect.getmodule(cls) for _, cls in inspect.getmembers(algorithms, inspect.isclass)}
    classes = {
        cls
        for module in modules | {trainers}
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, TrainerHookBase) and cls.__module__.startswith("torchrl")
    }
    abstract = {TrainerHookBase, OptimizationStepper}
    assert {cls.__name__ for cls in classes - abstract - TESTED} == {"DreamerV3OptimizationStepper"}
    assert classes >= TESTED


# ---------------------------------------------------------------------- batches and minibatches
@runs(SelectKeys)
def test_select_keys_drops_other_keys_from_batch():
    kept = ["observation", "action", "action_log_prob", "next"]
    trainer = ppo_trainer(hooks=[SelectKeys(kept)])
    seen = []
    trainer.register_op("pre_steps_log", lambda batch: seen.append(set(batch.keys())))
    trainer.run()
    assert seen == [set(kept)] * 4


@runs(BatchSubSampler)
def test_batch_sub_sampler_cuts_the_minibatches():
    plan = on_policy_plan(update_epochs=None, gradient_steps_per_iteration=3)
    hook = BatchSubSampler(batch_size=8, sub_traj_len=4)
    trainer = ppo_trainer(plan, hooks=[hook], buffer=WholeBatch())
    shapes = []
    trainer.register_op("post_loss", lambda minibatch: shapes.append(tuple(minibatch.shape)))
    trainer.run()
    assert shapes == [(2, 4)] * 12


def test_batch_sub_sampler_raises_error_when_samples_miss_plan():
    trainer = ppo_trainer(hooks=[BatchSubSampler(batch_size=4)])
    with pytest.raises(PlanMismatchError, match="samples: planned 128, counted 64"):
        trainer.run()


@runs(RewardNormalizer)
def test_reward_normalizer_standardizes_minibatch_rewards():
    hook = RewardNormalizer(decay=1.0, scale=2.0)
    trainer = sac_trainer(hooks=[hook])
    collected, pairs = [], []
    trainer.register_op("pre_steps_log", lambda batch: collected.append(batch[REWARD].clone()))
    trainer.register_op("process_optim_batch", lambda m: pairs.append((m[REWARD], m["step"])))
    trainer.register_op(
        "batch_process", lambda b: b.set("step", torch.full((1, 1), len(collected)))
    )
    trainer.run()
    rewards = torch.cat(collected).flatten()
    assert len(pairs) == 31
    for number, (normalized, step) in enumerate(pairs, start=10):
        known = rewards[:number]
        expected = 2 * (rewards[step.flatten()] - known.mean()) / known.std()
        torch.testing.assert_close(normalized.flatten(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [RewardNormalizer, ScaleReward, SignReward])
def test_trainer_rejects_reward_hooks_after_advantages(make):
    with raises_setting("hook"):
        ppo_trainer(hooks=[make()])
    parts = ppo_parts(on_policy_plan())
    hooks = [ValueEstimatorHook(parts.pop("advantage")), make()]
    with raises_setting("hook"):
        Trainer(on_policy_plan(), **parts, hooks=hooks)


@runs(ReplayBufferTrainer)
def test_replay_buffer_trainer_stores_and_samples_batches():
    plan = off_policy_plan()
    parts = {**sac_parts(plan), "buffer": None}
    buffer = transitions_buffer(batch_size=4)
    hook = ReplayBufferTrainer(buffer, flatten_tensordicts=True)
    ledger = Trainer(plan, **parts, hooks=[hook]).run()
    assert len(buffer) == 40
    assert ledger.samples == 31 * 4


def test_replay_buffer_trainer_rejects_sequences_of_several_envs():
    """It stores them one after the other; the kit's sequences are of those that write in turn."""

    def trainer(num_envs):
        plan = off_policy_plan(num_envs=num_envs, steps_per_env=2, total_policy_steps=80)
        storage = LazyTensorStorage(100)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=SequenceSampler(2), batch_size=4)
        hook = ReplayBufferTrainer(buffer, flatten_tensordicts=True)
        return Trainer(plan, **{**sac_parts(plan), "buffer": None}, hooks=[hook])

    assert trainer(1).run().samples == 36 * 2 * 4
    with raises_setting("replay_buffer"):
        trainer(2).run()


def test_replay_buffer_trainer_passes_all_td_errors_to_buffer():
    errors = []

    class Noting(TensorDictReplayBuffer):
        def update_tensordict_priority(self, data):
            errors.append(data["td_error"].clone())

    plan = off_policy_plan()
    parts = {**sac_parts(plan), "buffer": None}
    buffer = Noting(storage=LazyTensorStorage(100), batch_size=4)
    hook = ReplayBufferTrainer(buffer, flatten_tensordicts=True)
    Trainer(plan, **parts, hooks=[hook]).run()
    assert [len(each) for each in errors] == [4] * 31
    assert (torch.cat(errors) > 0).all()


def test_replay_buffer_trainer_epoch_skips_no_gradient_step():
    plan = on_policy_plan(update_epochs=3)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(16), sampler=SamplerWithoutReplacement(), batch_size=8
    )
    hook = ReplayBufferTrainer(buffer, iterate=True)
    trainer = ppo_trainer(plan)
    trainer.register_op("pre_epoch", lambda batch: hook.extend(batch.reshape(-1)))
    trainer.register_op("process_optim_batch", hook.sample)
    ledger = trainer.run()
    assert ledger.gradient_steps == 4 * 3 * 2
    assert ledger.samples == 4 * 3 * 16


@runs(OfflineToOnlineReplayBufferHook, OfflineToOnlineAnnealHook)
def test_anneal_hook_lowers_offline_fraction_to_zero():
    plan = off_policy_plan(learning_starts=0)
    parts = {**sac_parts(plan), "buffer": None}
    offline = ReplayBuffer(storage=LazyTensorStorage(20))
    collector = sac_parts(off_policy_plan(steps_per_env=20), seed=1)["collector"]
    offline.extend(next(iter(collector)).reshape(-1).exclude("collector"))
    both = OfflineToOnlineReplayBuffer(
        offline, online_capacity=100, offline_fraction=0.5, batch_size=4
    )
    trainer = Trainer(plan, **parts, hooks=[OfflineToOnlineReplayBufferHook(both)])
    trainer.add(OfflineToOnlineAnnealHook(trainer, both, anneal_frames=20))
    fractions = []
    trainer.register_op("post_steps", lambda: fractions.append(both.offline_fraction))
    ledger = trainer.run()
    expected = [0.5 * max(0.0, 1 - step / 20) for step in range(1, 41)]
    assert fractions == pytest.approx(expected)
    assert (len(both.offline_buffer), len(both.online_buffer)) == (20, 40)
    assert ledger.samples == 40 * 4


# ---------------------------------------------------------------------- what a batch needs
@runs(ValueEstimatorHook)
def test_value_estimator_hook_computes_advantages():
    plan = on_policy_plan(update_epochs=1)
    own = ppo_trainer(plan)
    own.run()
    parts = ppo_parts(plan)
    hook = ValueEstimatorHook(parts.pop("advantage"))
    theirs = Trainer(plan, **parts, hooks=[hook])
    theirs.run()
    assert_equal(weights(own), weights(theirs))


def test_value_estimator_hook_recomputes_every_epoch():
    plan = on_policy_plan(update_epochs=3)
    parts = ppo_parts(plan)
    estimator = parts.pop("advantage")
    calls = []
    hook = ValueEstimatorHook(lambda batch: calls.append(batch.shape) or estimator(batch))
    Trainer(plan, **parts, hooks=[hook]).run()
    assert calls == [(2, 8)] * 12


# ---------------------------------------------------------------------- gradient steps
@runs(OptimizerHook)
@pytest.mark.filterwarnings("ignore:OptimizerHook:FutureWarning")
def test_optimizer_hook_performs_gradient_steps():
    plan = on_policy_plan()
    own = ppo_trainer(plan)
    own.run()
    trainer = bare_ppo(plan, "update")
    trainer.clip_norm = 0.5
    trainer.add(OptimizerHook(trainer.optimizer))
    row = last_row(trainer)
    assert row["gradient_steps"] == 16
    assert row["train/grad_norm_0"] > 0
    torch.testing.assert_close(weights(own), weights(trainer))  # norms round differently


@pytest.mark.filterwarnings("ignore:OptimizerHook:FutureWarning")
def test_several_optimizer_hooks_share_the_losses():
    plan = on_policy_plan()
    trainer = bare_ppo(plan, "update")
    loss = trainer.loss_module
    critic = torch.optim.SGD(loss.critic_network_params.flatten_keys().values(), lr=0.0)
    trainer.add(OptimizerHook(critic, ["loss_critic"]), "critic")
    actor = torch.optim.SGD(loss.actor_network_params.flatten_keys().values(), lr=0.1)
    trainer.add(OptimizerHook(actor, ["loss_objective"]), "actor")
    before = weights(trainer)
    row = last_row(trainer)
    changed = {name for name, value in weights(trainer).items() if not value.equal(before[name])}
    assert changed
    assert all(name.startswith("actor") for name in changed)
    assert {"train/grad_norm_0", "train/grad_norm_1"} <= row.keys()


@runs(DefaultOptimizationStepper)
def test_default_optimization_stepper_performs_gradient_steps():
    plan = on_policy_plan()
    own = ppo_trainer(plan)
    own.run()
    trainer = bare_ppo(plan, "update", update=DefaultOptimizationStepper())
    trainer.clip_norm = 0.5
    assert last_row(trainer)["gradient_steps"] == 16
    torch.testing.assert_close(weights(own), weights(trainer))  # norms round differently


@runs(MixedPrecisionOptimizationStepper)
def test_mixed_precision_stepper_accumulates_as_planned():
    plan = on_policy_plan(minibatches_per_gradient_step=2)
    parts = ppo_parts(plan)
    update = parts.pop("update")
    stepper = MixedPrecisionOptimizationStepper(
        update.optimizers["optimizer"], mixed_precision=True, gradient_accumulation_steps=2
    )
    ledger = Trainer(plan, **parts, update=stepper, loss_module=update.loss_module).run()
    assert stepper.optimizer_step_count == ledger.gradient_steps == 8


@pytest.mark.parametrize(
    ("own", "planned"), [(None, 2), (None, None), (1, 2), (2, 1), (3, 2), (2, None), (3, 3)]
)
def test_trainer_rejects_stepper_with_unplanned_accumulation(own, planned):
    plan = on_policy_plan(minibatch_size=4, minibatches_per_gradient_step=planned)
    parts = ppo_parts(plan)
    update, stepper = parts.pop("update"), DefaultOptimizationStepper()
    optimizer = update.optimizers["optimizer"]
    if own is not None:
        stepper = MixedPrecisionOptimizationStepper(optimizer, gradient_accumulation_steps=own)
    parts |= {"loss_module": update.loss_module, "optimizer": optimizer}
    with raises_setting("minibatches_per_gradient_step"):
        Trainer(plan, **parts, update=stepper)


@runs(TD3OptimizationStepper)
def test_td3_stepper_performs_gradient_steps():
    plan = off_policy_plan()
    env = make_env("Pendulum-v1", 1)
    policy = make_actor(env, (8,), continuous="deterministic")
    loss = TD3Loss(policy, make_action_value(env, (8,)), action_spec=env.full_action_spec_unbatched)
    loss.make_value_estimator(gamma=0.99)
    stepper = TD3OptimizationStepper(
        torch.optim.Adam(loss.actor_network_params.flatten_keys().values()),
        torch.optim.Adam(loss.qvalue_network_params.flatten_keys().values()),
    )
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    trainer = Trainer(
        plan, collector=collector_of(plan, env, policy), update=stepper, loss_module=loss,
        buffer=transitions_buffer(batch_size=4),
        hooks=[TargetNetUpdaterHook(SoftUpdate(loss, tau=0.5))],
    )  # fmt: skip
    assert last_row(trainer)["train/loss_qvalue"] > 0
    assert stepper._update_counter == trainer.ledger.gradient_steps == 31
    changed = {n.split("_")[0] for n, v in weights(trainer).items() if not v.equal(before[n])}
    assert changed == {"actor", "qvalue", "target"}


@runs(TargetNetUpdaterHook)
def test_target_net_updater_hook_updates_target_networks():
    plan = off_policy_plan()

    def trained(*hook: type, tau: float = 0.5) -> dict[str, torch.Tensor]:
        parts = sac_parts(plan)
        loss = parts["update"].loss_module
        parts["update"] = Update(loss, torch.optim.Adam(loss.parameters(), lr=1e-3))
        hooks = [make(SoftUpdate(loss, tau=tau)) for make in hook]
        trainer = Trainer(plan, **parts, hooks=hooks)
        trainer.run()
        assert trainer.ledger.gradient_steps == 31
        return weights(trainer)

    def targets(state: dict[str, torch.Tensor], kind: str) -> list[torch.Tensor]:
        return [value for name, value in state.items() if name.startswith(kind)]

    moved, target = trained(TargetNetUpdaterHook, tau=1.0), "target_qvalue_network_params"
    for source, after in zip(targets(moved, "qvalue_network_params"), targets(moved, target)):
        assert torch.equal(source, after)


@pytest.mark.parametrize("has_updater", [True, False])
def test_trainer_rejects_target_networks_that_nothing_updates(has_updater):
    parts = sac_parts(plan := off_policy_plan())
    loss = parts["update"].loss_module
    loss._has_update_associated = dict.fromkeys(loss._has_update_associated, has_updater)
    update = Update(loss, torch.optim.Adam(loss.parameters()))
    trainer = Trainer(plan, **parts | {"update": update})
    with raises_setting("loss_module"):
        trainer.run()
    trainer.add(TargetNetUpdaterHook(SoftUpdate(loss, tau=0.5)))
    assert trainer.run().gradient_steps == 31


def test_trainer_accepts_loss_that_updates_its_targets():
    parts = sac_parts(plan := off_policy_plan())
    loss = parts["update"].loss_module
    loss.updates_targets = True
    update = Update(loss, torch.optim.Adam(loss.parameters()))
    assert Trainer(plan, **parts | {"update": update}).run().gradient_steps == 31


def test_target_net_updater_hook_restores_counter_on_resume(tmp_path):
    def trainer(**arguments: Any) -> Trainer:
        parts = sac_parts(plan := off_policy_plan())
        loss = parts["update"].loss_module
        parts["update"] = Update(loss, torch.optim.Adam(loss.parameters(), lr=1e-3))
        updater = HardUpdate(loss, value_network_update_interval=6)  # in every seventh iteration
        return Trainer(plan, **parts, hooks=[TargetNetUpdaterHook(updater)], **arguments)

    whole = trainer(folder=tmp_path, checkpoint_every=30)
    whole.run()
    resumed = trainer(resume_from=min((tmp_path / "checkpoints").iterdir()))
    assert resumed.policy_steps == 30
    resumed.run()
    assert_equal(weights(resumed), weights(whole))


@runs(LRSchedulerHook)
@pytest.mark.parametrize(("interval", "times"), [("batch", 4), ("optim", 16)])
def test_lr_scheduler_hook_lowers_the_learning_rate(interval, times):
    trainer = ppo_trainer()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    trainer.add(LRSchedulerHook(scheduler, interval))
    trainer.run()
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-3 * 0.5**times


def test_lr_scheduler_hook_waits_for_learning_to_start():
    trainer = sac_trainer()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    trainer.add(LRSchedulerHook(scheduler))
    trainer.run()
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-3 * 0.5**31


@runs(ClearCudaCache)
def test_clear_cuda_cache_clears_at_every_second_update_phase(monkeypatch):
    cleared = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cleared.append(True))
    ppo_trainer(hooks=[ClearCudaCache(2)]).run()
    assert len(cleared) == 2


# ---------------------------------------------------------------------- weights of the collector
@runs(UpdateWeights)
def test_update_weights_sends_weights_to_the_collector():
    plan = on_policy_plan()
    parts = ppo_parts(plan)
    collector = parts["collector"]
    torch.manual_seed(9)
    other = make_actor(collector.env, (8,))
    sent = UpdateWeights(collector, 1, lambda: TensorDict.from_module(other).data)
    Trainer(plan, **parts, hooks=[sent]).run()
    assert_equal(dict(collector.policy.state_dict()), dict(other.state_dict()))


def test_update_weights_finds_the_learners_weights_by_name():
    own = ppo_trainer()
    own.run()
    trainer = ppo_trainer()
    by_name = {"policy": "loss_module.actor_network"}
    trainer.add(UpdateWeights(trainer.collector, 1, weight_update_map=by_name, trainer=trainer))
    trainer.run()
    assert_equal(weights(own), weights(trainer))


def test_update_weights_rejects_weights_of_another_policy():
    trainer = ppo_trainer()
    other = make_actor(trainer.collector.env, (9,))
    trainer.add(UpdateWeights(trainer.collector, 1, lambda: other))
    with pytest.raises(
        HookError, match=r"UpdateWeights.*weights=.*has shape \(9,\), but \(8,\) in the"
    ):
        trainer.run()


@pytest.mark.parametrize(("unit", "interval", "times"), [("batches", 2, 2), ("optim_steps", 4, 4)])
def test_update_weights_keeps_its_interval(unit, interval, times):
    class Sender:
        sent = 0

        def update_weights(self):
            self.sent += 1

    trainer, sender = ppo_trainer(), Sender()
    trainer.add(
        UpdateWeights(
            update_weights_interval=interval, trainer=trainer, sender=sender, interval_unit=unit
        )
    )
    trainer.run()
    assert sender.sent == times


# ---------------------------------------------------------------------- metrics
@runs(LogScalar)
def test_log_scalar_adds_columns_to_rows():
    rows = Rows()
    observation = LogScalar("observation", logname="largest", reduction="max", include_std=False)
    trainer = ppo_trainer(hooks=[LogScalar(REWARD, logname="reward"), observation], logger=rows)
    largest = []
    trainer.register_op("post_steps_log", lambda b: largest.append(b["observation"].max().item()))
    trainer.schedule.log_every = 16
    trainer.run()
    assert [(row["reward"], row["reward_std"]) for row in rows.rows] == [(1.0, 0.0)] * 4
    assert [row["largest"] for row in rows.rows] == largest


@runs(CountFramesLog)
def test_count_frames_log_counts_policy_steps():
    rows = Rows()
    ppo_trainer(hooks=[CountFramesLog(frame_skip=3)], logger=rows, log_every=16).run()
    assert [row["n_frames"] for row in rows.rows] == [48, 96, 144, 192]


@runs(LogTiming)
def test_log_timing_logs_timeit_measurements():
    from torchrl._utils import timeit

    timeit.erase()
    trainer = ppo_trainer(hooks=[LogTiming(prefix="measured", erase=True)])

    def work() -> None:
        with timeit("work"):
            sum(range(1_000))

    trainer.register_op("post_steps", work)
    assert last_row(trainer)["measured/work"] > 0
    timeit.erase()


@runs(UTDRHook)
def test_utdr_hook_finds_replay_buffer_and_gradient_steps():
    rows = Rows()
    trainer = sac_trainer(logger=rows, log_every=1)
    trainer.add(UTDRHook(trainer))
    trainer.run()
    row = rows.rows[-1]
    assert (row["write_count"], row["update_count"]) == (39, 30)  # before the last update
    assert row["utd_ratio"] == 4 * 30 / 39


@runs(LogValidationReward)
def test_log_validation_reward_plays_in_its_own_environment():
    plan, rows = on_policy_plan(), Rows()
    parts = ppo_parts(plan)
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True), Compose())
    hook = LogValidationReward(
        record_interval=10, record_frames=5, policy_exploration=parts["collector"].policy,
        environment=env,
    )  # fmt: skip
    Trainer(plan, **parts, hooks=[hook], logger=rows, log_every=16).run()
    assert [row.get("r_evaluation") for row in rows.rows] == [1.0, None, None, None]
    assert rows.rows[0]["total_r_evaluation"] == 5.0
    assert hook._count == 4


@runs(EarlyStopping)
def test_early_stopping_ends_the_run():
    stop = EarlyStopping(monitor="reward", patience=32, wait_for=16)
    trainer = ppo_trainer(hooks=[LogScalar(REWARD, logname="reward"), stop])
    ledger = trainer.run()
    assert ledger.policy_steps == 48  # the reward is 1 in every step, from the first batch on
    assert trainer.stop_reason == stop.stop_reason
    assert "'reward' did not improve for 32 frames" in trainer.stop_reason


def test_early_stopping_monitors_columns_of_the_rows():
    stop = EarlyStopping(monitor="episode/return", patience=0, wait_for=0)
    trainer = ppo_trainer(env=Scripted, hooks=[stop], log_every=16)
    # The column is there after the first row; every return is 5, so the third is no better.
    assert trainer.run().policy_steps == 48
    assert stop.best_score == 5.0
    assert trainer.stop_reason == "Monitored metric 'episode/return' did not improve for 16 frames."


@pytest.mark.parametrize("monitor", ["train/loss_critic", "policy_steps", "evaluation/return"])
def test_early_stopping_waits_for_the_first_row_with_its_column(monitor):
    plan = on_policy_plan(evaluation_every=48, evaluation_episodes=1)
    parts = ppo_parts(plan)
    stop = EarlyStopping(monitor=monitor, patience=1_000, wait_for=0)
    evaluate = evaluator_for(parts, plan, "CartPole-v1")
    trainer = Trainer(plan, **parts, evaluate=evaluate, hooks=[stop], log_every=32)
    began: list[int] = []

    def look() -> None:
        if stop.best_score is not None:
            began.append(trainer.policy_steps)

    trainer.register_op("log_row", lambda row: look())
    trainer.run()
    assert began[0] == (64 if monitor == "evaluation/return" else 48)


def test_early_stopping_warns_of_metric_that_is_never_logged():
    late = ppo_trainer(hooks=[EarlyStopping(monitor="episode/retrun", wait_for=0)])
    with pytest.warns(UserWarning, match="EarlyStopping never found 'episode/retrun'.*iterations"):
        late.run()


def test_run_rejects_two_hooks_that_set_learning_rate():
    def trainer_with(schedule: str, order: int) -> Trainer:
        trainer = ppo_trainer(on_policy_plan())
        optimizer = trainer.optimizer
        theirs = LRSchedulerHook(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        for hook in [AnnealLearningRate(optimizer, schedule), theirs][::order]:
            trainer.add(hook)
        return trainer

    for order in (1, -1):
        with pytest.raises(HookError, match=r"learning_rate=.* was set by other code"):
            trainer_with("linear", order).run()
    constant = trainer_with("constant", 1)
    constant.run()
    assert constant.optimizer.param_groups[0]["lr"] == 1e-3 * 0.5**4


# ---------------------------------------------------------------------- saved and restored
def hooks_with_state(trainer: Trainer) -> list[TrainerHookBase]:
    """Hooks that keep something between iterations."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    env = TransformedEnv(GymEnv("Pendulum-v1"), StepCounter())
    return [
        LogScalar(REWARD, logname="reward"),
        CountFramesLog(frame_skip=1),
        ClearCudaCache(1_000),
        LogTiming(prefix="mine"),
        LRSchedulerHook(scheduler),
        EarlyStopping(monitor="reward", wait_for=0),
        RewardNormalizer(),
        UpdateWeights(trainer.collector),
        ReplayBufferTrainer(transitions_buffer(40, batch_size=4), flatten_tensordicts=True),
        LogValidationReward(
            record_interval=100, record_frames=3, environment=env,
            policy_exploration=lambda td: td.set("action", env.action_spec.rand()),
        ),
    ]  # fmt: skip


def sac_with_hooks(**arguments: Any) -> Trainer:
    plan = off_policy_plan()
    trainer = Trainer(plan, **{**sac_parts(plan), "buffer": None}, **arguments)
    for hook in hooks_with_state(trainer):
        trainer.add(hook)
    return trainer


def test_checkpoint_restores_hook_state(tmp_path):
    first = sac_with_hooks(folder=tmp_path)
    first.run()
    again = sac_with_hooks().load(first.last_checkpoint)
    names = set(first.registered_modules)
    assert {"lr_scheduler", "reward_normalizer", "replay_buffer", "early_stopping"} <= names
    for name in names:
        before = first.registered_modules[name].state_dict()
        assert_same(again.registered_modules[name].state_dict(), before, name)
    assert again.registered_modules["count_frames_log"].frame_count == 40


def test_run_with_torchrl_hooks_resumes_exactly(tmp_path):
    whole = sac_with_hooks()
    whole.run()
    broken = sac_with_hooks(folder=tmp_path)
    broken.register_op(
        "post_steps", lambda: broken.request_stop() if broken.policy_steps == 20 else None
    )
    broken.run()
    resumed = sac_with_hooks().load(broken.last_checkpoint)
    resumed.run()
    assert_equal(weights(resumed), weights(whole))
