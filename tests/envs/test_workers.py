"""Copies in worker processes: the same steps as in this process, and what happens when one dies."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from kit.envs import make_env
from kit.envs.backends.workers import without_main
from kit.envs.errors import EnvError
from kit.testing.counter import COUNTER
from tests.envs.odd_envs import BadReset, ManySpaces, Raises, Returns, Steps


def processes() -> set:
    return set(multiprocessing.active_children())


@pytest.fixture
def workers():
    """Makes environments in worker processes, and closes them."""
    made = []

    def make(id=Steps, num_envs=2, **kwargs):
        made.append(make_env(id, num_envs, vectorization="async", **kwargs))
        return made[-1]

    yield make
    for env in made:
        env.close(raise_if_closed=False)


def step(env, action=0, active=None):
    """Take one step with the same discrete action in every copy, or in some."""
    result = env.new_step()
    env.step_arrays({"action": np.full(env.num_envs, action)}, result, active)
    return result


def kill(env, number=0):
    """Kill a worker process and wait until it is dead."""
    process = env.backend._workers[number].process
    os.kill(process.pid, signal.SIGKILL)
    process.join()


# ---------------------------------------------------------------------- processes
@pytest.mark.parametrize(("cores", "expected"), [(2, 2), (8, 3), (None, 1)])
def test_num_workers_defaults_to_cpu_count(workers, monkeypatch, cores, expected):
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    before = processes()
    workers(num_envs=3)
    assert len(processes() - before) == expected


# ---------------------------------------------------------------------- steps
def test_workers_step_like_local_envs(workers):
    here, there = make_env(COUNTER, 3, seed=5), workers(COUNTER, 3, seed=5, num_workers=2)
    assert np.array_equal(here.start()["observation"], there.start()["observation"])
    for action in (0, 1, 2, 0, 1, 2, 0):
        one, other = step(here, action), step(there, action)
        for name in ("reward", "terminated", "truncated", "env_steps"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("observation", "next_observation"):
            assert np.array_equal(
                getattr(one, name)["observation"], getattr(other, name)["observation"]
            )


def test_shared_memory_supports_all_space_kinds(workers):
    here, there = make_env(ManySpaces, 2, seed=1), workers(ManySpaces, 2, seed=1, num_workers=1)
    actions = {}
    for leaf in here.action_leaves:
        drawn = here.full_action_spec.rand().get(leaf.key).numpy()
        actions[leaf.key] = drawn.astype(leaf.dtype)
    one, other = here.new_step(), there.new_step()
    for env, result in ((here, one), (there, other)):
        env.start()
        env.step_arrays(actions, result)
    for leaf in here.observation_leaves:
        seen = one.next_observation[leaf.key], other.next_observation[leaf.key]
        assert seen[0].dtype == seen[1].dtype == leaf.dtype
        assert np.array_equal(*seen)
    assert np.array_equal(one.reward, other.reward)


def test_inactive_envs_do_not_step(workers):
    env = workers(Steps, 3, num_workers=2)
    env.start()
    result = env.new_step()
    env.step_arrays({"action": np.zeros(3, int)}, result, np.array([True, False, True]))
    assert result.next_observation["observation"][:, 0].tolist() == [1, 0, 1]
    assert result.reward.tolist() == [1, 0, 1]
    assert result.env_steps.tolist() == [1, 0, 1]


def test_inactive_envs_keep_normalised_observation(workers):
    env = workers(Steps, 2, num_workers=1, normalize_observation=True)
    env.start()
    seen = step(env).observation["observation"]
    result = step(env, active=np.array([True, False]))
    assert result.next_observation["observation"][1] == seen[1]
    assert result.observation["observation"][1] == seen[1]


@pytest.mark.parametrize(("copies", "asked", "expected"), [(3, 2, 2), (1, 4, 1)])
def test_num_workers_sets_process_count_up_to_num_envs(workers, copies, asked, expected):
    before = processes()
    workers(Steps, copies, num_workers=asked)
    assert len(processes() - before) == expected


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of libraries")
def test_worker_does_not_load_torch(workers):
    env = workers(COUNTER, 1)
    env.start()
    maps = Path(f"/proc/{env.backend._workers[0].process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "libtorch" in Path("/proc/self/maps").read_text()


# ---------------------------------------------------------------------- faults
def raising(tmp_path, *at, **kwargs):
    return functools.partial(Raises, at=at, path=str(tmp_path / "calls"), **kwargs)


def test_raising_env_repeats_normalised_observation(workers, tmp_path):
    env = workers(
        raising(tmp_path, 3), 2, num_workers=1, restart_on_error=1, normalize_observation=True
    )
    env.start()
    seen = step(env).observation["observation"]
    with pytest.warns(RuntimeWarning, match="the simulator fell"):
        result = step(env)
    assert result.next_observation["observation"][0] == seen[0]


def test_inactive_env_of_dead_worker_has_normalised_observation(workers):
    env = workers(Steps, 2, num_workers=1, restart_on_error=1, normalize_observation=True)
    env.start()
    step(env)
    kill(env)
    with pytest.warns(RuntimeWarning, match="SIGKILL"):
        result = step(env, active=np.array([True, False]))
    first, left_out = result.observation["observation"][:, 0].tolist()
    assert first == left_out != 0


def test_killed_worker_restarts_and_truncates_episodes(workers):
    env = workers(Steps, 4, num_workers=2, restart_on_error=1)
    env.start()
    step(env)
    kill(env, 0)
    with pytest.warns(RuntimeWarning, match=r"the process of envs 0 to 1 died \(signal SIGKILL"):
        result = step(env)
    assert result.truncated.tolist() == [True, True, False, False]
    assert result.reward.tolist() == [0, 0, 1, 1]
    assert result.next_observation["observation"][:, 0].tolist() == [1, 1, 2, 2]
    assert result.observation["observation"][:, 0].tolist() == [0, 0, 2, 2]
    assert step(env).next_observation["observation"][:, 0].tolist() == [1, 1, 3, 3]
    assert env.backend.faults == 1


def test_reset_restarts_worker_that_died_between_episodes(workers):
    env = workers(Steps, 2, num_workers=1, restart_on_error=1)
    env.start()
    step(env)
    kill(env)
    with pytest.warns(RuntimeWarning, match="SIGKILL"):
        assert env.restart()["observation"][:, 0].tolist() == [0, 0]
    assert env.backend.faults == 1


def test_keyboard_interrupt_in_env_raises_env_error(workers, tmp_path):
    env = workers(functools.partial(Raises, (2,), str(tmp_path / "calls"), how="interrupt"), 1)
    env.start()
    step(env, 0)
    with pytest.raises(EnvError, match="raised KeyboardInterrupt in its process"):
        step(env, 0)


def test_signals_wait_while_processes_start():
    ours = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with without_main():
        assert ours <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_restart_limit_counts_all_workers(workers):
    env = workers(Steps, 2, num_workers=2, restart_on_error=1)
    env.start()
    kill(env, 0)
    with pytest.warns(RuntimeWarning, match="1 of 1"):
        step(env)
    kill(env, 1)
    with pytest.raises(EnvError, match="envs 1 to 1 died"):
        step(env)


def test_rebuilt_env_starts_from_same_state_in_every_run(workers):
    seen = []
    for _ in range(2):
        env = workers(COUNTER, 2, num_workers=1, seed=3, restart_on_error=1)
        before = env.start()["observation"][:, 0].copy()
        kill(env)
        with pytest.warns(RuntimeWarning):
            seen.append(step(env).observation["observation"][:, 0].tolist())
        assert not set(before.tolist()) & set(seen[-1])
    assert seen[0] == seen[1]


def test_error_names_env_with_invalid_observation(workers):
    env = workers(functools.partial(Returns, np.zeros(2, np.float32)), 2, num_workers=2)
    env.start()
    step(env)
    with pytest.raises(EnvError, match=r"env 0: returned observation of shape \(2,\)"):
        step(env)


def test_failing_reset_raises_env_error_after_all_restarts(workers):
    env = workers(BadReset, 1, restart_on_error=2)
    with (
        pytest.warns(RuntimeWarning, match="no power"),
        pytest.raises(EnvError, match=r"reset\(\) raised RuntimeError: no power"),
    ):
        env.start()


@pytest.mark.parametrize("collector", ["vector", "async"])
def test_workers_start_inside_joblib_processes(collector):
    joblib = pytest.importorskip("joblib")

    def steps():
        from kit.collectors import AsyncCollector, VectorCollector
        from kit.envs import make_env
        from kit.testing.counter import COUNTER

        kind = {"vector": VectorCollector, "async": AsyncCollector}[collector]
        made = kind(make_env(COUNTER, 2, vectorization="async", num_workers=1), steps_per_env=4)
        made.collect()
        made.shutdown()
        return made.policy_steps

    assert joblib.Parallel(n_jobs=2)(joblib.delayed(steps)() for _ in "ab") == [8, 8]


def test_failed_env_creation_leaves_no_process(workers):
    class OnlyHere(Steps):
        """Can be made in this process alone."""

        here = os.getpid()

        def __init__(self):
            super().__init__()
            if os.getpid() != self.here:
                raise OSError("no licence")

    before = processes()
    with pytest.raises(EnvError, match=r"did not start: .*OSError: no licence"):
        workers(OnlyHere, 2)
    assert processes() == before


def test_full_state_of_dead_worker_raises_env_error(workers):
    env = workers(COUNTER, 1)
    env.start()
    kill(env)
    with pytest.raises(EnvError, match=r"died \(signal SIGKILL"):
        env.full_state()


def test_failed_worker_restart_raises_env_error_with_reason(workers, tmp_path):
    licences = tmp_path / "licences"
    licences.touch()

    class Licensed(Steps):
        """Can be made while there are licences."""

        def __init__(self, path=str(licences)):
            super().__init__()
            if not os.path.exists(path):
                raise OSError("no licence")

    env = workers(Licensed, 2, num_workers=1, restart_on_error=1)
    env.start()
    licences.unlink()
    kill(env)
    with (
        pytest.warns(RuntimeWarning, match="SIGKILL"),
        pytest.raises(EnvError, match="creating it raised OSError: no licence"),
    ):
        step(env)


# ---------------------------------------------------------------------- the end
def test_close_ends_processes_and_is_idempotent(workers):
    before = processes()
    env = workers(Steps, 2, num_workers=2)
    env.close(raise_if_closed=False)
    env.close(raise_if_closed=False)
    assert processes() == before


def test_processes_end_when_env_is_garbage_collected():
    before = processes()
    env = make_env(Steps, 1, vectorization="async")
    assert len(processes() - before) == 1
    del env
    gc.collect()
    assert processes() == before


@pytest.mark.parametrize("use", ["reset", "full_state"])
def test_closed_env_rejects_further_use(use):
    env = make_env("CartPole-v1", 2, vectorization="async", num_workers=1, restart_on_error=3)
    env.reset()
    env.close()
    with pytest.raises(RuntimeError, match="was closed; create a new one"):
        getattr(env, use)()
