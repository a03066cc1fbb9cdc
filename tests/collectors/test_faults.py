"""Environments that fail while a collector steps them."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch

from kit.collectors import AsyncCollector, EpisodeCollector, VectorCollector
from kit.envs import make_env
from kit.envs.errors import EnvError
from kit.modules import make_actor
from tests.envs.odd_envs import Raises, Steps


def raising(tmp_path, *at, **kwargs):
    """An environment whose calls of step ``at`` fail, counted over all copies."""
    return functools.partial(Raises, at=at, path=str(tmp_path / "calls"), **kwargs)


def vector(env, steps_per_env=6, batches=2):
    frames = env.num_envs * steps_per_env
    return VectorCollector(env, frames_per_batch=frames, total_frames=frames * batches)


def collected(collector):
    """All batches in one, and the collector shut down; warnings have tests of their own."""
    with warnings.catch_warnings(record=True):
        try:
            return torch.cat([batch.clone() for batch in collector], -1)
        finally:
            collector.shutdown()


def column(batch, key, copy=0):
    return batch[copy].get(("next", key)).flatten().int().tolist()


# ---------------------------------------------------------------------- a copy that raises
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(("frames", "reuse"), [(1, False), (6, False), (6, True)])
def test_env_error_truncates_episode_and_keeps_exact_counts(tmp_path, vectorization, frames, reuse):
    env = make_env(raising(tmp_path, 5, length=4), vectorization=vectorization, restart_on_error=1)
    collector = VectorCollector(env, frames_per_batch=frames, total_frames=12, reuse=reuse)
    batch = collected(collector)
    assert column(batch, "truncated") == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert column(batch, "terminated") == [0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0]
    assert column(batch, "observation") == [1, 2, 3, 4, 0, 1, 2, 3, 4, 1, 2, 3]
    assert column(batch, "reward") == [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]
    assert batch["observation"].flatten().tolist() == [0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 1, 2]
    assert (collector.policy_steps, collector.env_steps) == (12, 12)
    assert (collector.episodes, collector.environment_errors) == (3, 1)
    lengths = [(e.length, e.episode_return, e.terminated) for e in collector.take_episodes()]
    assert lengths == [(4, 4.0, True), (1, 0.0, False), (4, 4.0, True)]


def test_env_failure_does_not_affect_other_envs(tmp_path):
    env = make_env(raising(tmp_path, 4, length=4), 3, restart_on_error=1)  # copy 0, second step
    collector = vector(env)
    batch = collected(collector)
    assert column(batch, "observation", 0) == [1, 1, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    for copy in (1, 2):
        assert column(batch, "observation", copy) == [1, 2, 3, 4] * 3
    assert batch.shape == (3, 12)
    numbers = batch["collector", "traj_ids"]
    assert len(numbers.unique()) == 4 + 3 + 3


def test_two_envs_failing_in_same_step_both_recover(tmp_path):
    env = make_env(raising(tmp_path, 4, 6, length=4), 3, restart_on_error=2)
    collector = vector(env)
    batch = collected(collector)
    assert [column(batch, "truncated", copy)[:3] for copy in range(3)] == [
        [0, 1, 0],
        [0, 0, 0],
        [0, 1, 0],
    ]
    assert collector.environment_errors == 2


def test_each_recovered_failure_is_logged_with_its_count(tmp_path):
    env = make_env(raising(tmp_path, 2, 4), restart_on_error=3)
    with pytest.warns(RuntimeWarning) as caught:
        next(iter(vector(env)))
    texts = [str(warning.message) for warning in caught]
    assert [text[-8:] for text in texts] == ["(1 of 3)", "(2 of 3)"]
    assert all("environment Raises, env 0: step() raised OSError" in text for text in texts)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_env_error_contains_env_message_after_last_restart(tmp_path, vectorization):
    env = make_env(raising(tmp_path, 2, 4, 9), vectorization=vectorization, restart_on_error=2)
    collector = vector(env)
    with pytest.warns(RuntimeWarning, match="2 of 2"):
        collector.collect()
    with pytest.raises(EnvError) as caught:
        collector.collect()
    collector.shutdown()
    assert "raised OSError: the simulator fell over" in str(caught.value)
    assert (caught.value.env, caught.value.policy_step) == (0, 8)


def test_first_failure_counts_no_steps_without_restarts(tmp_path):
    collector = vector(make_env(raising(tmp_path, 9)))
    collector.collect()
    with pytest.raises(EnvError, match="after 8 policy steps"):
        collector.collect()
    assert (collector.policy_steps, collector.environment_errors) == (6, 0)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_collector_starts_new_episodes_after_env_error(tmp_path, vectorization):
    env = make_env(raising(tmp_path, 9, length=4), 2, vectorization=vectorization)
    collector = vector(env, steps_per_env=3)
    first = collector.collect()
    with pytest.raises(EnvError):
        collector.collect()
    batch = collector.collect()
    collector.shutdown()
    assert batch["observation"].flatten().tolist() == [0, 1, 2] * 2
    assert not set(first["collector", "traj_ids"].unique().tolist()) & set(
        batch["collector", "traj_ids"].unique().tolist()
    )
    assert collector.policy_steps == 12
    assert collector.take_episodes() == []


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_episode_collector_truncates_episode_at_env_failure(tmp_path, vectorization, layout):
    env = make_env(raising(tmp_path, 5), vectorization=vectorization, restart_on_error=1)
    collector = EpisodeCollector(env, min_episodes=3, total_frames=8, layout=layout)
    with pytest.warns(RuntimeWarning, match="1 of 1"):
        batch = next(iter(collector))
    collector.shutdown()
    episodes = collector.take_episodes()
    assert [(e.length, e.terminated) for e in episodes] == [(3, True), (2, False), (3, True)]
    assert (collector.policy_steps, collector.env_steps) == (8, 8)
    assert (collector.episodes, collector.environment_errors) == (3, 1)
    assert int(batch["next", "truncated"].sum()) == 1


def test_failure_count_continues_after_resume(tmp_path):
    def make():
        return vector(make_env(raising(tmp_path, 2, 8), restart_on_error=1))

    saving, going_on = make(), make()
    with pytest.warns(RuntimeWarning, match="1 of 1"):
        saving.collect()
    going_on.load_state_dict(saving.state_dict())
    assert going_on.environment_errors == 1
    with pytest.raises(EnvError, match="fell over"):
        going_on.collect()


# ---------------------------------------------------------------------- a process that dies
def workers_of(collector):
    return collector.env.backend._workers


def test_killed_worker_truncates_episodes_and_keeps_step_counts():
    collector = vector(make_env(Steps, 2, vectorization="async", num_workers=2, restart_on_error=1))
    first = collector.collect().clone()
    process = workers_of(collector)[1].process
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.warns(RuntimeWarning, match=r"envs 1 to 1 died \(signal SIGKILL"):
        second = collector.collect()
    collector.shutdown()
    assert first.shape == second.shape == (2, 6)
    assert column(second, "observation", 0) == [1, 2, 3, 1, 2, 3]
    assert column(second, "observation", 1) == [0, 1, 2, 3, 1, 2]
    assert column(second, "truncated", 1) == [1, 0, 0, 0, 0, 0]
    assert (collector.policy_steps, collector.env_steps) == (24, 24)
    assert (collector.episodes, collector.environment_errors) == (8, 1)


def test_worker_is_restarted_after_simulator_exit(tmp_path):
    env = make_env(raising(tmp_path, 3, 8, how="die"), vectorization="async", restart_on_error=2)
    collector = vector(env)
    batch = collected(collector)
    assert column(batch, "truncated") == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert column(batch, "observation") == [1, 2, 2, 1, 2, 3, 1, 1, 1, 2, 3, 1]
    assert collector.environment_errors == 2


def test_env_error_reports_exit_code_after_last_worker_restart(tmp_path):
    env = make_env(raising(tmp_path, 2, 4, how="die"), vectorization="async", restart_on_error=1)
    collector = vector(env)
    with (
        pytest.warns(RuntimeWarning, match="1 of 1"),
        pytest.raises(EnvError, match=r"after 3 policy steps: .*died \(exit code 3"),
    ):
        collector.collect()
    collector.shutdown()


# ---------------------------------------------------------------------- NaN
class NotANumber(Steps):
    """Observes or earns NaN in the given step of its life."""

    def __init__(self, at, what, length=4):
        super().__init__(length)
        self.at, self.what, self.life = at, what, 0

    def reset(self, **kwargs):
        seen, info = super().reset(**kwargs)
        if self.what == "reset" and self.life == self.at > 0:
            seen = np.array([np.nan], np.float32)
        return seen, info

    def step(self, action):
        seen, reward, *rest = super().step(action)
        self.life += 1
        if self.life == self.at and self.what == "reward":
            reward = float("nan")
        if self.life == self.at and self.what == "observation":
            seen = np.array([np.nan], np.float32)
        return seen, reward, *rest


def one_of_three(at, what):
    """Three copies, of which the second returns NaN."""
    made = []

    def make():
        made.append(None)
        return NotANumber(at if len(made) % 3 == 2 else 0, what)

    return make


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_env_error_reports_env_and_step_of_nan(what):
    collector = vector(make_env(one_of_three(9, what), 3))
    collector.collect()
    with pytest.raises(EnvError) as caught:
        collector.collect()
    assert (caught.value.env, caught.value.policy_step) == (1, 8)
    assert f"returned NaN as {what}, 0 policy steps into its episode" in str(caught.value)


def test_env_error_reports_env_and_step_of_nan_in_reset():
    collector = vector(make_env(one_of_three(8, "reset"), 3))
    collector.collect()
    with pytest.raises(EnvError, match="NaN as observation when it was reset") as caught:
        collector.collect()
    assert (caught.value.env, caught.value.policy_step) == (1, 8)


@pytest.mark.parametrize("what", ["observation", "reward"])
def test_episode_collector_reports_env_and_step_of_nan(what):
    collector = EpisodeCollector(make_env(one_of_three(3, what), 3), min_episodes=3)
    with pytest.raises(EnvError) as caught:
        collector.collect()
    assert caught.value.env == 1
    assert f"returned NaN as {what}, 2 policy steps into its episode" in str(caught.value)


class Huge(Steps):
    """Observes and earns numbers whose squares are infinite in float32."""

    def step(self, action):
        _, _, *rest = super().step(action)
        return np.array([3e38], np.float32), -3e38, *rest


@pytest.mark.parametrize("length", [4, 99])
def test_large_finite_values_are_accepted(length):
    batch = vector(make_env(lambda: Huge(length), 3)).collect()
    assert (batch["next", "observation"] == torch.tensor(3e38)).all()


# ---------------------------------------------------------------------- in another process
def test_async_collector_counts_and_logs_worker_failures(tmp_path, capfd):
    env = make_env(raising(tmp_path, 5, length=4), restart_on_error=1)
    collector = AsyncCollector(env, frames_per_batch=6, total_frames=12)
    batch = collected(collector)
    assert column(batch, "truncated") == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert (collector.policy_steps, collector.environment_errors) == (12, 1)
    assert "the simulator fell over" in capfd.readouterr().err


def test_async_collector_forwards_env_error_unchanged(tmp_path):
    before = set(multiprocessing.active_children())
    env = make_env(raising(tmp_path, 9))
    collector = AsyncCollector(env, frames_per_batch=6, max_staleness=0)
    collector.collect()
    with pytest.raises(EnvError, match="fell over") as caught:
        collector.collect()
    assert (caught.value.env, caught.value.policy_step) == (0, 8)
    collector.shutdown()
    assert set(multiprocessing.active_children()) == before


def test_killed_collector_process_raises_env_error():
    before = set(multiprocessing.active_children())
    collector = AsyncCollector(make_env(Steps), frames_per_batch=6)
    collector.collect()
    os.kill(collector._process.pid, signal.SIGKILL)
    with pytest.raises(EnvError, match=r"collector's process died \(signal SIGKILL"):
        list(itertools.islice(collector, 3))  # what was made before is delivered
    collector.shutdown()
    assert set(multiprocessing.active_children()) == before


class Choice(gym.Env):
    """Allows no action in its third step."""

    action_space = gym.spaces.MultiDiscrete([2, 3])
    observation_space = gym.spaces.Box(0, 1, (1,))

    def _seen(self):
        forbidden = [1, 1, 0, 0, 0] if self.count == 2 else [1, 0, 0, 1, 1]
        return np.zeros(1, np.float32), {"action_mask": np.array(forbidden, np.int8)}

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return self._seen()

    def step(self, action):
        self.count += 1
        seen, info = self._seen()
        return seen, 1.0, False, self.count >= 9, info


@pytest.mark.parametrize("at_random", [False, True])
@pytest.mark.parametrize("kind", [VectorCollector, EpisodeCollector])
def test_state_without_allowed_action_raises_env_error(kind, at_random):
    env = make_env(Choice, 2)
    size = {"steps_per_env": 4} if kind is VectorCollector else {"min_episodes": 2}
    collector = kind(env, None if at_random else make_actor(env), **size)
    with pytest.raises(EnvError, match=r"env 0, after 2 policy steps: allows no action"):
        collector.collect()
