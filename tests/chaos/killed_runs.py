"""Runs that are killed: at an operation on a file of theirs, or after some time.

A process of its own imports PyTorch and the recipes once; each run is a fork of it, in a session of
its own, so that what it leaves behind is found.
"""

from __future__ import annotations

import atexit
import importlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")
_WRITES = os.O_WRONLY | os.O_RDWR


class Kill(NamedTuple):
    """A signal, at an operation on a file (counted from 1) or after some seconds."""

    number: int = 0
    operation: int = 0
    seconds: float | None = None


class Ended(NamedTuple):
    """How a run ended."""

    code: int
    """exit code; that of a signal is negative."""
    operations: int
    """on files below its folder of runs."""
    seconds: float
    left: list[int]
    """processes that it left behind."""


class Forks:
    """The process that forks runs; a context."""

    def __enter__(self) -> Forks:
        command = [sys.executable, "-W", "ignore", "-m", "tests.chaos.killed_runs"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, bufsize=1, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()

    def run(self, recipe: str, words: list[str], runs: Path, kill: Kill | None = None) -> Ended:
        """Run a recipe to its end, or until it is killed."""
        order = recipe, [*words, f"runs={runs}"], str(runs), kill or Kill()
        print(json.dumps(order), file=self._process.stdin)
        return Ended(*json.loads(self._process.stdout.readline()))


def serve() -> None:
    """Fork the runs that come in."""
    for recipe in ("ppo", "sac", "dqn", "td3"):
        importlib.import_module(f"recipes.{recipe}")
    for line in sys.stdin:
        recipe, words, runs, kill = json.loads(line)
        kill, seen, began = Kill(*kill), mmap.mmap(-1, 8), time.monotonic()
        pid = os.fork()
        if pid == 0:
            os._exit(_run(recipe, words, runs, kill, seen))
        if kill.seconds is not None:
            time.sleep(kill.seconds)
            os.kill(pid, kill.number)
        _, status = os.waitpid(pid, 0)
        seconds, operations = time.monotonic() - began, int.from_bytes(seen[:8])
        print(json.dumps((os.waitstatus_to_exitcode(status), operations, seconds, _left(pid))))
        sys.stdout.flush()


def _run(recipe: str, words: list[str], runs: str, kill: Kill, seen: mmap.mmap) -> int:
    os.setsid()
    os.makedirs(runs, exist_ok=True)
    output = os.open(f"{runs}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    here = os.getpid()

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
        if (writes or event in _CHANGES) and os.getpid() == here:
            inside = any(runs in str(argument) for argument in arguments[:2])
            if inside or (event in ("os.remove", "os.rmdir") and arguments[1] >= 0):
                count = int.from_bytes(seen[:8]) + 1
                seen[:8] = count.to_bytes(8)
                if count == kill.operation:
                    os.kill(here, kill.number)

    sys.addaudithook(look)
    code = 0
    try:
        module = importlib.import_module(f"recipes.{recipe}")
        importlib.import_module("kit.cli.launch").main(module.Config, module.build, words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code


def _left(session: int, seconds: float = 30.0) -> list[int]:
    """The processes of a session, after they had time to end."""
    end = time.monotonic() + seconds
    while True:
        left = [pid for pid in _processes() if _session(pid) == session]
        if not left or time.monotonic() > end:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return left
        time.sleep(0.02)


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session(pid: int) -> int:
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return -1
    return -1 if state == "Z" else int(session)


if __name__ == "__main__":
    serve()
