"""TensorCollector: environments and policy as one program, with the counts of every other kind."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule

from kit.collectors import TensorCollector
from kit.envs import make_env
from kit.envs.errors import EnvError
from kit.envs.tensor import make_tensor_env
from kit.testing import CollectorCase, counter_policy
from tests.collectors.kinds import tensor
from tests.errors import raises_setting

CASE = CollectorCase(steps_per_env=7)


def same(one, other):
    keys = set(one.keys(True, True)) & set(other.keys(True, True))
    assert {"observation", "action", ("next", "observation")} <= keys
    return [key for key in keys if not torch.equal(one[key], other[key])]


@pytest.mark.parametrize("id", ["CartPole-v1", "MountainCarContinuous-v0"])
def test_collected_steps_match_env_transition(id):
    env = make_tensor_env(id, 3, max_episode_steps=5, seed=4)
    collector = TensorCollector(env, counter_policy(env), steps_per_env=9, seed=2)
    for _ in range(3):
        batch = collector.collect()
        for time_step in range(9):
            now = batch[:, time_step]  # what is observed is the whole state
            physics, reward, terminated = env.transition(now["observation"].T, now["action"])
            assert torch.equal(now["next", "observation"].T, physics)
            assert torch.equal(now["next", "reward"][:, 0], reward.float())
            assert torch.equal(now["next", "terminated"][:, 0], terminated)
    assert (collector.policy_steps, collector.env_steps) == (81, 81)
    assert collector.episodes == 3 * (27 // 5)


@pytest.mark.parametrize("block", [1, 2, 7, 16])
def test_block_size_does_not_change_batches(block):
    wanted = list(tensor(CASE, fast_policy=False))
    for one, other in zip(wanted, tensor(CASE, block=block), strict=True):
        assert same(one, other) == []


def test_weights_policy_and_env_use_different_rng_streams():
    env = make_env("Pendulum-v1", 2, vectorization="tensor", seed=7)
    collector = TensorCollector(env, None, steps_per_env=1, seed=7)
    weights = torch.Generator().manual_seed(7)
    for _ in range(2):
        policy = torch.Generator().set_state(collector._random_numbers.state_dict()["state"])
        environment = torch.Generator().manual_seed(collector.env.generator.initial_seed())
        drawn = {float(torch.rand((), generator=of)) for of in (weights, policy, environment)}
        assert len(drawn) == 3
        weights.manual_seed(7)
        collector.set_seed(7)


def test_next_batch_uses_updated_policy_weights():
    fast, plain = tensor(CASE), tensor(CASE, fast_policy=False)
    for _ in range(4):
        assert same(fast.collect(), plain.collect()) == []
        for collector in (fast, plain):
            for parameter in collector.policy.parameters():
                parameter.data.add_(0.5)


def test_policy_may_reuse_output_buffer():
    env = make_tensor_env("Pendulum-v1", 3, seed=0)
    memory = torch.zeros(3, 1)

    def torque(speed):
        return torch.mul(speed, 0.1, out=memory)

    speeds = TensorDictModule(lambda seen: torque(seen[:, 2:]), ["observation"], ["action"])
    for fast_policy in ("auto", "module"):
        collector = TensorCollector(env, speeds, steps_per_env=40, fast_policy=fast_policy)
        for _ in range(3):
            batch = collector.collect()
            assert torch.equal(batch["action"], batch["observation"][..., 2:] * 0.1)


def test_next_batch_uses_updated_env_and_normalizer_settings():
    fast, plain = (
        TensorCollector(
            make_env("MountainCar-v0", 4, vectorization="tensor", normalize_reward=True, seed=0),
            steps_per_env=64,
            fast_policy=fast_policy,
        )
        for fast_policy in ("auto", "module")
    )
    for batch in range(4):
        assert same(one := fast.collect(), plain.collect()) == []
        for collector in (fast, plain):
            collector.env.max_episode_steps, collector.normalizer.clip = 10, 0.01
        assert bool(one["next", "truncated"].any()) == (batch > 0)


def test_reset_at_each_iter_resets_all_envs():
    env = make_env("CartPole-v1", 2, vectorization="tensor", max_episode_steps=4)
    collector = TensorCollector(env, steps_per_env=6, reset_at_each_iter=True)
    for _ in range(2):
        done = collector.collect()["next", "done"]
        assert done.squeeze(-1).int().tolist() == [[0, 0, 0, 1, 0, 0]] * 2
    assert collector.episodes == 4
    assert [e.length for e in collector.take_episodes()] == [4] * 4


def test_tensor_collector_accepts_plain_torch_env():
    env = make_tensor_env("CartPole-v1", 4)
    assert TensorCollector(env, steps_per_env=3).collect().shape == (4, 3)
    assert TensorCollector(lambda: env, steps_per_env=3).collect().shape == (4, 3)


def test_tensor_collector_rejects_non_torch_env():
    with raises_setting("collector"):
        TensorCollector(make_env("CartPole-v1", 2), steps_per_env=3)


def test_env_error_reports_env_and_step_of_nan():
    env = make_tensor_env("Pendulum-v1", 3)
    collector = TensorCollector(env, steps_per_env=4)
    collector.collect()
    env.episodes.physics[:, 1] = torch.nan
    with pytest.raises(EnvError, match="returned NaN") as caught:
        collector.collect()
    assert (caught.value.env, caught.value.policy_step) == (1, 4)


def test_collect_rejects_out_of_range_action():
    env, highest = make_tensor_env("CartPole-v1", 3, seed=0), [1]

    def policy(td):
        return td.set("action", torch.tensor([0, highest[0], 1]))

    collector = TensorCollector(env, policy, steps_per_env=2, fast_policy="module")
    collector.collect()
    highest[0] = 5
    with raises_setting("action"):
        collector.collect()


def test_step_tensors_rejects_float_discrete_action():
    env = make_tensor_env("CartPole-v1", 3, seed=0)
    with raises_setting("action.dtype"):
        env.step_tensors(torch.tensor([0.0, 0.7, 1.0]))


def test_unstepped_env_may_have_invalid_action():
    env = make_tensor_env("CartPole-v1", 3, seed=0)
    td = env.reset()
    td["action"], td["_step"] = torch.tensor([0, 7, 1]), torch.tensor([True, False, True])
    env.step(td)
    td["_step"] = torch.tensor([True, True, False])
    with raises_setting("action"):
        env.step(td)
