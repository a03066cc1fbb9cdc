"""No process, thread or shared memory is left behind, however a script ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tests.waiting import LONG, wait_until

pytestmark = pytest.mark.skipif(not Path("/dev/shm").exists(), reason="needs Linux's /proc and shm")

SCRIPT = """
import functools, multiprocessing, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run
from kit.collectors import AsyncCollector, VectorCollector
from kit.envs import make_env
from tests.envs.odd_envs import Raises, Steps

how, path = sys.argv[1:]
# two processes count in one file and could miss a single number
make = functools.partial(Raises, at=range(15, 10**6), path=path) if how == "exception" else Steps

def made():
    env = make_env(make, 2, vectorization="async", num_workers=2)
    found = [
        VectorCollector(env, frames_per_batch=8),
        AsyncCollector(make_env(Steps, 2), frames_per_batch=8),
    ]
    for collector in found:
        collector.collect()
    return found

collectors = made()
children = [process.pid for process in multiprocessing.active_children()]
print("children", os.getpid(), *children, flush=True)
if how == "shutdown":
    for collector in collectors:
        collector.shutdown()
    others = [t for t in threading.enumerate() if t is not threading.main_thread()]
    print("after", len(multiprocessing.active_children()), len(others), flush=True)
    collectors = made()  # which the script does not shut down
elif how in ("exception", "interrupt", "kill"):
    while True:
        for collector in collectors:
            collector.collect()
print("end", flush=True)
"""


def start(how: str, path: Path) -> tuple[subprocess.Popen, list[int]]:
    """Start the script, in a process group as a terminal does; return it when it has collected.

    With it come the numbers of its processes: itself, two workers, one that collects.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", textwrap.dedent(SCRIPT), how, str(path / "calls")]
    with (path / "stderr").open("w") as errors:
        process = subprocess.Popen(
            arguments,
            cwd=path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    line = process.stdout.readline().split()
    assert len(line) == 5, (path / "stderr").read_text()
    return process, [int(number) for number in line[1:]]


def end(process: subprocess.Popen, path: Path) -> tuple[str, str]:
    """Wait for the script; return its output and its errors."""
    assert process.stdout is not None
    hangs = threading.Timer(LONG, lambda: os.killpg(process.pid, signal.SIGKILL))
    hangs.start()
    out = process.stdout.read()
    process.wait()
    hangs.cancel()
    return out, (path / "stderr").read_text()


def alive(numbers: list[int]) -> list[int]:
    """Those of the processes that run; ended ones that nobody waited for do not count."""
    found = []
    for number in numbers:
        status = Path(f"/proc/{number}/stat")
        try:
            if status.read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(number)
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def left(numbers: list[int]) -> list[str]:
    """What is left of processes once they have ended: files of shared memory named after them."""
    wait_until(lambda: not alive(numbers), f"processes {numbers} end")
    names = {part for number in numbers for part in (f"torch_{number}_", f"pym-{number}-")}
    return [f.name for f in Path("/dev/shm").iterdir() if f.name.startswith(tuple(names))]


def test_no_resources_remain_after_shutdown_or_script_end(tmp_path):
    process, numbers = start("shutdown", tmp_path)
    out, err = end(process, tmp_path)
    assert out.split() == ["after", "0", "0", "end"]
    assert (process.returncode, err, left(numbers)) == (0, "", [])


def test_no_resources_remain_after_uncaught_exception(tmp_path):
    process, numbers = start("exception", tmp_path)
    out, err = end(process, tmp_path)
    assert (process.returncode, out) == (1, "")
    assert err.splitlines()[-1].startswith("kit.envs.errors.EnvError: environment Raises")
    assert left(numbers) == []


def test_no_resources_remain_after_interrupt_of_process_group(tmp_path):
    process, numbers = start("interrupt", tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    out, err = end(process, tmp_path)
    assert out == ""
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert err.count("Traceback") == 1
    assert left(numbers) == []


def test_no_resources_remain_after_script_is_killed(tmp_path):
    process, numbers = start("kill", tmp_path)
    process.kill()
    end(process, tmp_path)
    assert left(numbers) == []
