"""Environments of TorchRL with transforms in the kit: env steps, states, evaluations."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.data import Unbounded
from torchrl.envs import (
    CatFrames,
    Compose,
    EnvBase,
    EnvCreator,
    FrameSkipTransform,
    GymEnv,
    Hash,
    NoopResetEnv,
    ParallelEnv,
    RandomTruncationTransform,
    RenameTransform,
    RewardSum,
    SerialEnv,
    StepCounter,
    TensorDictPrimer,
    TimeMaxPool,
    TrajCounter,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)

from kit.collectors import AsyncCollector, VectorCollector
from kit.envs import make_env
from kit.envs.backends.torchrl_layers import transforms_of
from kit.hooks import BestPolicy, Evaluator
from kit.modules import make_actor
from kit.trainer import Trainer
from tests.errors import raises_setting
from tests.tiny import collector_of, on_policy_plan, ppo_parts

Make = Callable[[], EnvBase]


def cartpole(**kwargs) -> EnvBase:
    return GymEnv("CartPole-v1", categorical_action_encoding=True, **kwargs)


def with_transforms(*transforms: Callable, below: Make = cartpole) -> Make:
    return lambda: TransformedEnv(below(), Compose(*(make() for make in transforms)))


def vec_norm() -> VecNormV2:
    return VecNormV2(in_keys=["observation"])


def normalized() -> EnvBase:
    return TransformedEnv(cartpole(), vec_norm())


def in_series(make: Make = cartpole) -> Make:
    return lambda: SerialEnv(2, make)


# ---------------------------------------------------------------------- env steps
SKIPPING = {
    "transform": (1, with_transforms(lambda: FrameSkipTransform(3))),
    "environment": (1, lambda: cartpole(frame_skip=3)),
    "above several": (2, with_transforms(lambda: FrameSkipTransform(3), below=in_series())),
    "in each": (2, in_series(with_transforms(lambda: FrameSkipTransform(3)))),
}


@pytest.mark.parametrize("kind", SKIPPING)
def test_collector_counts_skipped_frames_as_env_steps(kind):
    num_envs, make = SKIPPING[kind]
    collector = VectorCollector(make_env(make()), None, steps_per_env=30)
    collector.collect()
    assert collector.policy_steps == 30 * num_envs
    assert collector.env_steps == 90 * num_envs


def test_nested_frame_skips_multiply():
    env = TransformedEnv(cartpole(frame_skip=2), FrameSkipTransform(3))
    collector = VectorCollector(make_env(env), None, steps_per_env=10)
    collector.collect()
    assert collector.env_steps == 60


@pytest.mark.nightly
def test_collector_counts_skipped_frames_of_worker_processes():
    env = ParallelEnv(2, EnvCreator(with_transforms(lambda: FrameSkipTransform(3))))
    collector = VectorCollector(make_env(env), None, steps_per_env=10)
    collector.collect()
    collector.shutdown()
    assert collector.env_steps == 60


def of_the_kit(env: EnvBase, policy) -> VectorCollector:
    return VectorCollector(make_env(env), policy, frames_per_batch=16, total_frames=64)


def of_torchrl(env: EnvBase, policy) -> Collector:
    return Collector(env, policy, frames_per_batch=16, total_frames=64)


@pytest.mark.parametrize("collector", [of_the_kit, of_torchrl])
def test_trainer_rejects_frame_skip_that_differs_from_plan(collector):
    def trainer(action_repeat):
        plan = on_policy_plan(num_envs=1, steps_per_env=16, action_repeat=action_repeat)
        parts = ppo_parts(plan)
        env = TransformedEnv(cartpole(), FrameSkipTransform(2))
        return Trainer(plan, **parts | {"collector": collector(env, parts["collector"].policy)})

    with raises_setting("env.action_repeat"):
        trainer(1)
    assert trainer(2).run().env_steps == 2 * 64


def test_kit_env_rejects_frame_skip_transform():
    env = TransformedEnv(make_env("CartPole-v1", max_episode_steps=5), FrameSkipTransform(2))
    with raises_setting("FrameSkipTransform"):
        make_env(env)
    with raises_setting("env"):
        env.rollout(10, break_when_any_done=False)


# ---------------------------------------------------------------------- states
STATES = {
    "VecNorm": with_transforms(lambda: VecNorm(in_keys=["observation"])),
    "VecNormV2": normalized,
    "CatFrames": with_transforms(lambda: CatFrames(3, dim=-1, in_keys=["observation"])),
    "TimeMaxPool": with_transforms(lambda: TimeMaxPool(in_keys=["observation"], T=3)),
    "NoopResetEnv": with_transforms(lambda: NoopResetEnv(5)),
    "TrajCounter": with_transforms(RewardSum, TrajCounter),
    "Hash": with_transforms(lambda: Hash(in_keys=["observation"], out_keys=["hash"])),
    "TensorDictPrimer": with_transforms(lambda: TensorDictPrimer(memory=Unbounded(3))),
    "RandomTruncationTransform": with_transforms(
        StepCounter, lambda: RandomTruncationTransform(min_horizon=1, max_horizon=99)
    ),
    "of each of several": in_series(normalized),
    "above several": with_transforms(vec_norm, below=in_series()),
    "above and of each": with_transforms(vec_norm, below=in_series(normalized)),
    "shared by several": lambda: SerialEnv(2, EnvCreator(normalized)),
}


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.filterwarnings("ignore:VecNorm wasn't initialized", "ignore:Querying state_dict")
def test_state_dict_includes_transform_state(kind):
    def collector(seed):
        return VectorCollector(make_env(STATES[kind](), seed=seed), None, steps_per_env=40, seed=3)

    one = collector(1)
    one.collect()
    state = one.state_dict()
    following = [one.collect(), one.collect()]  # which leaves what was saved as it was
    other = collector(2)
    other.load_state_dict(state)
    assert other.exact_resume
    for batch in following:
        again = other.collect()
        different = [k for k in batch.keys(True, True) if not batch[k].equal(again[k])]
        assert different == []


PROCESSES = {
    "above": lambda: TransformedEnv(ParallelEnv(2, cartpole), vec_norm()),
    "of each": lambda: ParallelEnv(2, normalized),
    "shared": lambda: ParallelEnv(2, EnvCreator(normalized)),
}


def counts_of(env: EnvBase) -> list[int]:
    """Observations that each running normalisation has seen."""
    state = env.state_dict()
    states = list(state.values()) if "worker0" in state else [state]
    return [int(one["_extra_state"]["count.-|-.observation"].max()) for one in states]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", PROCESSES)
@pytest.mark.filterwarnings("ignore:VecNorm wasn't initialized", "ignore:Querying state_dict")
def test_running_statistics_survive_inexact_resume(kind):
    def collector():
        return VectorCollector(make_env(PROCESSES[kind]()), None, steps_per_env=40)

    one = collector()
    one.collect()
    seen, state = counts_of(one.env.backend.env), one.state_dict()
    one.shutdown()
    other = collector()
    other.load_state_dict(copy.deepcopy(state))
    assert not other.exact_resume
    number = 2 if kind == "shared" else 1  # of first observations that the statistics learn from
    assert counts_of(other.env.backend.env) == [count + number for count in seen]
    other.collect()
    counts = counts_of(other.env.backend.env)
    other.shutdown()
    assert kind != "shared" or counts[0] == counts[1]


@pytest.mark.filterwarnings("ignore:VecNorm wasn't initialized", "ignore:Querying state_dict")
def test_run_with_torchrl_vec_norm_resumes_exactly(tmp_path):
    plan = on_policy_plan()

    def trainer(**changes):
        parts = ppo_parts(plan)
        env = make_env(TransformedEnv(SerialEnv(2, normalized), vec_norm()))
        parts["collector"] = collector_of(plan, env, parts["collector"].policy)
        seen = []
        made = Trainer(plan, **parts, **changes)
        made.register_op("pre_steps_log", lambda batch: seen.append(batch["observation"].clone()))
        return made, seen

    whole, seen = trainer(folder=tmp_path, checkpoint_every=32)
    whole.run()
    halfway = min((tmp_path / "checkpoints").iterdir())
    resumed, again = trainer(resume_from=halfway)
    resumed.run()
    assert len(again) == 2
    assert torch.equal(torch.cat(again), torch.cat(seen[2:]))


# ---------------------------------------------------------------------- evaluations
def test_evaluator_rejects_env_that_updates_own_statistics():
    env = make_env(SerialEnv(2, normalized))
    env.start()
    with raises_setting("evaluate"):
        Evaluator(env, make_actor(env, (8,)))


def test_evaluation_leaves_frozen_statistics_unchanged():
    training = make_env(normalized())
    VectorCollector(training, None, steps_per_env=50).collect()
    frozen = training.backend.env.transform.frozen_copy()
    env = make_env(TransformedEnv(cartpole(), frozen))
    Evaluator(env, make_actor(env, (8,)), episodes=2)()
    assert frozen.loc["observation"].equal(training.backend.env.transform.loc["observation"])


# ---------------------------------------------------------------------- ends
def test_make_env_rejects_done_keys_of_agents():
    ends = ["done", "terminated", "truncated"]
    env = TransformedEnv(cartpole(), RenameTransform(ends, [("agents", end) for end in ends]))
    with raises_setting("env.done_keys"):
        make_env(env)


# ---------------------------------------------------------------------- saved policies
def sharing(kind: str) -> tuple[EnvBase, EnvBase]:
    """An environment with running statistics, and one that is normalised by them, frozen."""
    own = VecNorm(in_keys=["observation"]) if kind == "VecNorm" else vec_norm()
    training = TransformedEnv(cartpole(), own)
    training.rollout(1)  # which makes the statistics
    if kind == "VecNorm":
        shared = VecNorm(in_keys=["observation"], shared_td=own._td.share_memory_())
    else:
        held = {"loc": own._loc, "var": own._var, "count": own._count}
        shared = VecNormV2(in_keys=["observation"], shared_data=held)
    return training, TransformedEnv(cartpole(), shared.freeze())


class Normalized(Trainer):
    """A trainer whose environments share running statistics of TorchRL."""

    def __init__(self, collector: Callable, kind: str, **changes) -> None:
        plan = on_policy_plan(
            num_envs=1, steps_per_env=16, evaluation_every=16, evaluation_episodes=2
        )
        parts = ppo_parts(plan)
        policy = parts["collector"].policy
        self.training, self.frozen = sharing(kind)
        evaluate = Evaluator(make_env(self.frozen), policy, episodes=2)
        parts |= {"collector": collector(self.training, policy), "evaluate": evaluate}
        super().__init__(plan, **parts, **changes)

    def statistics(self) -> list[torch.Tensor]:
        """Of both environments."""
        return [env.transform.loc["observation"] for env in (self.training, self.frozen)]


@pytest.mark.parametrize("collector", [of_the_kit, of_torchrl])
@pytest.mark.parametrize("kind", ["VecNorm", "VecNormV2"])
@pytest.mark.filterwarnings("ignore:the state of the environments", "ignore:Querying state_dict")
def test_saved_policy_includes_running_statistics(tmp_path, collector, kind):
    best = BestPolicy("iterations", mode="min")
    trained = Normalized(collector, kind, folder=tmp_path, checkpoint_every=32, hooks=[best])
    first = []
    trained.register_op("log_row", lambda row: first.append(trained.statistics()[0]))
    trained.run()
    last, shown = trained.statistics()
    assert torch.equal(last, shown)
    halfway, newest = sorted((tmp_path / "checkpoints").iterdir())
    again = Normalized(collector, kind, hooks=[BestPolicy("iterations", mode="min")])
    again.load_policy(newest)
    assert all(torch.equal(last, one) for one in again.statistics())
    again.load_policy(newest, best=True)
    assert all(torch.equal(first[0], one) for one in again.statistics())
    alone = Normalized(collector, kind)
    alone.load_policy(next((trained.save_policy(tmp_path / "alone").parent).iterdir()))
    assert all(torch.equal(last, one) for one in alone.statistics())
    resumed = Normalized(collector, kind, resume_from=halfway)
    resumed.run()
    assert torch.equal(*resumed.statistics()), "they are shared still"


@pytest.mark.filterwarnings("ignore:Querying state_dict")
def test_load_policy_rejects_env_without_saved_statistics(tmp_path):
    trained = Normalized(of_the_kit, "VecNormV2", hooks=[BestPolicy("iterations")])
    trained.run()
    saved = trained.save_policy(tmp_path)
    plan = on_policy_plan(num_envs=1, steps_per_env=16)
    other = Trainer(plan, **ppo_parts(plan), hooks=[BestPolicy("iterations")])
    with raises_setting("checkpoint"):
        other.load_policy(saved)
    with raises_setting("best"):
        other.load_policy(saved, best=True)


@pytest.mark.filterwarnings("ignore:Querying state_dict", "ignore:VecNorm wasn't initialized")
def test_saved_policy_includes_statistics_of_each_env(tmp_path):
    def trainer(num_envs):
        plan = on_policy_plan(num_envs=num_envs, steps_per_env=16 // num_envs)
        parts = ppo_parts(plan)
        env = make_env(TransformedEnv(SerialEnv(num_envs, normalized), vec_norm()))
        parts["collector"] = collector_of(plan, env, parts["collector"].policy)
        return Trainer(plan, **parts)

    def locations(made):
        transforms = transforms_of(made.collector.env.backend.env)
        return torch.cat([one.loc["observation"].reshape(-1) for one in transforms])

    trained = trainer(2)
    found = []
    trained.register_op(
        "post_steps", lambda: found.append((locations(trained), trained.save_policy(tmp_path)))
    )
    trained.run()
    expected, saved = found[-1]
    again = trainer(2)
    again.load_policy(saved)
    assert torch.equal(locations(again), expected)
    with raises_setting("transforms"):
        trainer(4).load_policy(saved)


def in_processes(env: Make, policy) -> MultiSyncCollector:
    return MultiSyncCollector(
        [env], policy, frames_per_batch=16, total_frames=64, cat_results="stack"
    )


def in_another_process(env: Make, policy) -> AsyncCollector:
    made = functools.partial(make_env, env())
    return AsyncCollector(made, policy, frames_per_batch=16, total_frames=64)


@pytest.mark.nightly
@pytest.mark.parametrize("collector", [in_processes, in_another_process])
@pytest.mark.filterwarnings("ignore:Querying state_dict")
def test_trainer_rejects_saving_policy_with_remote_statistics(collector, tmp_path):
    plan = on_policy_plan(num_envs=1, steps_per_env=16)

    def trainer(make, **changes):
        parts = ppo_parts(plan)
        parts["collector"] = collector(make, parts["collector"].policy)
        return Trainer(plan, **parts, **changes)

    with raises_setting("environment"):
        trainer(normalized, hooks=[BestPolicy()])
    with raises_setting("environment"):
        trainer(normalized).load_policy(tmp_path)
    trainer(cartpole, hooks=[BestPolicy("iterations")]).run()


@pytest.mark.filterwarnings("ignore:Querying state_dict", "ignore:Support of VecNormV2")
def test_load_policy_rejects_statistics_of_different_num_envs(tmp_path):
    def trainer(num_envs):
        plan = on_policy_plan(num_envs=num_envs, steps_per_env=16 // num_envs)
        parts = ppo_parts(plan)
        env = make_env(TransformedEnv(SerialEnv(num_envs, cartpole), vec_norm()))
        parts["collector"] = collector_of(plan, env, parts["collector"].policy)
        return Trainer(plan, **parts)

    trained = trainer(2)
    trained.run()
    with raises_setting("transforms"):
        trainer(4).load_policy(trained.save_policy(tmp_path))
