"""The kit's collectors in TorchRL's trainer and scripts, TorchRL's in the kit's: equal counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import (
    BaseCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from torchrl.data import (
    Categorical,
    Composite,
    LazyTensorStorage,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    Unbounded,
)
from torchrl.envs import (
    Compose,
    EnvBase,
    FrameSkipTransform,
    GymEnv,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import (
    MLP,
    EGreedyModule,
    ProbabilisticActor,
    QValueActor,
    RandomPolicy,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss, DQNLoss, HardUpdate, SoftUpdate
from torchrl.objectives.value import GAE
from torchrl.trainers import ReplayBufferTrainer, UpdateWeights
from torchrl.trainers import Trainer as TorchRLTrainer
from torchrl.trainers.algorithms import PPOTrainer

from kit.buffers import PrioritizedSampler, make_replay_buffer
from kit.collectors import AsyncCollector, EpisodeCollector, TensorCollector, VectorCollector
from kit.envs import make_env
from kit.hooks import Evaluator
from kit.modules import make_actor, make_value
from kit.steps import SettingError
from kit.trainer import Trainer
from kit.update import Update
from tests.errors import raises_setting
from tests.tiny import (
    Rows,
    collector_of,
    off_policy_plan,
    on_policy_plan,
    ppo_parts,
    transitions_buffer,
)

CARTPOLE = "CartPole-v1"


# ---------------------------------------------------------------------- the kit's in TorchRL's
def vector(env: EnvBase, policy: Any) -> VectorCollector:
    return VectorCollector(env, policy, frames_per_batch=16, total_frames=64)


def tensor(env: EnvBase, policy: Any) -> TensorCollector:
    tensors = make_env(CARTPOLE, 2, vectorization="tensor", seed=0)
    return TensorCollector(tensors, policy, frames_per_batch=16, total_frames=64)


def asynchronous(env: EnvBase, policy: Any) -> AsyncCollector:
    return AsyncCollector(env, policy, frames_per_batch=16, total_frames=64)


def padded_episodes(env: EnvBase, policy: Any) -> EpisodeCollector:
    return EpisodeCollector(env, policy, min_episodes=2, total_frames=64)


def flat_episodes(env: EnvBase, policy: Any) -> EpisodeCollector:
    return EpisodeCollector(env, policy, min_steps=16, total_frames=64, layout="flat")


IN_PROCESS = [vector, tensor, padded_episodes, flat_episodes]
Make = Callable[[EnvBase, Any], BaseCollector]


class InTorchRL:
    """A PPO of TorchRL's parts around a collector of the kit."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        env = make_env(CARTPOLE, 2, seed=0)
        self.actor, self.critic = make_actor(env, (8,)), make_value(env, (8,))
        self.collector = make(env, self.actor)
        self.loss = ClipPPOLoss(self.actor, self.critic)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-2)
        self.gae = GAE(gamma=0.99, lmbda=0.95, value_network=self.critic)
        self.sizes: list[int] = []

    def prepared(self, batch: TensorDictBase) -> TensorDictBase:
        """Advantages, and the steps that are none left out."""
        self.gae(batch)
        mask = batch.get(("collector", "mask"), None)
        rows = batch.reshape(-1) if mask is None else batch[mask]
        self.sizes.append(len(rows))
        return rows


@pytest.mark.parametrize("make", [*IN_PROCESS, asynchronous])
def test_collector_runs_in_torchrl_trainer(make):
    parts = InTorchRL(make)
    before = {name: value.clone() for name, value in parts.actor.state_dict().items()}
    trainer = TorchRLTrainer(
        collector=parts.collector, total_frames=64, frame_skip=1, optim_steps_per_batch=2,
        loss_module=parts.loss, optimizer=parts.optimizer, progress_bar=False,
    )  # fmt: skip
    trainer.register_op("batch_process", parts.prepared)
    trainer.train()
    collector = parts.collector
    assert trainer.collected_frames == collector.policy_steps == sum(parts.sizes)
    assert trainer.collected_frames >= 64
    if not isinstance(collector, EpisodeCollector):
        assert parts.sizes == [16] * 4
    assert trainer._optim_count == 2 * len(parts.sizes)
    assert any(not value.equal(before[name]) for name, value in parts.actor.state_dict().items())
    assert collector.closed


@pytest.mark.parametrize(
    "make", [*IN_PROCESS, pytest.param(asynchronous, marks=pytest.mark.nightly)]
)
def test_collector_runs_in_torchrl_script(make):
    parts = InTorchRL(make)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200), sampler=SamplerWithoutReplacement(), batch_size=8
    )
    steps = 0
    for batch in parts.collector:
        buffer.empty()
        buffer.extend(parts.prepared(batch))
        for minibatch in buffer:
            losses = parts.loss(minibatch)
            sum(value for name, value in losses.items() if name.startswith("loss_")).backward()
            parts.optimizer.step()
            parts.optimizer.zero_grad()
            steps += 1
        parts.collector.update_policy_weights_()
        parts.collector.update_policy_weights_(TensorDict.from_module(parts.actor).data)
    parts.collector.shutdown()
    assert parts.collector.policy_steps == parts.collector._frames == sum(parts.sizes) >= 64
    assert steps == sum(-(-size // 8) for size in parts.sizes)


def test_collector_runs_in_torchrl_ppo_trainer():
    parts = InTorchRL(vector)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(16), sampler=SamplerWithoutReplacement(), batch_size=8
    )
    trainer = PPOTrainer(
        collector=parts.collector, total_frames=64, frame_skip=1, optim_steps_per_batch=2,
        loss_module=parts.loss, optimizer=parts.optimizer, progress_bar=False, num_epochs=1,
        replay_buffer=buffer, enable_logging=False,
    )  # fmt: skip
    before = {name: value.clone() for name, value in parts.actor.state_dict().items()}
    trainer.train()
    assert trainer.collected_frames == parts.collector.policy_steps == 64
    assert any(not value.equal(before[name]) for name, value in parts.actor.state_dict().items())


def in_torchrls_trainer(update: Update, **settings: Any) -> TorchRLTrainer:
    """TorchRL's trainer of DQN by a stepper of the kit, with a replay buffer by priority."""
    env, policy = SerialEnv(2, gym_env), update.loss_module.value_network
    trainer = TorchRLTrainer(
        collector=VectorCollector(env, policy, frames_per_batch=16, total_frames=64),
        total_frames=64, frame_skip=1, optim_steps_per_batch=2, loss_module=update.loss_module,
        optimization_stepper=update, progress_bar=False, **settings,
    )  # fmt: skip
    sampler = PrioritizedSampler(64, alpha=1.0, beta=0.0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(64), sampler=sampler, batch_size=8)
    ReplayBufferTrainer(buffer, flatten_tensordicts=True).register(trainer)
    return trainer


def dqn_update(**settings: Any) -> Update:
    torch.manual_seed(0)
    spec = gym_env().action_spec
    policy = QValueActor(MLP(in_features=4, out_features=2, num_cells=[8]), spec=spec)
    loss = DQNLoss(policy, action_space=spec, delay_value=True)
    target = HardUpdate(loss, value_network_update_interval=0)
    return Update(loss, torch.optim.Adam(loss.parameters()), target_updater=target, **settings)


def test_update_sets_priorities_in_torchrl_trainer_buffer():
    trainer = in_torchrls_trainer(dqn_update())
    told = []
    trainer.register_op("post_loss", lambda batch: told.append((batch["index"], batch["td_error"])))
    trainer.train()
    assert len(told) == trainer._optim_count == 8
    index, errors = told[-1]
    state = trainer._modules["replay_buffer"].replay_buffer.sampler.state_dict()
    priorities = state["values"][index.flatten()]
    torch.testing.assert_close(priorities.float(), errors.flatten() + state["eps"])


def test_update_rejects_unsupported_torchrl_trainer_settings():
    with raises_setting("clip_norm"):
        in_torchrls_trainer(dqn_update(), clip_norm=0.5)
    with raises_setting("clip_norm"):
        in_torchrls_trainer(dqn_update(clip_value=0.5), clip_norm=0.5)  # of the norm
    in_torchrls_trainer(dqn_update(max_grad_norm=0.5), clip_norm=0.5)
    with raises_setting("target_update_every"):
        in_torchrls_trainer(dqn_update(target_update_every="40 policy steps"))


def test_torchrl_trainer_waits_for_init_random_frames():
    env = make_env(CARTPOLE, 2, seed=0)
    parts = InTorchRL(vector)
    collector = VectorCollector(
        env, parts.actor, frames_per_batch=16, total_frames=64, init_random_frames=32
    )
    trainer = TorchRLTrainer(
        collector=collector, total_frames=64, frame_skip=1, optim_steps_per_batch=1,
        loss_module=parts.loss, optimizer=parts.optimizer, progress_bar=False,
    )  # fmt: skip
    trainer.register_op("process_optim_batch", parts.prepared)
    trainer.train()
    assert collector.random_policy_steps == 32
    assert trainer._optim_count == 3  # from the batch on that reaches init_random_frames


# ---------------------------------------------------------------------- TorchRL's in the kit's
def gym_env() -> EnvBase:
    return GymEnv(CARTPOLE, categorical_action_encoding=True)


def transformed() -> EnvBase:
    scaled = Compose(
        ObservationNorm(0.0, 2.0, in_keys=["observation"]),
        RewardScaling(0.0, 0.5),
        StepCounter(max_steps=7),
        RewardSum(),
    )
    return TransformedEnv(gym_env(), scaled)


def serial() -> EnvBase:
    return TransformedEnv(SerialEnv(2, gym_env), RewardSum())


def kit_transformed() -> EnvBase:
    return TransformedEnv(make_env(CARTPOLE, 2, seed=0), Compose(StepCounter(), RewardSum()))


def torchrl_ppo() -> tuple[ProbabilisticActor, ValueOperator]:
    """A policy and a critic of TorchRL's modules alone."""
    torch.manual_seed(0)
    head = TensorDictModule(
        MLP(in_features=4, out_features=2, num_cells=[8]), ["observation"], ["logits"]
    )
    actor = ProbabilisticActor(
        head, in_keys=["logits"], distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )  # fmt: skip
    critic = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[8]), ["observation"])
    return actor, critic


def kit_trainer(
    make: Callable[[Any], BaseCollector], num_envs: int = 2, **arguments: Any
) -> Trainer:
    """The kit's trainer around a collector of TorchRL."""
    plan = on_policy_plan(num_envs=num_envs, steps_per_env=16 // num_envs)
    actor, critic = torchrl_ppo()
    loss = ClipPPOLoss(actor, critic)
    return Trainer(
        plan, collector=make(actor), update=Update(loss, torch.optim.Adam(loss.parameters())),
        advantage=GAE(gamma=0.99, lmbda=0.95, value_network=critic), **arguments,
    )  # fmt: skip


class NotStarted(MultiSyncCollector):
    """Its processes begin when there is something to collect: never, where it is refused."""

    def _run_processes(self) -> None:
        """Start none."""

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """There are none."""


def refused_in_processes(refusal: str, env: Callable[[], EnvBase] = gym_env, **policy: Any) -> None:
    amounts = {"frames_per_batch": 16, "total_frames": 64, "cat_results": "stack"}
    collector = NotStarted([env, env], **policy, **amounts)
    with pytest.raises(SettingError, match=refusal):
        kit_trainer(lambda actor: collector)


def noting_ends(trainer: Trainer) -> list[int]:
    """Have each batch's number of finished episodes noted."""
    ends: list[int] = []
    trainer.register_op("pre_steps_log", lambda b: ends.append(int(b["next", "done"].sum())))
    return ends


@pytest.mark.parametrize(
    ("env", "num_envs"), [(gym_env, 1), (transformed, 1), (serial, 2), (kit_transformed, 2)]
)
def test_trainer_runs_torchrl_collector(env, num_envs):
    trainer = kit_trainer(
        lambda actor: Collector(env(), actor, frames_per_batch=16, total_frames=64), num_envs
    )
    ends = noting_ends(trainer)
    ledger = trainer.run()
    assert (ledger.policy_steps, ledger.env_steps, ledger.gradient_steps) == (64, 64, 16)
    assert ledger.episodes == sum(ends) > 0
    assert trainer.collector.closed
    assert ledger.compare(trainer.plan) == []


@pytest.mark.parametrize("env", [lambda: SerialEnv(2, gym_env), serial])
def test_trainer_saves_checkpoint_when_torchrl_envs_are_closed(env, tmp_path):
    trainer = kit_trainer(
        lambda actor: Collector(env(), actor, frames_per_batch=16, total_frames=64),
        folder=tmp_path, checkpoint_every=64,
    )  # fmt: skip
    assert trainer.run().policy_steps == 64
    assert trainer.last_checkpoint is not None


def test_trainer_rejects_evaluator_without_collector_normalizer():
    env = make_env(CARTPOLE, 2, seed=0, normalize_observation=True)

    def collecting(actor: nn.Module) -> BaseCollector:
        evaluator.policy = actor
        below = TransformedEnv(env, StepCounter())
        return Collector(below, actor, frames_per_batch=16, total_frames=64)

    evaluator = Evaluator(make_env(CARTPOLE, 1), nn.Identity(), episodes=10)
    with raises_setting("evaluate"):
        kit_trainer(collecting, evaluate=evaluator)
    evaluator.env.normalizer = env.normalizer
    kit_trainer(collecting, evaluate=evaluator)


def test_trainer_rejects_collector_with_untrained_policy():
    def collecting(frozen: bool) -> Callable[[nn.Module], BaseCollector]:
        another, _ = torchrl_ppo()
        another.requires_grad_(not frozen)
        return lambda _: Collector(serial(), another, frames_per_batch=16, total_frames=64)

    with raises_setting("policy"):
        kit_trainer(collecting(frozen=False))
    kit_trainer(collecting(frozen=True))
    collector = collecting(frozen=False)(None)
    given = UpdateWeights(collector, 1, policy_weights_getter=lambda: None)
    kit_trainer(lambda _: collector, hooks=[given])  # it is given weights by a hook


def another_policy() -> nn.Module:
    return torchrl_ppo()[0]


def test_trainer_rejects_multi_collector_with_untrained_policy():
    untrained = r"policy=.* of NotStarted shares no weights with the loss"
    refused_in_processes(untrained, policy=another_policy())
    never = r"policy_factory='another_policy' .* never receive the trained weights"
    refused_in_processes(never, policy_factory=another_policy)


def test_rows_report_torchrl_episode_returns():
    rows = Rows()
    trainer = kit_trainer(
        lambda actor: Collector(transformed(), actor, frames_per_batch=16, total_frames=64),
        num_envs=1, logger=rows, log_every=64,
    )  # fmt: skip
    trainer.run()
    (row,) = rows.rows
    assert row["episode/return"] == row["episode/return_max"] == 3.5  # 7 steps of reward 1/2
    assert row["episodes"] == 9


def test_ledger_counts_frame_skip_as_env_steps():
    plan = off_policy_plan(action_repeat=2, learning_starts=20, steps_per_env=4)
    env = TransformedEnv(gym_env(), FrameSkipTransform(2))
    policy = QValueActor(MLP(in_features=4, out_features=2, num_cells=[8]), spec=env.action_spec)
    explore = TensorDictSequential(policy, EGreedyModule(env.action_spec))
    loss = DQNLoss(policy, action_space=env.action_spec, delay_value=True)
    collector = Collector(env, explore, frames_per_batch=4, total_frames=40, init_random_frames=20)
    ledger = Trainer(
        plan, collector=collector, buffer=transitions_buffer(batch_size=4),
        update=Update(
            loss, torch.optim.Adam(loss.parameters()), target_updater=SoftUpdate(loss, tau=0.1)
        ),
    ).run()  # fmt: skip
    assert (ledger.policy_steps, ledger.env_steps, ledger.gradient_steps) == (40, 80, 24)
    assert ledger.random_policy_steps == 20


def held() -> EnvBase:
    return TransformedEnv(gym_env(), FrameSkipTransform(3))


def held_in_the_kit() -> EnvBase:
    return make_env(CARTPOLE, 1, action_repeat=3)


@pytest.mark.parametrize("env", [held, held_in_the_kit])
def test_plan_rejects_another_action_repeat_in_processes(env):
    amounts = {"frames_per_batch": 16, "total_frames": 64, "cat_results": "stack"}
    collector = NotStarted([env, env], policy=another_policy(), **amounts)
    with raises_setting("env.action_repeat"):
        kit_trainer(lambda actor: collector)


@pytest.mark.nightly
def test_multi_sync_collector_acts_with_newest_weights():
    trainer = kit_trainer(
        lambda actor: MultiSyncCollector(
            [gym_env, gym_env], actor, frames_per_batch=16, total_frames=64, cat_results="stack"
        )
    )
    logits: list[torch.Tensor] = []

    def by_learner(batch: TensorDictBase) -> None:
        with torch.no_grad():
            own = trainer.loss_module.actor_network.module[0](batch.select("observation").clone())
        logits.append((own["logits"] - batch["logits"]).abs().max())

    trainer.register_op("batch_process", by_learner)
    ledger = trainer.run()
    assert (ledger.policy_steps, ledger.gradient_steps) == (64, 16)
    assert max(logits) < 1e-6


def dqn_trainer(make: Callable[[nn.Module], BaseCollector], **parts: Any) -> Trainer:
    """A trainer of DQN that says nothing of a value estimator, as TorchRL allows."""
    torch.manual_seed(0)
    plan = parts.pop("plan", off_policy_plan(steps_per_env=4, learning_starts=8))
    policy = QValueActor(
        MLP(in_features=4, out_features=2, num_cells=[8]), spec=gym_env().action_spec
    )
    loss = DQNLoss(policy, action_space=gym_env().action_spec, delay_value=True)
    target = SoftUpdate(loss, tau=0.1)
    update = Update(loss, torch.optim.Adam(loss.parameters(), lr=0.1), target_updater=target)
    parts = {"buffer": transitions_buffer(batch_size=4), **parts}
    return Trainer(plan, collector=make(policy), update=update, **parts)


def collecting(kind: type[BaseCollector] = Collector, **arguments: Any) -> Callable[..., Any]:
    """A function that makes a collector of TorchRL for the plan of :func:`dqn_trainer`."""
    amounts = {"frames_per_batch": 4, "total_frames": 40, "init_random_frames": 8, **arguments}
    env = [gym_env] if kind is not Collector else gym_env
    return lambda policy: kind(env, **{"policy": policy, **amounts})


def test_run_resumes_counts_with_torchrl_collector(tmp_path):
    dqn_trainer(collecting(), folder=tmp_path, checkpoint_every=12).run()
    halfway = min((tmp_path / "checkpoints").iterdir())
    with pytest.warns(UserWarning, match="not bit-exact"):
        resumed = dqn_trainer(collecting(), resume_from=halfway)
    assert 0 < resumed.ledger.policy_steps < 40
    ledger = resumed.run()
    assert (ledger.policy_steps, ledger.random_policy_steps, ledger.gradient_steps) == (40, 8, 36)


def test_ledger_counts_random_steps_of_collector_without_policy():
    with pytest.raises(SettingError, match=r"took 12 policy steps at random, .* plan has 8"):
        dqn_trainer(collecting(policy=None), log_every=12).run()
    plan = off_policy_plan(steps_per_env=4, learning_starts=8, random_steps=40)
    for policy in (None, RandomPolicy(gym_env().action_spec)):
        trainer = dqn_trainer(collecting(policy=policy, init_random_frames=0), plan=plan)
        assert trainer.run().random_policy_steps == 40


@pytest.mark.nightly
def test_ledger_counts_random_steps_of_multi_collectors():
    plan = off_policy_plan(steps_per_env=4, learning_starts=8, random_steps=40)
    for kind in (MultiSyncCollector, MultiAsyncCollector):
        make = collecting(kind, policy=None, init_random_frames=0)
        assert dqn_trainer(make, plan=plan).run().random_policy_steps == 40


@pytest.mark.nightly
def test_trainer_rejects_uncountable_random_frames():
    with raises_setting("init_random_frames"):
        dqn_trainer(collecting(MultiAsyncCollector))


@pytest.mark.nightly
def test_trainer_rejects_async_workers_with_n_step_buffer():
    def two(policy: nn.Module) -> BaseCollector:
        return MultiAsyncCollector([gym_env, gym_env], policy, frames_per_batch=4, total_frames=40)

    with pytest.raises(SettingError, match=r"in any order, .* buffer joins .*MultiSyncCollector"):
        dqn_trainer(two, buffer=make_replay_buffer(40, 4, n_step=3))


def test_run_rejects_batch_with_mismatched_num_envs():
    def of_two(actor: nn.Module) -> BaseCollector:
        return Collector(SerialEnv(2, gym_env), actor, frames_per_batch=16, total_frames=64)

    with raises_setting("collector"):
        kit_trainer(of_two, num_envs=1).run()


@pytest.mark.nightly
def test_run_rejects_results_concatenated_along_time():
    def joined(actor: nn.Module) -> BaseCollector:
        return MultiSyncCollector(
            [gym_env, gym_env], actor, frames_per_batch=16, total_frames=64, cat_results=0
        )

    with pytest.raises(SettingError, match=r"1 rows of 16 steps.*cat_results='stack'"):
        kit_trainer(joined).run()


def test_trainer_rejects_set_truncated_without_reset():
    def cutting(**arguments: Any) -> Callable[[nn.Module], BaseCollector]:
        amounts = {"frames_per_batch": 16, "total_frames": 64, "set_truncated": True}
        return lambda actor: Collector(serial(), actor, **amounts, **arguments)

    with raises_setting("set_truncated"):
        kit_trainer(cutting())
    assert kit_trainer(cutting(reset_at_each_iter=True)).run().episodes == 8


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (lambda *of: VectorCollector(*of, steps_per_env=8), "collector"),
        (lambda *of: Collector(*of, frames_per_batch=16), "collector"),
        (lambda *of: EpisodeCollector(*of, min_episodes=2), "min_episodes"),
        (lambda *of: EpisodeCollector(*of, min_episodes=3, min_steps=9), "min_steps"),
        (lambda *of: EpisodeCollector(*of, min_episodes=3), None),
        (lambda _, by: Collector(serial(), by, frames_per_batch=16, trajs_per_batch=3), None),
    ],
)
def test_trainer_rejects_mismatched_episode_amounts(make, refused):
    plan = on_policy_plan(steps_per_env=None, min_episodes=3)
    parts = ppo_parts(on_policy_plan())
    steps = parts["collector"]
    parts["collector"] = make(steps.env, steps.policy)
    if refused is None:
        assert Trainer(plan, **parts).run().episodes % 3 == 0
        return
    with raises_setting(refused):
        Trainer(plan, **parts)


def test_trainer_rejects_advantages_of_split_trajectories():
    def split(actor: nn.Module, **arguments: Any) -> BaseCollector:
        amounts = {"frames_per_batch": 16, "total_frames": 64, "split_trajs": True}
        return Collector(serial(), actor, **amounts, **arguments)

    with raises_setting("split_trajs"):
        kit_trainer(split)
    whole = {"reset_at_each_iter": True, "set_truncated": True}
    assert kit_trainer(lambda actor: split(actor, **whole)).run().gradient_steps == 16
    dqn_trainer(collecting(split_trajs=True)).run()


# ---------------------------------------------------------------------- TorchRL's environments
def test_collector_accepts_torchrl_envs():
    plan = on_policy_plan()
    env = make_env(serial(), seed=0)
    parts = ppo_parts(plan)
    actor, critic = make_actor(env, (8,)), make_value(env, (8,))
    loss = ClipPPOLoss(actor, critic)
    update = Update(loss, torch.optim.Adam(loss.parameters()))
    parts |= {"collector": collector_of(plan, env, actor), "update": update}
    parts["advantage"].value_network = critic
    trainer = Trainer(plan, **parts)
    ends = noting_ends(trainer)
    ledger = trainer.run()
    assert (ledger.policy_steps, ledger.env_steps) == (64, 64)
    assert ledger.episodes == sum(ends) > 0


class Odd(EnvBase):
    """Two envs whose actions are two, in a group; what they show is how often each was moved."""

    def __init__(self) -> None:
        super().__init__(batch_size=[2])
        self.observation_spec = Composite(observation=Unbounded((2, 1)), shape=[2])
        choices = Composite(move=Categorical(3, shape=[2]), turn=Categorical(2, shape=[2]))
        self.action_spec = Composite(agent=choices, shape=[2])
        self.reward_spec = Unbounded((2, 1))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return self.observation_spec.zero()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        move, turn = tensordict["agent", "move"], tensordict["agent", "turn"]
        given = {"observation": tensordict["observation"] + move.unsqueeze(-1)}
        given["reward"] = (move + 10.0 * turn).unsqueeze(-1)
        ends = torch.zeros(2, 1, dtype=torch.bool)
        return TensorDict({**given, "done": ends, "terminated": ends.clone()}, [2])

    def _set_seed(self, seed: int | None) -> None:
        """It has no random numbers."""


def two_dimensions() -> EnvBase:
    return SerialEnv(2, lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")))


def two_rewards() -> EnvBase:
    env = Odd()
    env.reward_spec = Unbounded((2, 2))
    return env


def ends_of_an_agent() -> EnvBase:
    env = Odd()
    ends = Composite(done=Categorical(2, (2, 1), dtype=torch.bool), shape=[2])
    env.done_spec = Composite(agent=ends, shape=[2])
    return env


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (two_dimensions, "env.reward_spec"),
        (two_rewards, "env.reward_spec"),
        (ends_of_an_agent, "env.done_keys"),
    ],
)
def test_make_env_rejects_unsupported_torchrl_specs(make, field):
    with raises_setting(field):
        make_env(make())


@pytest.mark.parametrize("random", [True, False], ids=["random", "actor"])
def test_collector_supports_nested_torchrl_actions(random):
    env = make_env(Odd())
    policy = None if random else make_actor(env, (8,))
    batch = VectorCollector(env, policy, steps_per_env=40).collect()
    move, turn = batch["agent", "move"], batch["agent", "turn"]
    assert move.unique().tolist() == [0, 1, 2]
    assert turn.unique().tolist() == [0, 1]
    assert batch["next", "reward"].squeeze(-1).equal(move + 10.0 * turn)
    assert batch["next", "observation"].squeeze(-1).equal(move.cumsum(1).float())
