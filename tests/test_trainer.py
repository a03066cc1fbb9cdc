"""The trainer does what its plan says, tells what it did, and ends cleanly whatever happens."""

from __future__ import annotations

import contextlib
import functools
import math
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.data import (
    LazyTensorStorage,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from torchrl.envs import Transform
from torchrl.objectives import SoftUpdate

from kit.buffers import (
    PrioritizedSampler,
    ReplayMinibatches,
    RolloutMinibatches,
    make_replay_buffer,
)
from kit.collectors import TensorCollector, VectorCollector
from kit.envs import EnvError, make_env
from kit.hooks import BestPolicy, Console, Evaluator, Hook, NonFiniteError, StopWhen
from kit.logging import LoggerError
from kit.logging.metrics_recorder import episode_columns
from kit.modules import make_actor
from kit.steps import SettingError
from kit.trainer import PlanMismatchError, Trainer
from kit.trainer.checkpoint import Checkpoints
from kit.trainer.stages import HookError
from kit.update import Update
from tests.errors import raises_setting
from tests.tiny import (
    Rows,
    Scripted,
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
)

ON_POLICY = {
    "whole minibatches": on_policy_plan(),
    "uneven minibatches": on_policy_plan(minibatch_size=6),
    "last one merged": on_policy_plan(minibatch_size=6, last_minibatch="merge"),
    "last one dropped": on_policy_plan(minibatch_size=6, last_minibatch="drop"),
    "carried over": on_policy_plan(minibatch_size=6, last_minibatch="carry"),
    "accumulated": on_policy_plan(minibatch_size=6, minibatches_per_gradient_step=2),
    "one step per epoch": on_policy_plan(minibatch_size=6, minibatches_per_gradient_step=None),
    "a batch at once": on_policy_plan(minibatch_size=None),
    "learning starts": on_policy_plan(learning_starts=32),
    "newest only": on_policy_plan(train_on_newest=10),
    "few minibatches": on_policy_plan(minibatches_per_epoch=1),
    "sequences": on_policy_plan(sequence_length=4, minibatch_size=2),
    "prefill": on_policy_plan(total_policy_steps=72, prefill_steps=8),
    "prefill in first batch": on_policy_plan(
        total_policy_steps=72, prefill_steps=8, prefill_in_first_batch=True
    ),
    "fixed": on_policy_plan(update_epochs=None, gradient_steps_per_iteration=3),
    "no training": on_policy_plan(update_epochs=None, minibatch_size=None),
}
OFF_POLICY = {
    "ratio 1": off_policy_plan(),
    "ratio 1/4": off_policy_plan(replay_ratio="1/4"),
    "ratio 1/3": off_policy_plan(replay_ratio="1/3"),
    "ratio 2.5": off_policy_plan(replay_ratio=2.5),
    "ratio 2/7 in batches": off_policy_plan(replay_ratio="2/7", num_envs=2, steps_per_env=2),
    "pretrain": off_policy_plan(pretrain_steps=7),
    "accumulated": off_policy_plan(minibatches_per_gradient_step=3),
    "fixed": off_policy_plan(replay_ratio=None, gradient_steps_per_iteration=2),
    "learns at once": off_policy_plan(learning_starts=0),
    "never learns": off_policy_plan(learning_starts=1_000),
    "prefill": off_policy_plan(prefill_steps=5),
    "prefill is the first iteration": off_policy_plan(prefill_steps=5, prefill_is_iteration=True),
}


# ---------------------------------------------------------------------- plan and ledger
def counts_by_iteration(trainer: Trainer) -> list[dict[str, int]]:
    """Register an observer that notes the counters of every iteration, and run."""
    seen: list[dict[str, int]] = []
    trainer.register_op("post_steps", lambda: seen.append(trainer.ledger.counters()))
    trainer.run()
    return seen


@pytest.mark.parametrize(
    ("plan", "parts_of"),
    [pytest.param(plan, ppo_parts, id=f"ppo, {name}") for name, plan in ON_POLICY.items()]
    + [pytest.param(plan, sac_parts, id=f"sac, {name}") for name, plan in OFF_POLICY.items()],
)
def test_ledger_matches_plan_after_every_iteration(plan, parts_of):
    trainer = Trainer(plan, **parts_of(plan))
    seen = counts_by_iteration(trainer)
    assert len(seen) == plan.iterations
    for iteration, counted in enumerate(seen, start=1):
        planned = plan.after(iteration)
        for name in ("policy_steps", "random_policy_steps", "gradient_steps", "samples"):
            assert counted[name] == getattr(planned, name), (iteration, name)
    assert trainer.ledger.policy_steps == plan.total_policy_steps
    assert trainer.ledger.env_steps == plan.total_policy_steps
    assert trainer.ledger.compare(plan) == []


def memory_of_batches(trainer):
    """Addresses of the batches of a run, as the trainer gets them."""
    addresses, next_batch = [], trainer.batches.next

    def looking():
        batch = next_batch()
        addresses.append(batch["observation"].data_ptr())
        return batch

    trainer.batches.next = looking
    trainer.run()
    return addresses


def test_batches_share_storage_when_no_part_retains_them():
    trainer = sac_trainer()
    addresses = memory_of_batches(trainer)
    assert (len(addresses), len(set(addresses[12:]))) == (40, 1)


class OwnReplay(ReplayMinibatches):
    """Behaves as its parent."""


class Looks:
    keeps_batches = False

    def register(self, trainer, name="looks"):
        trainer.register_op("batch_process", self.look)

    def look(self, batch):
        assert batch.numel()


def test_batches_share_storage_when_custom_parts_allow_it():
    buffer = OwnReplay(sac_parts(off_policy_plan())["buffer"].buffer)
    addresses = memory_of_batches(sac_trainer(buffer=buffer, hooks=[Looks()]))
    assert len(set(addresses[12:])) == 1


@pytest.mark.parametrize("stage", ["batch_process", "pre_epoch", "post_steps_log"])
def test_hook_batches_are_not_overwritten(stage):
    kept = []
    trainer = sac_trainer()
    trainer.register_op(stage, lambda batch: kept.append((batch, batch.clone())))
    memory_of_batches(trainer)
    assert len(kept) == 40
    for batch, copy in kept:
        assert_same(batch.to_dict(), copy.to_dict())


@pytest.mark.parametrize("stage", ["batch_process", "pre_epoch"])
@pytest.mark.parametrize("other", [lambda b: b[:1], lambda b: torch.cat([b, b])])
def test_trainer_rejects_hook_that_changes_transition_count(stage, other):
    trainer = ppo_trainer(on_policy_plan())
    trainer.register_op(stage, other)
    with raises_setting("stage"):
        trainer.run()


class KeepingTransform(Transform):
    """Keeps the transitions that a replay buffer stores."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def _inv_call(self, batch):
        self.kept.append((batch, batch.clone()))
        return batch


def test_buffer_transform_batches_are_not_overwritten():
    transform = KeepingTransform()
    buffer = transitions_buffer(batch_size=4)
    buffer.append_transform(transform)
    sac_trainer(buffer=buffer).run()
    assert len(transform.kept) == 40
    for batch, copy in transform.kept:  # the buffer adds an index to what it has stored
        assert_same(batch.select(*copy.keys()).to_dict(), copy.to_dict())


def test_advantage_batches_are_not_overwritten():
    kept = []

    def advantage(batch):
        kept.append((batch, batch.clone()))
        return batch

    plan = off_policy_plan(replay_ratio=None, gradient_steps_per_iteration=1, steps_per_env=4)
    trainer = sac_trainer(plan, advantage=advantage)
    trainer.run()
    assert len(kept) == trainer.ledger.gradient_steps > 0
    for batch, copy in kept:
        assert_same(batch.to_dict(), copy.to_dict())


class Keeping(ReplayMinibatches):
    """A buffer of one's own that keeps what it is given, and reads what a loss has written."""

    copies = False  # it keeps the batches themselves
    reads_minibatches = reads_loss_outputs = True

    def __init__(self, of):
        super().__init__(of.buffer)
        self.kept, self.errors, self.entries = [], 0, set()

    def extend(self, batch, keys=()):
        self.kept.append((batch, batch.clone()))
        super().extend(batch, keys)

    def update_priority(self, minibatch):
        self.errors += "td_error" in minibatch.keys()
        self.entries.add(frozenset(map(str, minibatch.keys(True, True))))


def test_custom_buffer_receives_own_batches_and_all_entries():
    plan = off_policy_plan()
    parts = sac_parts(plan)
    parts["update"].groups[0].optimizer.param_groups[0]["fused"] = True
    buffer = Keeping(parts["buffer"])
    ledger = Trainer(plan, **{**parts, "buffer": buffer}).run()
    for batch, copy in buffer.kept:
        assert_same(batch.to_dict(), copy.to_dict())
    assert buffer.errors == ledger.gradient_steps > 0
    (entries,) = buffer.entries
    assert "('next', 'truncated')" in entries


class Curious(nn.Module):
    """A loss that reads what hooks have added to batches as soon as it is told to."""

    def __init__(self, weights):
        super().__init__()
        self.weights, self.reads = weights, False
        self.found = []

    def forward(self, minibatch):
        loss = minibatch["next", "reward"].mean() * sum(one.sum() for one in self.weights)
        if self.reads:
            self.found.append("extra" in minibatch.keys())
        return TensorDict({"loss": loss})


@pytest.mark.parametrize(
    ("plan", "parts_of", "stage"),
    [
        (on_policy_plan(), ppo_parts, "post_optim"),
        (on_policy_plan(), ppo_parts, "post_epoch"),
        (on_policy_plan(), ppo_parts, "post_epoch_log"),
        (on_policy_plan(), ppo_parts, "pre_epoch_log"),
        (off_policy_plan(steps_per_env=4, learning_starts=4), sac_parts, "post_optim"),
    ],
)
def test_loss_finds_all_entries_when_hook_changes_it(plan, parts_of, stage):
    parts = parts_of(plan)
    loss = Curious(nn.ParameterList(parts["update"].loss_module.parameters()))
    parts["update"] = Update(loss, torch.optim.SGD(loss.parameters(), lr=1e-3))
    trainer = Trainer(plan, **parts)
    trainer.register_op("batch_process", lambda batch: batch.set("extra", batch["next", "done"]))

    def look(*_):
        loss.reads = loss.reads or trainer.ledger.gradient_steps >= 6

    trainer.register_op(stage, look)
    trainer.run()
    assert loss.found
    assert all(loss.found)


def test_on_policy_batches_share_storage_when_reuse_is_set():
    plan = on_policy_plan()
    trainer = Trainer(plan, **ppo_parts(plan, reuse=True))
    assert len(set(memory_of_batches(trainer))) == 1


def test_update_writes_loss_outputs_after_run():
    trainer = sac_trainer()
    trainer.run()
    minibatch = trainer.buffer._samples(4, 1)[0]
    trainer.update(minibatch)
    assert "td_error" in minibatch.keys()


def test_batches_stop_sharing_storage_when_hook_is_registered():
    trainer, kept = sac_trainer(), []

    def register():
        if trainer.ledger.iterations == 20:
            trainer.register_op("post_steps_log", lambda batch: kept.append(batch))

    trainer.register_op("post_steps", register)
    addresses = memory_of_batches(trainer)
    assert len(set(addresses[12:20])) == 1
    own = {batch["observation"].data_ptr() for batch in kept[1:]}
    assert len(own) == len(kept) - 1 == 20


def halved(batch: TensorDictBase) -> TensorDictBase:
    return batch.set(("next", "reward"), batch["next", "reward"] / 2)


def test_prefill_in_first_batch_is_processed_once():
    plan = on_policy_plan(total_policy_steps=72, prefill_steps=8, prefill_in_first_batch=True)
    trainer, rewards, logged = ppo_trainer(plan, env=Scripted), [], []
    trainer.register_op("batch_process", halved)
    trainer.register_op("pre_steps_log", lambda batch: logged.append(batch.numel()))
    trainer.register_op("post_steps_log", lambda batch: rewards.append(batch["next", "reward"]))
    trainer.run()
    assert rewards[0].flatten().tolist() == [0.5] * 24
    assert logged == [8, 16, 16, 16, 16]


@pytest.mark.parametrize("changes", [{}, {"replay_ratio": "1/2"}, {"prefill_steps": 5}])
def test_pre_epoch_hook_changes_all_stored_transitions(changes):
    trainer = sac_trainer(off_policy_plan(**changes))
    trainer.register_op("pre_epoch", lambda batch: batch.set("changed", torch.ones(batch.shape)))
    trainer.run()
    assert trainer.replay_buffer[:]["changed"].tolist() == [1.0] * 40


def test_trainer_truncates_open_episodes_of_prefilled_buffer():
    parts = sac_parts(plan := off_policy_plan())
    buffer = make_replay_buffer(1_000, 4, n_step=3, gamma=0.99)
    other = collector_of(plan, make_env("Pendulum-v1", plan.num_envs, seed=9), None)
    buffer.extend(before := other.collect())
    Trainer(plan, **{**parts, "buffer": buffer}).run()
    newest = buffer.buffer[:]["observation"][:, None] == before["observation"][:, -1]
    (places,) = newest.all(-1).any(-1).nonzero(as_tuple=True)
    found = buffer.buffer[:][places]
    assert found["steps_to_next_obs"].tolist() == [1] * plan.num_envs
    assert found["next", "truncated"].all()
    assert torch.equal(found["next", "observation"], before["next", "observation"][:, -1])


def test_prefill_is_truncated_when_env_resets_before_batch():
    plan = on_policy_plan(total_policy_steps=72, prefill_steps=8, prefill_in_first_batch=True)
    trainer, given = ppo_trainer(plan, env=functools.partial(Scripted, length=50)), []

    def reset(batch):
        if trainer.policy_steps == 8:
            trainer.collector.env.reset()

    trainer.register_op("pre_steps_log", reset)
    trainer.register_op("post_steps_log", given.append)
    trainer.run()
    steps = 8 // plan.num_envs
    assert given[0]["observation"][:, steps].eq(0).all()
    assert given[0]["next", "truncated"][..., 0].nonzero()[:, 1].tolist() == [steps - 1] * 2


class Resets(Hook):
    """Resets the environment of training after the 20th policy step."""

    operations = {"post_steps": "reset"}  # noqa: RUF012

    def __init__(self, how) -> None:
        self.how = how

    def reset(self) -> None:
        if self.trainer.policy_steps == 20:
            self.how(self.trainer.collector)


@pytest.mark.parametrize("how", [lambda c: c.env.reset(), lambda c: c.set_seed(7)])
@pytest.mark.parametrize("kind", [VectorCollector, TensorCollector])
def test_n_step_transitions_stop_at_reset_by_hook(how, kind):
    buffer = make_replay_buffer(1_000, 4, n_step=3, gamma=0.99)
    plan = off_policy_plan()
    env = make_env("Pendulum-v1", 1, vectorization="tensor")
    parts = sac_parts(plan, env)
    counts = {"frames_per_batch": 1, "total_frames": 40, "init_random_frames": 10}
    parts["collector"] = kind(env, parts["collector"].policy, **counts)
    trainer = Trainer(plan, **{**parts, "buffer": buffer}, hooks=[Resets(how)])
    trainer.run()
    found = buffer.buffer[:]
    assert found["steps_to_next_obs"].tolist()[16:21] == [3, 3, 2, 1, 3]
    assert found["next", "truncated"].nonzero()[:, 0].tolist() == [17, 18, 19]


def test_ledger_counts_update_epochs_with_replay_buffer():
    plan = on_policy_plan(update_epochs=3)
    trainer = ppo_trainer(plan, buffer=make_replay_buffer(16, 8))
    trainer.run()
    assert trainer.ledger.update_epochs == plan.iterations * 3
    assert trainer.ledger.gradient_steps == plan.iterations * 6


def test_update_epoch_visits_every_transition_once():
    plan = on_policy_plan(minibatch_size=6, update_epochs=3)
    trainer = ppo_trainer(plan)
    rows: list[torch.Tensor] = []

    def number(batch):
        batch["row"] = torch.arange(batch.numel()).reshape(batch.shape)

    trainer.register_op("batch_process", number)
    trainer.register_op("process_optim_batch", lambda m: rows.append(m["row"].clone()))
    trainer.run()
    for iteration in range(plan.iterations):
        for epoch in range(3):
            start = (iteration * 3 + epoch) * 3
            assert [len(r) for r in rows[start : start + 3]] == [6, 6, 4]
            assert torch.cat(rows[start : start + 3]).sort().values.tolist() == list(range(16))
    orders = {tuple(torch.cat(rows[n : n + 3]).tolist()) for n in range(0, len(rows), 3)}
    assert len(orders) == plan.iterations * 3


def test_ledger_counts_actual_env_steps_with_action_repeat():
    plan = on_policy_plan(action_repeat=3)
    trainer = ppo_trainer(plan, env=lambda: Scripted(length=10))
    trainer.run()
    # Episodes of 10 env steps: four actions, the last of which is held for one step.
    whole, rest = divmod(plan.total_policy_steps // 2, 4)
    assert trainer.ledger.env_steps == 2 * (whole * 10 + rest * 3)
    assert trainer.ledger.episodes == 2 * whole


def test_run_raises_when_counts_differ_from_plan():
    trainer = ppo_trainer()
    trainer.register_op("process_optim_batch", lambda minibatch: minibatch[:3])
    with pytest.raises(PlanMismatchError, match=r"samples: planned 128, counted 48"):
        trainer.run()


@pytest.mark.parametrize("stage", ["pre_epoch", "process_optim_batch"])
def test_trainer_rejects_hook_that_removes_advantage(stage):
    trainer = ppo_trainer()
    trainer.register_op(stage, lambda batch: batch.exclude("advantage"))
    with raises_setting("stage"):
        trainer.run()


def test_hooks_may_remove_unused_or_restored_entries():
    on_policy, off_policy = ppo_trainer(), sac_trainer()
    on_policy.register_op("pre_epoch", lambda batch: batch.exclude("next"))
    on_policy.register_op("process_optim_batch", lambda m: m.exclude("state_value"))
    on_policy.run()
    reward = ("next", "reward")
    off_policy.register_op("pre_epoch", lambda batch: batch.exclude(reward))
    off_policy.register_op("process_optim_batch", lambda m: m.set(reward, m["next", "done"] * 1.0))
    off_policy.run()


def test_trainer_rejects_collector_with_other_frame_counts():
    plan = on_policy_plan()
    parts = ppo_parts(plan)
    env, policy = make_env("CartPole-v1", 2), parts["collector"].policy
    parts["collector"] = VectorCollector(env, policy, frames_per_batch=32)
    with pytest.raises(SettingError, match=r"32 policy steps instead of 16"):
        Trainer(plan, **parts).run()
    env = make_env("CartPole-v1", 2)
    parts["collector"] = VectorCollector(env, policy, frames_per_batch=16, total_frames=32)
    with raises_setting("collector"):
        Trainer(plan, **parts).run()


def test_trainer_rejects_collector_without_random_steps():
    class NeverAtRandom(VectorCollector):
        random_policy_steps = property(lambda self: 0, lambda self, steps: None)

    plan = off_policy_plan(random_steps=6)
    parts, rows = sac_parts(plan), Rows()
    env, policy = parts["collector"].env, parts["collector"].policy
    amounts = {"steps_per_env": plan.steps_per_env, "init_random_frames": 6}
    parts["collector"] = NeverAtRandom(env, policy, **amounts)
    trainer = Trainer(plan, **parts, logger=rows, log_every=4)
    with raises_setting("collector"):
        trainer.run()
    assert rows.rows == []


def test_trainer_rejects_untrained_policy_unless_frozen():
    plan = on_policy_plan()
    parts, another = ppo_parts(plan), ppo_parts(plan)
    with raises_setting("policy"):
        Trainer(plan, **parts | {"update": another["update"]})
    frozen = another["collector"].policy.requires_grad_(False)
    parts["collector"] = collector_of(plan, make_env("CartPole-v1", 2), frozen)
    Trainer(plan, **parts).run()


def test_trainer_rejects_advantage_of_untrained_critic():
    plan = on_policy_plan()
    advantage = ppo_parts(plan)["advantage"]
    with raises_setting("value_network"):
        Trainer(plan, **ppo_parts(plan) | {"advantage": advantage})


def test_trainer_rejects_evaluator_of_untrained_policy():
    plan = on_policy_plan(final_evaluation=True, evaluation_episodes=1)
    another = make_actor(make_env("CartPole-v1"), (8,))
    evaluate = Evaluator(make_env("CartPole-v1"), another, episodes=1)
    with raises_setting("policy"):
        Trainer(plan, **ppo_parts(plan), evaluate=evaluate)


# ---------------------------------------------------------------------- evaluation
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"evaluation_every": 16, "final_evaluation": True}, [16, 32, 48, 64]),
        ({"evaluation_every": 20, "final_evaluation": True}, [32, 48, 64]),
        ({"evaluation_every": 48, "final_evaluation": True}, [48, 64]),
        ({"evaluation_every": 48}, [48]),
        ({"evaluation_every": 8}, [16, 32, 48, 64]),
        ({"evaluation_every_iterations": 3}, [48]),
        ({"initial_evaluations": 2, "final_evaluation": True}, [0, 0, 64]),
        ({"initial_evaluations": 1, "evaluation_every": 64}, [0, 64]),
    ],
)
def test_evaluations_happen_when_planned(settings, expected):
    plan = on_policy_plan(evaluation_episodes=2, **settings)
    parts = ppo_parts(plan, env=Scripted)
    trainer = Trainer(plan, **parts, evaluate=evaluator_for(parts, plan, Scripted))
    when: list[int] = []
    trainer.register_op("evaluation", lambda result, is_best: when.append(trainer.policy_steps))
    trainer.run()
    assert when == expected
    assert trainer.ledger.evaluations == len(expected)
    assert trainer.ledger.evaluation_episodes == 2 * len(expected)


def test_evaluation_metrics_are_in_row_of_their_policy_step():
    plan = on_policy_plan(evaluation_every=32, evaluation_episodes=2)
    parts, rows = ppo_parts(plan, env=Scripted), Rows()
    evaluate = evaluator_for(parts, plan, Scripted)
    Trainer(plan, **parts, evaluate=evaluate, logger=rows, log_every=16).run()
    assert [row["policy_steps"] for row in rows.rows] == [16, 32, 48, 64]
    returns = [row.get("evaluation/return") for row in rows.rows]
    assert returns == [None, 5.0, None, 5.0]
    assert rows.rows[1]["evaluation/length"] == 5.0


def test_stop_at_setup_ends_run_before_any_step(tmp_path):
    plan = off_policy_plan(prefill_steps=5, initial_evaluations=1)
    parts = sac_parts(plan)
    parts["evaluate"] = evaluator_for(parts, plan, "Pendulum-v1")
    trainer = Trainer(plan, **parts, folder=tmp_path)
    trainer.register_op("setup", lambda: trainer.request_stop("enough"))
    ledger = trainer.run()
    assert (ledger.policy_steps, ledger.evaluations, trainer.stop_reason) == (0, 0, "enough")
    assert trainer.last_checkpoint is None


def test_stop_in_prefill_ends_run_before_evaluation():
    plan = off_policy_plan(prefill_steps=5, initial_evaluations=1)
    parts = sac_parts(plan)
    trainer = Trainer(plan, **parts, evaluate=evaluator_for(parts, plan, "Pendulum-v1"))
    trainer.register_op("batch_process", lambda batch: trainer.request_stop("enough"))
    ledger = trainer.run()
    assert (ledger.policy_steps, ledger.evaluations, trainer.stop_reason) == (5, 0, "enough")


# ---------------------------------------------------------------------- ends before the plan
def test_stop_request_ends_run_after_current_iteration():
    trainer = ppo_trainer()
    trainer.register_op(
        "pre_steps_log",
        lambda batch: trainer.request_stop("enough") if trainer.policy_steps == 32 else None,
    )
    ledger = trainer.run()
    assert (ledger.iterations, ledger.policy_steps, ledger.gradient_steps) == (2, 32, 8)
    assert trainer.stop_reason == "enough"


@pytest.mark.parametrize("checkpoint_every", [16, 64])
def test_stop_when_metric_is_reached_saves_checkpoint(tmp_path, checkpoint_every):
    plan, rows = on_policy_plan(), Rows()
    stop = StopWhen("episode/return", reached=5.0)
    trainer = Trainer(
        plan, **ppo_parts(plan, env=Scripted), hooks=[stop], logger=rows, folder=tmp_path,
        log_every=16, checkpoint_every=checkpoint_every,
    )  # fmt: skip
    trainer.run()
    assert trainer.ledger.policy_steps == 16
    assert trainer.stop_reason == "episode/return reached 5"
    assert Checkpoints.latest(tmp_path / "checkpoints") == trainer.last_checkpoint
    assert "16" in trainer.last_checkpoint.name


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"minibatch_size": 6},
        {"minibatch_size": 6, "minibatches_per_gradient_step": 2},
        {"minibatch_size": 6, "minibatches_per_gradient_step": None},
        {"sequence_length": 4, "minibatch_size": 3},
    ],
)
def test_ledger_counts_gradient_steps_skipped_by_hook(settings):
    plan = on_policy_plan(update_epochs=3, **settings)
    trainer = ppo_trainer(plan)
    trainer.register_op(
        "post_epoch",
        lambda: trainer.skip_rest_of_update() if trainer.policy_steps >= 48 else None,
    )
    ledger = trainer.run()
    assert ledger.skipped_gradient_steps > 0
    assert ledger.compare(plan) == []
    assert ledger.update_epochs == 3 + 3 + 1 + 1
    per_epoch = plan.epoch_gradient_steps(16) // 3
    assert ledger.skipped_gradient_steps == 2 * 2 * per_epoch
    assert ledger.local_skipped_samples + ledger.samples == plan.samples_after(plan.iterations)


@pytest.mark.parametrize("epochs", [1, 2])
def test_ledger_matches_plan_when_skipping_carried_minibatches(epochs):
    plan = on_policy_plan(
        total_policy_steps=80, steps_per_env=20, minibatch_size=24, last_minibatch="carry",
        update_epochs=3,
    )  # fmt: skip
    trainer = ppo_trainer(plan)
    made: list[int] = []

    def leave_the_rest_out() -> None:
        made.append(trainer.ledger.iterations)
        if made == [0] * epochs:
            trainer.skip_rest_of_update()

    trainer.register_op("post_epoch", leave_the_rest_out)
    ledger = trainer.run()
    assert ledger.gradient_steps == 2 * 3 - (3 - epochs)
    assert ledger.compare(plan) == []


# ---------------------------------------------------------------------- rows
def test_row_losses_are_means_over_steps_since_last_row():
    plan, rows = on_policy_plan(update_epochs=3), Rows()
    trainer = Trainer(plan, **ppo_parts(plan), logger=rows, log_every=32)
    losses: list[float] = []
    trainer.register_op(
        "post_optim", lambda: losses.append(float(trainer.last_metrics["loss_objective"]))
    )
    trainer.run()
    per_row = 2 * 3 * 2
    assert len(losses) == 2 * per_row
    for number, row in enumerate(rows.rows):
        mine = losses[number * per_row : (number + 1) * per_row]
        assert row["train/loss_objective"] == pytest.approx(sum(mine) / per_row, abs=1e-7)


def test_rows_contain_all_counters_and_recent_episodes():
    plan, rows = on_policy_plan(), Rows()
    trainer = Trainer(plan, **ppo_parts(plan, env=Scripted), logger=rows, log_every=32)
    ledger = trainer.run()
    assert [row["policy_steps"] for row in rows.rows] == [32, 64]
    for row in rows.rows:
        assert row.keys() >= ledger.counters().keys()
        assert row["episode/return"] == row["episode/length"] == 5.0
    assert rows.rows[-1]["episodes"] == 2 * (32 // 5)
    assert ledger.counters().items() <= rows.rows[-1].items()
    assert rows.closed == 1
    assert rows.texts["plan"] == plan.table()
    assert rows.texts["ledger"] == plan.table(ledger)


# ---------------------------------------------------------------------- parts that do not fit
def test_trainer_rejects_planned_evaluations_without_evaluator():
    for settings in ({"final_evaluation": True}, {"evaluation_every": 16}):
        with raises_setting("evaluate"):
            ppo_trainer(on_policy_plan(**settings))
    with raises_setting("evaluate"):
        ppo_trainer(on_policy_plan(evaluation_every_iterations=2))


def test_trainer_rejects_evaluator_with_other_episode_count():
    plan = on_policy_plan(final_evaluation=True, evaluation_episodes=3)
    parts = ppo_parts(plan)
    evaluate = evaluator_for(parts, plan.replace(evaluation_episodes=2), "CartPole-v1")
    with raises_setting("evaluate"):
        Trainer(plan, **parts, evaluate=evaluate)


def test_trainer_fills_in_counts_missing_from_parts():
    plan = off_policy_plan(final_evaluation=True, evaluation_episodes=2)
    parts = sac_parts(plan)
    env, policy = make_env("Pendulum-v1", 1, seed=0), parts["collector"].policy
    collector = VectorCollector(env, policy, steps_per_env=1)
    evaluate = Evaluator(make_env("Pendulum-v1", 2, max_episode_steps=5), policy)
    parts |= {"collector": collector, "buffer": make_replay_buffer(100), "evaluate": evaluate}
    ledger = Trainer(plan, **parts).run()
    assert ledger.random_policy_steps == plan.random_steps_until(40) > 0
    assert (ledger.samples, ledger.evaluation_episodes) == (31 * 4, 2)


def test_run_rejects_planned_gradient_steps_without_update():
    plan = on_policy_plan()
    parts = ppo_parts(plan)
    update = parts.pop("update")
    trainer = Trainer(plan, **parts, loss_module=update.loss_module)
    with raises_setting("update"):
        trainer.run()
    assert trainer.ledger.policy_steps == 0


# ---------------------------------------------------------------------- a clean end
def test_run_names_raising_hook_and_closes_parts(tmp_path):
    plan, rows = on_policy_plan(), Rows()
    trainer = Trainer(
        plan, **ppo_parts(plan), logger=rows, folder=tmp_path, log_every=16, checkpoint_every=16
    )
    ended = []

    class Fragile:
        def look(self):
            if trainer.policy_steps == 48:
                raise KeyError("reward")

    trainer.register_op("post_steps", Fragile().look)
    trainer.register_op("shutdown", lambda: ended.append(True))
    with pytest.raises(
        HookError, match=r"hook Fragile\.look at stage 'post_steps' raised KeyError"
    ):
        trainer.run()
    assert [row["policy_steps"] for row in rows.rows] == [16, 32]
    assert "32" in Checkpoints.latest(tmp_path / "checkpoints").name
    assert rows.closed == 1
    assert ended == [True]
    assert trainer.collector.closed


@pytest.mark.parametrize("how", ["stopped", "raised"])
def test_ended_run_continues_only_from_checkpoint(how, tmp_path):
    trainer = ppo_trainer(folder=tmp_path, checkpoint_every=16)

    def end():
        if trainer.policy_steps == 32 and how == "raised":
            raise KeyError("reward")
        if trainer.policy_steps == 32:
            trainer.request_stop()

    trainer.register_op("post_steps", end)
    with contextlib.suppress(HookError):
        trainer.run()
    with raises_setting("trainer"):
        trainer.run()
    again = ppo_trainer(folder=tmp_path, resume_from=trainer.last_checkpoint)
    assert again.run().policy_steps == 64
    assert again.run().policy_steps == 64  # there is nothing left to do


@pytest.mark.parametrize("stage", ["post_optim", "post_steps"])
def test_interrupt_in_last_iteration_saves_no_final_checkpoint(stage, tmp_path):
    trainer = ppo_trainer(folder=tmp_path, checkpoint_every=32)

    def interrupt():
        if trainer.policy_steps == 64:
            raise KeyboardInterrupt

    trainer.register_op(stage, interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    with raises_setting("trainer"):
        trainer.run()
    again = ppo_trainer(folder=tmp_path, resume_from=Checkpoints.latest(tmp_path / "checkpoints"))
    assert again.policy_steps == 32
    assert again.run().policy_steps == 64


def test_hook_error_reports_stop_iteration():
    trainer = ppo_trainer()
    trainer.register_op("pre_epoch", lambda *_: next(iter([])))
    with pytest.raises(HookError, match="at stage 'pre_epoch' raised StopIteration"):
        trainer.run()


def test_first_error_is_raised_when_shutdown_also_fails():
    rows = Rows()
    trainer = ppo_trainer(logger=rows)

    def fails(what):
        raise RuntimeError(what)

    trainer.register_op("post_steps", lambda: fails("first"))
    trainer.register_op("shutdown", lambda: fails("second"))
    with pytest.raises(HookError, match="first") as caught:
        trainer.run()
    assert "second" in caught.value.__notes__[0]
    assert rows.closed == 1
    assert trainer.collector.closed


def test_error_in_shutdown_hook_is_raised_after_closing_parts():
    rows = Rows()
    trainer = ppo_trainer(logger=rows)
    trainer.register_op("shutdown", lambda: 1 / 0)
    with pytest.raises(HookError, match="at stage 'shutdown' raised ZeroDivisionError"):
        trainer.run()
    assert trainer.ledger.policy_steps == 64
    assert rows.closed == 1
    assert trainer.collector.closed


def test_failed_logger_start_closes_collector():
    class Broken(Rows):
        def start(self):
            raise OSError("no space left")

    rows = Rows()
    trainer = ppo_trainer(logger=[rows, Broken()])
    with pytest.raises(LoggerError, match="logger Broken raised OSError: no space left"):
        trainer.run()
    assert trainer.collector.closed
    assert rows.closed == 1


# ---------------------------------------------------------------------- training without updates
def test_trainer_only_collects_when_plan_has_no_updates():
    plan = on_policy_plan(update_epochs=None, minibatch_size=None, random_steps=64)
    env = make_env("CartPole-v1", 2)
    trainer = Trainer(plan, collector=collector_of(plan, env, None))
    ledger = trainer.run()
    assert (ledger.policy_steps, ledger.gradient_steps) == (64, 0)
    assert ledger.random_policy_steps == 64


# ---------------------------------------------------------------------- contradictions
def test_trainer_rejects_missing_advantage_estimator():
    plan = on_policy_plan()
    parts = ppo_parts(plan)
    del parts["advantage"]
    with raises_setting("advantage"):
        Trainer(plan, **parts)


@pytest.mark.parametrize("made", [lambda batch: batch[:, :3], lambda batch: batch])
def test_trainer_rejects_estimator_with_unusable_batch(made):
    trainer = ppo_trainer(advantage=made)
    with raises_setting("advantage"):
        trainer.run()
    assert trainer.ledger.gradient_steps == 0


def test_estimator_may_write_custom_advantage_key():
    plan = on_policy_plan()
    parts = ppo_parts(plan)
    for one in (parts["advantage"], parts["update"].loss_module):
        one.set_keys(advantage="mine")
    assert Trainer(plan, **parts).run().gradient_steps == 16


def test_trainer_rejects_other_number_of_environments():
    plan = on_policy_plan(num_envs=4, steps_per_env=4)  # 16, as 2 x 8
    with raises_setting("env.num_envs"):
        Trainer(plan, **ppo_parts(on_policy_plan()))


@pytest.mark.parametrize("name", ["action_repeat", "max_episode_steps"])
def test_trainer_rejects_environments_with_other_time_settings(name):
    with raises_setting(f"env.{name}"):
        Trainer(on_policy_plan(**{name: 100}), **ppo_parts(on_policy_plan()))


def test_trainer_rejects_world_size_in_single_process():
    plan = on_policy_plan(total_policy_steps=128, world_size=2)
    with raises_setting("world_size"):
        Trainer(plan, **ppo_parts(on_policy_plan()))


def test_run_rejects_planned_samples_without_buffer():
    plan = off_policy_plan()
    trainer = Trainer(plan, **{**sac_parts(plan), "buffer": None})
    with raises_setting("buffer"):
        trainer.run()
    assert trainer.ledger.policy_steps == 0


@pytest.mark.parametrize("parts_of", [ppo_parts, sac_parts])
def test_trainer_rejects_buffer_smaller_than_batch(parts_of):
    sizes = {"num_envs": 2, "steps_per_env": 8, "minibatch_size": 4, "total_policy_steps": 64}
    plan = (on_policy_plan if parts_of is ppo_parts else off_policy_plan)(**sizes)
    with raises_setting("buffer_size"):
        Trainer(plan, **{**parts_of(plan), "buffer": make_replay_buffer(8, 4)})


def test_trainer_rejects_on_policy_buffer_larger_than_batch():
    plan = on_policy_plan(num_envs=2, steps_per_env=8, minibatch_size=4, total_policy_steps=64)
    with raises_setting("buffer_size"):
        Trainer(plan, **{**ppo_parts(plan), "buffer": make_replay_buffer(17, 4)})
    trainer = Trainer(plan, **{**ppo_parts(plan), "buffer": make_replay_buffer(16, 4)})
    assert trainer.run().samples == 2 * 64  # each is trained on in both epochs


# ---------------------------------------------------------------------- what a plain trainer does
def test_default_trainer_prints_plan_progress_and_ledger(capsys):
    plan = on_policy_plan()
    parts = ppo_parts(plan)
    del parts["progress"]
    trainer = Trainer(plan, **parts)
    trainer.run()
    shown = capsys.readouterr().out
    assert plan.table() in shown
    assert "64 policy steps  100%" in shown
    assert plan.table(trainer.ledger) in shown


def test_progress_option_sets_title_or_disables_output(capsys):
    ppo_trainer(progress="a small run").run()
    assert capsys.readouterr().out.startswith("\na small run\n")
    ppo_trainer(progress=False).run()
    assert capsys.readouterr().out == ""


def test_custom_console_replaces_default_console(capsys):
    ppo_trainer(progress=True, hooks=[Console("mine")]).run()
    assert capsys.readouterr().out.count("transitions trained on") == 2  # plan and ledger


def with_nan_critic(**parts) -> Trainer:
    """One iteration whose losses are NaN."""
    trainer = ppo_trainer(on_policy_plan(total_policy_steps=16), **parts)
    with torch.no_grad():
        for weight in trainer.loss_module.critic_network_params.values(True, True):
            weight.fill_(math.nan)
    return trainer


def test_trainer_raises_on_nan_loss_unless_guard_is_disabled():
    with pytest.raises(NonFiniteError, match="loss_critic is nan"):
        with_nan_critic().run()
    assert with_nan_critic(nan_guard=False).run().policy_steps == 16


def test_nan_weights_raise_non_finite_error_when_loss_fails():
    """Distributions raise before a loss could be NaN."""

    def refusing(module, arguments):
        torch.normal(torch.zeros(1), next(module.actor_network_params.parameters()).mean().exp())

    trainer = ppo_trainer(on_policy_plan(total_policy_steps=16))
    trainer.loss_module.register_forward_pre_hook(refusing)
    with torch.no_grad():
        weight = next(trainer.loss_module.actor_network_params.parameters())
        trainer.register_op("pre_optim_steps", lambda: weight.data.fill_(math.nan))
    with pytest.raises(NonFiniteError, match="after 0 gradient steps a weight is NaN") as raised:
        trainer.run()
    assert "std" in str(raised.value.__cause__)


def test_other_loss_errors_propagate_unchanged():
    def failing(module, arguments):
        raise RuntimeError("no such thing")

    trainer = ppo_trainer(on_policy_plan(total_policy_steps=16))
    trainer.loss_module.register_forward_pre_hook(failing)
    trainer.loss_module.register_parameter("later", torch.nn.UninitializedParameter())
    with pytest.raises(RuntimeError, match="no such thing"):
        trainer.run()


# ---------------------------------------------------------------------- columns
def test_collector_metrics_are_logged_as_columns():
    class Late(VectorCollector):
        def metrics(self):
            return {"collector/staleness": 1.5}

    plan, rows = on_policy_plan(), Rows()
    parts = ppo_parts(plan)
    env, policy = make_env("CartPole-v1", 2), parts["collector"].policy
    parts["collector"] = Late(env, policy, frames_per_batch=16)
    Trainer(plan, **parts, logger=rows, log_every=32).run()
    assert [row["collector/staleness"] for row in rows.rows] == [1.5, 1.5]


def test_episode_info_values_become_columns():
    episodes = [
        SimpleNamespace(episode_return=2.0, length=4, info={"is_success": 1.0, "return": 9.0}),
        SimpleNamespace(episode_return=4.0, length=6, info={"is_success": 0.0, "coins": 3.0}),
        SimpleNamespace(episode_return=6.0, length=5, info={}),
    ]
    columns = episode_columns(episodes)
    assert columns["episode/is_success"] == 0.5
    assert columns["episode/coins"] == 3.0
    assert (columns["episode/return"], columns["episode/length"]) == (4.0, 5.0)


@pytest.mark.parametrize("joins", [{"n_step": 3}, {"store_next_observation": False}, {}], ids=str)
def test_trainer_rejects_reset_at_each_iter_with_joined_steps(joins):
    plan = off_policy_plan()
    parts = sac_parts(plan)
    env, policy = parts["collector"].env, parts["collector"].policy
    parts["collector"] = collector_of(plan, env, policy, reset_at_each_iter=True)
    parts["buffer"] = make_replay_buffer(1_000, plan.minibatch_size, **joins)
    if not joins:
        Trainer(plan, **parts)  # single transitions know nothing of an episode
        return
    with raises_setting("reset_at_each_iter"):
        Trainer(plan, **parts)


# ---------------------------------------------------------------------- parts that do not fit
def test_trainer_rejects_evaluator_on_training_environment():
    plan = on_policy_plan(evaluation_every=16, evaluation_episodes=2)
    parts = ppo_parts(plan)
    collector = parts["collector"]
    shared = Evaluator(collector.env, collector.policy, episodes=2)
    with raises_setting("evaluate"):
        Trainer(plan, **parts, evaluate=shared)


@pytest.mark.parametrize("normalize_observation", [False, True])
def test_trainer_rejects_evaluator_without_training_normalizer(normalize_observation):
    plan = on_policy_plan(evaluation_every=16, evaluation_episodes=2)
    env = make_env("CartPole-v1", plan.num_envs, normalize_observation=True)
    parts = ppo_parts(plan)
    policy = parts["collector"].policy
    parts["collector"] = collector_of(plan, env, policy)
    other = make_env("CartPole-v1", 2, normalize_observation=normalize_observation)
    evaluate = Evaluator(other, policy, episodes=2)
    with raises_setting("evaluate"):
        Trainer(plan, **parts, evaluate=evaluate)
    other.normalizer = env.normalizer
    assert Trainer(plan, **parts, evaluate=evaluate).run().evaluations == 4


def test_trainer_rejects_evaluator_factory_of_training_env():
    plan, one = on_policy_plan(num_envs=1, steps_per_env=16, evaluation_episodes=2), Scripted()
    parts = ppo_parts(plan.replace(evaluation_every=16), env=lambda: one)
    other = Evaluator(make_env(lambda: one, 1), parts["collector"].policy, episodes=2)
    with raises_setting("evaluate"):
        Trainer(plan.replace(evaluation_every=16), **parts, evaluate=other)


def test_run_rejects_used_collector():
    trainer = ppo_trainer()
    trainer.collector.collect()
    with raises_setting("collector"):
        trainer.run()


@pytest.mark.parametrize(
    "change", [{"update_epochs": 3}, {"minibatch_size": 4}, {"total_policy_steps": 32}]
)
def test_trainer_rejects_checkpoint_of_other_plan(tmp_path, change):
    trainer = ppo_trainer(folder=tmp_path)
    trainer.run()
    other = on_policy_plan(**change)
    with raises_setting("resume_from"):
        ppo_trainer(other, resume_from=trainer.last_checkpoint)


def test_longer_plan_continues_finished_run(tmp_path):
    trainer = ppo_trainer(folder=tmp_path)
    trainer.run()
    longer = on_policy_plan(total_policy_steps=128)
    assert ppo_trainer(longer, resume_from=trainer.last_checkpoint).run().policy_steps == 128


@pytest.mark.parametrize(
    "name",
    ["policy_steps", "episode/return", "train/loss_critic", "time/seconds", "evaluation/return"],
)
def test_trainer_rejects_hook_metric_with_taken_name(name):
    plan = on_policy_plan(evaluation_every=32)
    parts = ppo_parts(plan, "CartPole-v1")
    trainer = Trainer(plan, **parts, evaluate=evaluator_for(parts, plan, "CartPole-v1"))
    trainer.register_op("post_steps_log", lambda batch: {name: -7.0})
    with raises_setting("metric"):
        trainer.run()


def test_trainer_rejects_buffer_with_other_minibatch_size():
    with raises_setting("minibatch_size"):
        sac_trainer(buffer=make_replay_buffer(1_000, 8))


def test_run_rejects_sampler_with_too_few_transitions():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=4
    )
    trainer = sac_trainer(off_policy_plan(steps_per_env=10), buffer=buffer)
    with raises_setting("sampler"):
        trainer.run()


def ppo_trainer_of(kind, plan, **changes):
    """A trainer with a collector of this kind."""
    parts = ppo_parts(plan) | changes
    own = parts["collector"]
    parts["collector"] = kind(own.env, own.policy, frames_per_batch=plan.frames_per_batch)
    return Trainer(plan=plan, **parts)


def test_run_rejects_collector_batch_of_other_size():
    class Short(VectorCollector):
        def _collect(self):
            return super()._collect()[:, :2]

    with raises_setting("collector") as refused:
        ppo_trainer_of(Short, on_policy_plan()).run()
    assert refused.value.works == "use frames_per_batch=16"


def test_nan_episode_return_raises_env_error():
    class Unchecked(VectorCollector):
        def take_episodes(self):
            return [one._replace(episode_return=math.nan) for one in super().take_episodes()]

    message = (
        r"^environment CartPole-v1, env \d.*: returned rewards that sum to nan over an episode$"
    )
    with pytest.raises(EnvError, match=message):
        ppo_trainer_of(Unchecked, on_policy_plan()).run()


def test_run_rejects_buffer_without_minibatches():
    class Empty(RolloutMinibatches):
        def epoch(self, plan, limit):
            return iter(())

    with raises_setting("buffer"):
        ppo_trainer_of(VectorCollector, on_policy_plan(), buffer=Empty()).run()


def test_trainer_rejects_unsaveable_writer_with_checkpoints(tmp_path):
    def buffer():
        writer = TensorDictMaxValueWriter(rank_key=("next", "reward"))
        storage = LazyTensorStorage(20)
        return TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=4)

    with raises_setting("writer"):
        sac_trainer(buffer=buffer(), folder=tmp_path)
    assert sac_trainer(buffer=buffer()).run().gradient_steps > 0


def test_trainer_rejects_buffer_ensemble_with_checkpoints(tmp_path):
    both = ReplayBufferEnsemble(transitions_buffer(), transitions_buffer(), batch_size=4)
    with raises_setting("buffer"):
        sac_trainer(buffer=both, folder=tmp_path)
    sac_trainer(buffer=both)  # writes no checkpoints


def mixing(drawn, place, in_place):
    """A hook that replaces the second half of each minibatch by rows of elsewhere."""

    def mixed(minibatch):
        drawn.append(minibatch["index"].clone())
        other = minibatch[2:].clone()
        other["index"] = torch.full((2,), place)
        if in_place:
            minibatch["index"][2:] = place
            return None
        return torch.cat([minibatch[:2], other])

    return mixed


@pytest.mark.parametrize("in_place", [False, True])
def test_priorities_are_updated_only_for_sampled_rows(in_place):
    def trainer(place):
        sampler = PrioritizedSampler(1_000, alpha=0.6, beta=0.4)
        made = sac_trainer(buffer=make_replay_buffer(1_000, 4, sampler=sampler))
        made.register_op("process_optim_batch", mixing(drawn, place, in_place))
        return made

    drawn: list[torch.Tensor] = []
    for place in (0, 900):  # a row of it that was never written would be drawn
        with raises_setting("stage"):
            trainer(place).run()
    drawn.clear()
    trainer(place=-1).run()
    assert len(drawn) == 31
    assert int(torch.cat(drawn).max()) < 40


@pytest.mark.parametrize("value", ["high", torch.arange(2)])
def test_unloggable_metric_warns_once_and_is_not_logged(value):
    rows = Rows()
    trainer = ppo_trainer(logger=rows, log_every=16)
    trainer.register_op("post_steps_log", lambda batch: {"odd": value, "even": 2.0})
    with pytest.warns(UserWarning, match=r"Metric 'odd' is a .*, so it is not logged") as told:
        trainer.run()
    assert len([one for one in told if "'odd'" in str(one.message)]) == 1
    assert all("odd" not in row and row["even"] == 2.0 for row in rows.rows)


def test_trainer_rejects_hook_of_other_trainer():
    kept = BestPolicy("evaluation/return")
    ppo_trainer(hooks=[kept]).run()
    with raises_setting("hook"):
        ppo_trainer(hooks=[kept])  # its best may be the policy of the run before


# ---------------------------------------------------------------------- one after the other
def test_second_run_updates_targets_by_policy_steps():
    plan = off_policy_plan()
    parts, another = sac_parts(plan), sac_parts(plan)
    loss = parts["update"].loss_module
    parts["update"] = another["update"] = Update(
        loss,
        torch.optim.Adam(loss.parameters(), lr=1e-2),
        target_updater=SoftUpdate(loss, tau=0.5),
        target_update_every="10 policy steps",
    )
    policy = parts["collector"].policy
    another["collector"] = collector_of(plan, make_env("Pendulum-v1", 1), policy)
    for own in (parts, another):
        before = deepcopy(loss.target_qvalue_network_params)
        Trainer(plan, **own).run()
        assert not (loss.target_qvalue_network_params == before).all()
