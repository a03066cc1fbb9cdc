"""A process that steps some envs: the memory shared with it, the process from outside and inside.

Observations, actions and rewards are exchanged through shared memory without a name, which the
system frees with the last process that uses it; commands and faults go through pipes. A worker
imports no torch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kit.envs.backends.base import StepArrays, fault_of
from kit.envs.backends.serial import SerialBackend
from kit.envs.errors import EnvironmentFault
from kit.envs.spaces import Arrays, Leaf
from kit.envs.state import CannotCapture
from kit.steps.errors import SettingError

_CONTEXT = multiprocessing.get_context("spawn")
_SECONDS_TO_CLOSE = 5.0


class WorkerArrays:
    """Arrays of some envs over the shared memory."""

    def __init__(
        self, get: Callable[[str, tuple[int, ...], Any], Any], shared: SharedMemory
    ) -> None:
        def each(kind: str, found: Sequence[Leaf]) -> Arrays:
            return {leaf.key: get(f"{kind} {leaf.key}", leaf.shape, leaf.dtype) for leaf in found}

        self.action = each("action", shared.action)
        self.active = get("active", (), np.bool_)
        self.recovered = get("recovered", (), np.bool_)
        self.result = StepArrays(
            next_observation=each("next", shared.observation),
            observation=each("observation", shared.observation),
            reward=get("reward", (), np.float32),
            terminated=get("terminated", (), np.bool_),
            truncated=get("truncated", (), np.bool_),
            env_steps=get("env_steps", (), np.int32),
        )


class SharedMemory:
    """Memory that processes share, and what is where in it."""

    def __init__(self, num_envs: int, observation: Sequence[Leaf], action: Sequence[Leaf]) -> None:
        self.num_envs = num_envs
        # Spaces stay here: workers know their own, and some cannot be sent.
        self.observation = [_without_space(leaf) for leaf in observation]
        self.action = [_without_space(leaf) for leaf in action]
        self.places: dict[str, int] = {}
        self.size = 0
        WorkerArrays(self._reserve, self)
        self.memory: Any = _CONTEXT.RawArray("b", max(self.size, 1))

    def _reserve(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        size = int(np.prod((self.num_envs, *shape))) * np.dtype(dtype).itemsize
        self.places[name] = self.size
        self.size += -(-size // 64) * 64

    def arrays(self, first: int = 0, last: int | None = None) -> WorkerArrays:
        """Return the arrays of envs ``first`` to ``last``, without the last one."""

        def view(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
            whole = (self.num_envs, *shape)
            start = self.places[name]
            count = int(np.prod(whole))
            array = np.frombuffer(self.memory, np.dtype(dtype), count, start).reshape(whole)
            return array[first:last]

        return WorkerArrays(view, self)


def _without_space(leaf: Leaf) -> Leaf:
    return Leaf(leaf.key, leaf.path, None, leaf.shape, leaf.dtype)


class Worker:
    """One process, seen from the outside.

    Args:
        how: pickled arguments of the envs.
        shared: memory.
        first: number of its first env.
        last: number after its last env.
    """

    def __init__(self, how: bytes, shared: SharedMemory, first: int, last: int) -> None:
        self.how, self.shared, self.first, self.last = how, shared, first, last
        self.process: Any = None
        self.pipe: Connection | None = None
        self.answer: Any = None  # the last
        self._recovered: list[EnvironmentFault] = []

    def start(self) -> None:
        """Start the process; it says with a first message that it is ready."""
        self.stop(0.0)
        self.pipe, theirs = _CONTEXT.Pipe()
        arguments = (theirs, self.how, self.shared, self.first, self.last)
        self.process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        with without_main():
            self.process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        """Send a command. To one that has died nothing can be sent, which is found out later."""
        assert self.pipe is not None
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(pickle.dumps(message))

    def send_step(self) -> None:
        """Ask for a step."""
        assert self.pipe is not None
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"")

    def receive(self) -> Any:
        """Wait for the answer, and keep the faults it recovered from.

        Raises:
            EOFError: if the process has died.
            Exception: what was raised in the process.
        """
        assert self.pipe is not None
        answer = self.pipe.recv_bytes()
        if not answer:
            return None
        recovered, value = pickle.loads(answer)
        self._recovered += recovered
        if isinstance(value, Exception):
            raise value
        return value

    def take_mended(self) -> list[EnvironmentFault]:
        """Return the faults the process recovered from since the last call."""
        recovered, self._recovered = self._recovered, []
        return recovered

    def exit_code(self) -> str:
        """Return how the process ended, in words."""
        self.process.join(_SECONDS_TO_CLOSE)
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def stop(self, seconds: float) -> None:
        """End the process: ask, wait, and then insist."""
        if self.process is None:
            return
        assert self.pipe is not None
        if seconds:
            self.send(("close",))
        self.pipe.close()
        self.process.join(seconds)
        for insist in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                insist()
                self.process.join(1.0)
        self.process = None


def stop(workers: Sequence[Worker]) -> None:
    """End all processes: ask all, then wait for each."""
    for worker in workers:
        if worker.process is not None:
            worker.send(("close",))
    for worker in workers:
        worker.stop(_SECONDS_TO_CLOSE)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Hide the main module while processes are spawned.

    Each would import it again, and with it torch: seconds and half a gigabyte for every env. The
    processes do not need it: what they make is sent by value.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# ---------------------------------------------------------------------- in the process
def _serve(pipe: Connection, how: bytes, shared: SharedMemory, first: int, last: int) -> None:
    """Do what the pipe says until it says to close, or is closed at the other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who then closes
    backend = None
    try:
        try:
            backend = _make(how, first, last)
        except Exception as error:
            pipe.send_bytes(_pickled(error, []))
            return
        served = _Served(backend, shared.arrays(first, last))
        pipe.send_bytes(b"")
        while True:
            message = pipe.recv_bytes()
            if not message:
                pipe.send_bytes(served.step())
                continue
            command, *arguments = pickle.loads(message)
            if command == "close":
                return
            pipe.send_bytes(served.answer(command, arguments))
    except (EOFError, OSError):
        return  # the other side is gone
    finally:
        if backend is not None:
            backend.close()


def _make(how: bytes, first: int, last: int) -> SerialBackend:
    make, name, restarts = pickle.loads(how).fn
    try:
        return SerialBackend(make, last - first, name, restarts=restarts, first=first)
    except Exception as error:
        raise fault_of(name, None, error, "making it") from error


class _Served:
    """The envs of one process, and the shared memory they read and write."""

    def __init__(self, backend: SerialBackend, arrays: WorkerArrays) -> None:
        self.backend, self.arrays = backend, arrays
        self._told: list[EnvironmentFault] = []
        backend.tell = self._told.append

    def step(self) -> bytes:
        """Take one step; return the faults recovered from, if any."""
        result = self.arrays.result
        result.terminated[...] = False
        result.truncated[...] = False
        result.env_steps[...] = 1
        active = self.arrays.active
        try:
            recovered = self.backend.step(
                self.arrays.action, result, None if active.all() else active.copy()
            )
        except Exception as error:
            return _pickled(error, self._told)
        self.arrays.recovered[...] = False if recovered is None else recovered
        return self._answer(self.backend.infos or None)

    def _answer(self, value: Any = None) -> bytes:
        """Return an answer, pickled, with the faults recovered from; most often none."""
        if value is None and not self._told:
            return b""
        told = pickle.dumps((self._told, value))
        self._told.clear()
        return told

    def answer(self, command: str, arguments: list[Any]) -> bytes:
        """Do one command and return the answer, pickled."""
        try:
            if command == "reset":
                seeds, mask = arguments
                self.backend.reset(self.arrays.result.observation, seeds, mask)
                return self._answer()
            if command == "states":
                return self._answer(self.backend.full_states())
            self.backend.set_full_states(arguments[0])
            return self._answer()
        except Exception as error:
            return _pickled(error, self._told)


def _pickled(error: Exception, told: list[EnvironmentFault]) -> bytes:
    """Return an exception as it can be sent: faults as they are, others by their text."""
    if not isinstance(error, (EnvironmentFault, CannotCapture, SettingError)):
        error = RuntimeError(f"{type(error).__name__}: {error}")
    pickled = pickle.dumps((told, error))
    told.clear()
    return pickled
