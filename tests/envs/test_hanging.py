"""Environments that do not come back from a step, and processes whose parent has died."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kit.collectors import VectorCollector
from kit.envs import make_env
from kit.envs.errors import EnvError
from kit.modules import make_actor
from tests.errors import raises_setting
from tests.hanging import Hangs
from tests.waiting import wait_until


def hanging(num_envs: int, hangs_in: int, once: str = "", **changes):
    make = functools.partial(Hangs, hangs_in, once=once)
    settings = {"vectorization": "async", "num_workers": 1, "step_timeout": 0.5, **changes}
    return make_env(make, num_envs, **settings)


def collector_of(env) -> VectorCollector:
    return VectorCollector(env, make_actor(env, [4]), frames_per_batch=20, total_frames=40)


def test_hanging_env_raises_env_error_with_env_and_step():
    collector = collector_of(hanging(2, hangs_in=13))
    next(iter(collector))
    with pytest.raises(EnvError) as fault:
        collector.collect()
    collector.shutdown()
    assert str(fault.value) == (
        "environment Hangs, env 0, after 12 policy steps: "
        "took longer than 0.5 seconds for a step (step_timeout)"
    )


def test_hanging_env_is_rebuilt_with_restart_on_error(tmp_path):
    env = hanging(2, hangs_in=3, once=str(tmp_path / "once"), restart_on_error=1)
    collector = collector_of(env)
    with pytest.warns(RuntimeWarning, match=r"env 0: took longer than 0.5 seconds"):
        batch = next(iter(collector))
    assert batch["next", "truncated"][:, 2].all()  # both environments of the process that was ended
    assert collector.environment_errors == 1
    assert next(iter(collector)).shape == (2, 10)
    collector.shutdown()


def test_slow_steps_within_timeout_are_accepted():
    collector = collector_of(hanging(2, hangs_in=0, step_timeout=60.0))
    assert sum(batch.numel() for batch in collector) == 40


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_make_env_rejects_step_timeout_without_processes(vectorization):
    with raises_setting("env.step_timeout"):
        make_env("CartPole-v1", 2, vectorization=vectorization, step_timeout=5.0)


def test_step_timeout_accepts_huge_value():
    env = make_env("CartPole-v1", 2, vectorization="async", step_timeout=1e30)
    assert env.rollout(3).shape == (2, 3)
    env.close()


PARENT = """
import functools, threading, time
import numpy as np
from kit.envs.backends.workers import WorkersBackend
from tests.hanging import Hangs

backend = WorkersBackend(functools.partial(Hangs, 1), 2, num_workers=2)
observation = {"observation": np.zeros((2, 2), np.float32)}
backend.reset(observation, [0, 1])
for worker in backend._workers:
    worker.send("step")
print(*(worker.process.pid for worker in backend._workers), flush=True)
time.sleep(3600)
"""


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_hanging_workers_exit_when_parent_is_killed():
    command = [sys.executable, "-W", "ignore", "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        for pid in workers:  # what batch systems send to all processes is the parent's affair
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGUSR1)
        assert all(map(is_there, workers))
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_there, workers)), "the end of the workers")
