"""Copies in worker processes, several in each, which step at the same time.

Observations, actions and rewards are exchanged through shared memory without a name, which the
system frees with the last process that uses it; commands and faults go through pipes. A worker
imports no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from gymnasium.vector.utils import CloudpickleWrapper

from kit.envs.copies import Copies, Mask, StepArrays, hold, rebuilt_seed
from kit.envs.errors import EnvironmentFault
from kit.envs.in_process import InProcess, MakeCopy
from kit.envs.spaces import Arrays, Leaf
from kit.envs.state import CannotCapture

_CONTEXT = multiprocessing.get_context("spawn")
_SECONDS_TO_CLOSE = 5.0


class Workers(Copies):
    """Copies in processes of their own: for environments whose step takes longer than a message.

    Args:
        make: makes one copy; sent to the workers by value.
        num_envs: number of copies.
        name: id of the environment, for messages.
        num_workers: processes; ``None``: as many as there are cores for, at most one per copy.
        restarts: faults that are mended: a copy that raises is rebuilt, a process that dies is
            started anew with its copies; their episodes are truncated.

    Raises:
        EnvironmentFault: if the processes do not start.
    """

    steps_some = True

    def __init__(
        self,
        make: MakeCopy,
        num_envs: int,
        name: str = "env",
        *,
        num_workers: int | None = None,
        restarts: int = 0,
    ) -> None:
        one = make()  # what cannot be made is refused here, not in a process
        self._describe(name, num_envs, one.observation_space, one.action_space)
        one.close()
        self.restarts = restarts
        shared = _Shared(num_envs, self.observation_leaves, self.action_leaves)
        self._arrays = shared.arrays()
        count = min(num_workers or len(os.sched_getaffinity(0)), num_envs)
        bounds = [num_envs * number // count for number in range(count + 1)]
        how = pickle.dumps(CloudpickleWrapper((make, name, restarts)))
        self._workers = [_Worker(how, shared, a, b) for a, b in itertools.pairwise(bounds)]
        self._seeds = list(range(num_envs))
        self._present: Arrays = {}
        self._closing = weakref.finalize(self, _stop, self._workers)
        try:
            for worker in self._workers:
                worker.start()
            for worker in self._workers:
                worker.receive()
        except (RuntimeError, EOFError, OSError) as error:
            self.close()
            raise EnvironmentFault(name, None, f"its processes did not start: {error}") from error

    # ------------------------------------------------------------------ all at once
    def reset(
        self,
        observation: Arrays,
        seeds: Sequence[int] | None = None,
        mask: Mask | None = None,
    ) -> None:
        """Reset the copies, all workers at once."""
        if seeds is not None:
            self._seeds = [int(seed) for seed in seeds]
        chosen = np.ones(self.num_envs, np.bool_) if mask is None else mask
        for worker in self._workers:
            mine = slice(worker.first, worker.last)
            given = None if seeds is None else list(seeds)[mine]
            worker.send(("reset", given, None if mask is None else mask[mine]))
        for worker in self._dead():
            self._revive(worker)
        for key, values in observation.items():
            values[chosen] = self._arrays.result.observation[key][chosen]
        self._present = observation

    def step(self, actions: Arrays, result: StepArrays, active: Mask | None = None) -> Mask | None:
        """Step the copies, all workers at once."""
        for key, values in self._arrays.action.items():
            if actions[key].shape != values.shape:
                self.convert(actions)  # says what is wrong
            values[...] = actions[key]
        self._arrays.active[...] = True if active is None else active
        for worker in self._workers:
            worker.send(None)
        dead = self._dead()
        self._copy_results(result)
        mended = self._arrays.mended.copy() if self._arrays.mended.any() else None
        for worker in dead:
            mended = np.zeros(self.num_envs, np.bool_) if mended is None else mended
            mended[worker.first : worker.last] = True
            self._truncate(worker, result, active)
        self._present = result.observation
        return mended

    def _copy_results(self, result: StepArrays) -> None:
        made = self._arrays.result
        for key, values in result.next_observation.items():
            values[...] = made.next_observation[key]
            result.observation[key][...] = made.observation[key]
        result.reward[...] = made.reward
        result.terminated[...] = made.terminated
        result.truncated[...] = made.truncated
        result.env_steps[...] = made.env_steps

    def _dead(self) -> list[_Worker]:
        """Wait for all workers and return those that have died.

        Raises:
            EnvironmentFault: if a copy failed and no restart is left.
        """
        dead, faults = [], []
        for worker in self._workers:
            try:
                if not self._answered(worker):
                    dead.append(worker)
            except Exception as fault:
                faults.append(fault)
        if faults:
            raise faults[0]
        return dead

    def _answered(self, worker: _Worker) -> bool:
        """Wait for a worker and pass on what it mended; false if it has died."""
        try:
            answer = worker.receive()
        except (EOFError, OSError):
            return False
        for fault in answer or ():
            self._mended(fault)
        return True

    def _truncate(self, worker: _Worker, result: StepArrays, active: Mask | None) -> None:
        """Close the episodes of a worker that died, and begin others in a new process."""
        mine = slice(worker.first, worker.last)
        hold(mine, result, self._present)
        self._revive(worker)
        result.truncated[mine] = True
        result.env_steps[mine] = 1 if active is None else active[mine]
        for key, values in result.observation.items():
            values[mine] = self._arrays.result.observation[key][mine]

    def _revive(self, worker: _Worker) -> None:
        """Start a new process in the place of one that died, and reset its copies.

        Raises:
            EnvironmentFault: if no restart is left.
        """
        while True:
            which = f"copies {worker.first} to {worker.last - 1}"
            what = f"the process of {which} died ({worker.exit_code()})"
            self._mended(EnvironmentFault(self.name, None, what))
            worker.start()
            seeds = self._seeds[worker.first : worker.last]
            worker_seeds = [rebuilt_seed(seed, self.faults) for seed in seeds]
            with contextlib.suppress(EOFError, OSError):
                worker.receive()
                worker.send(("reset", worker_seeds, None))
                if self._answered(worker):
                    return

    # ------------------------------------------------------------------ in and out
    def full_states(self) -> list[Any]:
        """Ask the workers for the states of their copies."""
        return [state for worker in self._workers for state in self._ask(worker, ("states",))]

    def set_full_states(self, states: list[Any]) -> None:
        """Give the workers the states of their copies."""
        for worker in self._workers:
            self._ask(worker, ("set_states", states[worker.first : worker.last]))
        self._seeds = [state["seed"] for state in states]

    def _ask(self, worker: _Worker, message: Any) -> Any:
        worker.send(message)
        try:
            return worker.receive()
        except (EOFError, OSError) as error:
            what = f"its process died ({worker.exit_code()})"
            raise EnvironmentFault(self.name, None, what) from error

    def close(self) -> None:
        """End the processes."""
        self._closing()


class _Arrays:
    """Arrays of some copies over the shared memory."""

    def __init__(self, get: Callable[[str, tuple[int, ...], Any], Any], shared: _Shared) -> None:
        def each(kind: str, found: Sequence[Leaf]) -> Arrays:
            return {leaf.key: get(f"{kind} {leaf.key}", leaf.shape, leaf.dtype) for leaf in found}

        self.action = each("action", shared.action)
        self.active = get("active", (), np.bool_)
        self.mended = get("mended", (), np.bool_)
        self.result = StepArrays(
            next_observation=each("next", shared.observation),
            observation=each("observation", shared.observation),
            reward=get("reward", (), np.float32),
            terminated=get("terminated", (), np.bool_),
            truncated=get("truncated", (), np.bool_),
            env_steps=get("env_steps", (), np.int32),
        )


class _Shared:
    """Memory that processes share, and what is where in it."""

    def __init__(self, num_envs: int, observation: Sequence[Leaf], action: Sequence[Leaf]) -> None:
        self.num_envs = num_envs
        # Spaces stay here: workers know their own, and some cannot be sent.
        self.observation = [_without_space(leaf) for leaf in observation]
        self.action = [_without_space(leaf) for leaf in action]
        self.places: dict[str, int] = {}
        self.size = 0
        _Arrays(self._reserve, self)
        self.memory: Any = _CONTEXT.RawArray("b", max(self.size, 1))

    def _reserve(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        size = int(np.prod((self.num_envs, *shape))) * np.dtype(dtype).itemsize
        self.places[name] = self.size
        self.size += -(-size // 64) * 64

    def arrays(self, first: int = 0, last: int | None = None) -> _Arrays:
        """Return the arrays of copies ``first`` to ``last``, without the last one."""

        def view(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
            whole = (self.num_envs, *shape)
            start = self.places[name]
            count = int(np.prod(whole))
            array = np.frombuffer(self.memory, np.dtype(dtype), count, start).reshape(whole)
            return array[first:last]

        return _Arrays(view, self)


def _without_space(leaf: Leaf) -> Leaf:
    return Leaf(leaf.key, leaf.path, None, leaf.shape, leaf.dtype)


class _Worker:
    """One process, seen from the outside.

    Args:
        how: pickled arguments of the copies.
        shared: memory.
        first: number of its first copy.
        last: number after its last copy.
    """

    def __init__(self, how: bytes, shared: _Shared, first: int, last: int) -> None:
        self.how, self.shared, self.first, self.last = how, shared, first, last
        self.process: Any = None
        self.pipe: Connection | None = None

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
        """Send a command, ``None`` for a step. One that cannot be sent is found dead later."""
        assert self.pipe is not None
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(b"" if message is None else pickle.dumps(message))

    def receive(self) -> Any:
        """Wait for the answer.

        Raises:
            EOFError: if the process has died.
            Exception: what was raised in the process.
        """
        assert self.pipe is not None
        answer = self.pipe.recv_bytes()
        if not answer:
            return None
        value = pickle.loads(answer)
        if isinstance(value, Exception):
            raise value
        return value

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


def _stop(workers: list[_Worker]) -> None:
    for worker in workers:
        if worker.process is not None:
            worker.send(("close",))
    for worker in workers:
        worker.stop(_SECONDS_TO_CLOSE)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Hide the main module while processes are spawned.

    Each would import it again, and with it torch: seconds and half a gigabyte for every copy. The
    processes do not need it: what they make is sent by value.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# ---------------------------------------------------------------------- in the process
def _serve(pipe: Connection, how: bytes, shared: _Shared, first: int, last: int) -> None:
    """Do what the pipe says until it says to close, or is closed at the other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who then closes
    copies = None
    try:
        copies = _make(how, first, last)
        served = _Served(copies, shared.arrays(first, last))
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
        return
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send_bytes(_pickled(error))
    finally:
        if copies is not None:
            copies.close()


def _make(how: bytes, first: int, last: int) -> InProcess:
    make, name, restarts = pickle.loads(how).fn
    return InProcess(make, last - first, name, restarts=restarts, first=first)


class _Served:
    """The copies of one process, and the shared memory they read and write."""

    def __init__(self, copies: InProcess, arrays: _Arrays) -> None:
        self.copies, self.arrays = copies, arrays
        self._told: list[EnvironmentFault] = []
        copies.tell = self._told.append

    def step(self) -> bytes:
        """Take one step; return the faults that were mended, if any."""
        result = self.arrays.result
        result.terminated[...] = False
        result.truncated[...] = False
        result.env_steps[...] = 1
        active = self.arrays.active
        try:
            mended = self.copies.step(
                self.arrays.action, result, None if active.all() else active.copy()
            )
        except Exception as error:
            return _pickled(error)
        self.arrays.mended[...] = False if mended is None else mended
        return self._faults()

    def _faults(self) -> bytes:
        if not self._told:
            return b""
        told = pickle.dumps(self._told)
        self._told.clear()
        return told

    def answer(self, command: str, arguments: list[Any]) -> bytes:
        """Do one command and return the answer, pickled."""
        try:
            if command == "reset":
                seeds, mask = arguments
                self.copies.reset(self.arrays.result.observation, seeds, mask)
                return self._faults()
            if command == "states":
                return pickle.dumps(self.copies.full_states())
            self.copies.set_full_states(arguments[0])
            return b""
        except Exception as error:
            return _pickled(error)


def _pickled(error: Exception) -> bytes:
    """Return an exception as it can be sent: faults as they are, others by their text."""
    if isinstance(error, (EnvironmentFault, CannotCapture)):
        return pickle.dumps(error)
    return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
