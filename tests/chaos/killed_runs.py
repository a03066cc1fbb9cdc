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
import pkgutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import recipes
from kit.config.plain import to_plain
from kit.steps.values import flat
from tests.fuzz.random_configs import small_config
from tests.stored import read_stored

RECIPES = [module.name for module in pkgutil.iter_modules(recipes.__path__)]

_USED_BY_EACH_RUN = (
    "hydra.main", "hydra._internal.hydra", "hydra._internal.config_loader_impl",
    "hydra.core.override_parser.overrides_parser", "matplotlib.pyplot",
    "matplotlib.backends.backend_agg", "gymnasium.envs.classic_control", "kit.cli.launch",
)  # fmt: skip
_MARK = "KIT_CHAOS"
"""variable in the environment of a run's processes, also of those in sessions of their own."""
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
        order = recipe, [*words, f"log_dir={runs}"], str(runs), kill or Kill()
        print(json.dumps(order), file=self._process.stdin)
        return Ended(*json.loads(self._process.stdout.readline()))


def small(recipe: str) -> list[str]:
    """Settings of a run of some dozen steps, as words of the command line."""
    config_class = importlib.import_module(f"recipes.{recipe}").Config
    given, default = flat(small_config(config_class)), flat(to_plain(config_class()))
    changed = {name: value for name, value in given.items() if value != default[name]}
    return [f"{name}={json.dumps(value)}" for name, value in changed.items() if name != "log_dir"]


def serve() -> None:
    """Fork the runs that come in."""
    for name in (*_USED_BY_EACH_RUN, *(f"recipes.{recipe}" for recipe in RECIPES)):
        importlib.import_module(name)
    importlib.import_module("kit.experiment").read_datasets = read_stored
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
        print(
            json.dumps((os.waitstatus_to_exitcode(status), operations, seconds, _left(pid, runs)))
        )
        sys.stdout.flush()


def _run(recipe: str, words: list[str], runs: str, kill: Kill, seen: mmap.mmap) -> int:
    os.setsid()
    os.makedirs(runs, exist_ok=True)
    os.environ |= {_MARK: runs, "TMPDIR": runs, "WANDB_MODE": "offline"}
    output = os.open(f"{runs}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
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


def _left(session: int, runs: str, seconds: float = 30.0) -> list[int]:
    """The processes of a run, after they had time to end."""
    end, mark = time.monotonic() + seconds, f"{_MARK}={runs}\0".encode()
    while True:
        left = [pid for pid in _processes() if _session(pid) == session or mark in _started(pid)]
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


def _started(pid: int) -> bytes:
    """The environment in which a program was started; that of a fork is its parent's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    serve()
