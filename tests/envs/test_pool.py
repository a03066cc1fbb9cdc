"""Copies stepped by EnvPool, where it is installed."""

from __future__ import annotations

import math
import os
import sys
import types
import warnings

import numpy as np
import pytest
import torch

from kit.collectors import EpisodeCollector, VectorCollector, make_collector
from kit.envs import make_env
from kit.steps import SettingError, StepPlan
from tests.errors import raises_setting
from tests.waiting import wait_until


def pool(id="CartPole-v1", num_envs=3, **kwargs):
    pytest.importorskip("envpool")
    return make_env(id, num_envs, vectorization="envpool", **kwargs)


def batches(env, count=2, steps=60, **kwargs):
    collector = VectorCollector(env, None, steps_per_env=steps, **kwargs)
    try:
        return [collector.collect() for _ in range(count)], collector
    finally:
        collector.shutdown()


# ---------------------------------------------------------------------- what it gives
def test_time_limit_truncates_without_terminating():
    (batch,), collector = batches(pool(max_episode_steps=5), count=1, steps=15)
    assert not batch["next", "terminated"].any()
    ends = torch.arange(1, 16).expand(3, -1) % 5 == 0
    assert torch.equal(batch["next", "truncated"].squeeze(-1), ends)
    assert [episode.length for episode in collector.take_episodes()] == [5] * 9


def test_pool_uses_envpool_time_limit_by_default():
    (batch,), collector = batches(pool("MountainCar-v0"), count=1, steps=200)
    assert batch["next", "truncated"].sum() == 3
    assert [episode.length for episode in collector.take_episodes()] == [200] * 3


def test_episode_info_has_task_metrics_without_envpool_fields():
    env = pool("FetchReach-v4", 2, max_episode_steps=4)
    _, collector = batches(env, count=1, steps=8)
    infos = [episode.info for episode in collector.take_episodes()]
    assert len(infos) == 4
    assert [set(info) & {"is_success", "env_id", "elapsed_step"} for info in infos] == [
        {"is_success"}
    ] * 4


def test_episode_can_terminate_and_truncate_in_same_step():
    (batch,), _ = batches(pool(max_episode_steps=12), count=1, steps=600)
    both = batch["next", "terminated"] & batch["next", "truncated"]
    out = batch["next", "observation"][..., 2].abs() > math.radians(12)
    assert both.any()
    assert torch.equal(batch["next", "terminated"].squeeze(-1), out)


def test_pool_passes_time_limit_used_in_rewards_to_envpool():
    env = pool("MiniGrid-Empty-5x5-v0", 1, max_episode_steps=100)
    env.start()
    for action in (2, 2, 1, 2, 2):  # to the goal: forward twice, right, forward twice
        result = env.new_step()
        env.step_arrays({"action": np.array([action])}, result)
    assert result.terminated.all()
    assert result.reward[0] == np.float32(1 - 0.9 * 5 / 100)
    env.close()


@pytest.mark.parametrize(
    ("id", "observation", "action"),
    [("Pendulum-v1", (3,), torch.float32), ("HalfCheetah-v5", (17,), torch.float32)],
)
def test_pool_accepts_continuous_actions(id, observation, action):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = pool(id, 2, max_episode_steps=4)
    (batch,), _ = batches(env, count=1, steps=8)
    assert batch["observation"].shape == (2, 8, *observation)
    assert batch["action"].dtype == action
    assert batch["next", "truncated"].sum() == 4


def test_pool_returns_stacked_images_as_uint8():
    (batch,), _ = batches(pool("Pong-v5", 2), count=1, steps=3)
    assert batch["observation"].shape == (2, 3, 4, 84, 84)
    assert batch["observation"].dtype == torch.uint8


def test_set_seed_reproduces_first_observations():
    env = pool()
    env.set_seed(5)
    first = env.start()["observation"].copy()
    env.set_seed(6)
    assert not np.array_equal(env.start()["observation"], first)
    env.set_seed(5)
    assert np.array_equal(env.start()["observation"], first)
    env.close()


def test_episode_collector_collects_complete_episodes_from_pool():
    collector = EpisodeCollector(pool(), None, min_episodes=4)
    batch = collector.collect()
    assert batch["collector", "mask"].shape[0] == 4
    assert collector.idle_env_steps > 0
    collector.shutdown()


def test_pool_normalises_observations_like_other_backends():
    (batch, last), collector = batches(pool(normalize_observation=True))
    assert collector.normalizer.observation["observation"].count == pytest.approx(363.0001)
    assert last["observation"].std() > 5 * 0.05 > batch["observation"].isnan().sum()


def test_resumed_pool_starts_new_episodes_and_reports_it():
    saving = VectorCollector(pool(), None, steps_per_env=7)
    saving.collect()
    state = saving.state_dict()
    going_on = VectorCollector(pool(), None, steps_per_env=7)
    going_on.load_state_dict(state)
    assert not going_on.exact_resume
    assert "EnvPool cannot capture the state" in saving.env.not_resumable
    first = going_on.collect()["observation"][:, 0]
    assert (first.abs() <= 0.05).all()
    assert going_on.policy_steps == 42
    for collector in (saving, going_on):
        collector.shutdown()


def test_close_ends_pool_threads():
    def threads():
        return len(os.listdir("/proc/self/task"))

    before = threads()
    env = pool(num_envs=4, num_threads=2)
    env.start()
    assert threads() > before
    env.close()
    wait_until(lambda: threads() <= before, "the pool's threads end")


# ---------------------------------------------------------------------- what it refuses
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("action_repeat", 2),
        ("restart_on_error", 1),
        ("num_workers", 2),
        ("wrappers", [lambda env: env]),
    ],
)
def test_pool_rejects_settings_that_need_individual_envs(setting, value):
    with pytest.raises(SettingError, match=f"{setting}.* is not supported with .*envpool"):
        make_env("CartPole-v1", 2, vectorization="envpool", **{setting: value})


def test_tensor_collector_rejects_pool():
    env = pool("Ant-v4", 2)
    plan = StepPlan(total_policy_steps=8, num_envs=2, steps_per_env=4)
    with pytest.raises(SettingError, match="written in torch, which Ant-v4 is not"):
        make_collector("tensor", env, None, plan)
    env.close()


def test_make_env_rejects_envpool_when_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with raises_setting("env.vectorization"):
        make_env("CartPole-v1", 2, vectorization="envpool")


def test_make_env_rejects_unrelated_module_named_envpool(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", types.ModuleType("envpool"))
    with raises_setting("env.vectorization"):
        make_env("CartPole-v1", 2, vectorization="envpool")
