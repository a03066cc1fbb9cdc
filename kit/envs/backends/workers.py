"""Backend that steps environments in parallel processes. A process may step several of them.

Observations, actions and rewards are exchanged through anonymous shared memory, which the system
frees when the last process that uses it ends. Commands and failures are sent through pipes. Workers
do not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import types
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector.utils import CloudpickleWrapper
from numpy.typing import NDArray

from kit.envs.backends.base import EnvBackend, Mask, StepArrays, derived_seed, hold
from kit.envs.backends.serial import MakeCopy, SerialBackend
from kit.envs.errors import FAULTS, EnvError, fault_of
from kit.envs.hanging import OF_PARENT, end_process, is_main_thread, is_parents_affair
from kit.envs.plain_values import StateCaptureError
from kit.envs.single_env import close_quietly
from kit.envs.spaces import Arrays, Leaf
from kit.envs.state import capture_process, learning_layer, restore_process, seed_process
from kit.steps.errors import SettingError

_CONTEXT = multiprocessing.get_context("spawn")
_SECONDS_TO_CLOSE = 5.0
_SECONDS_TO_FINISH = 1.0
"""Seconds to wait for a process that is still in a step when the run stops."""
_SECONDS_TO_LOOK = 60.0
"""Maximum number of seconds between two timeout checks for a slow environment."""


class WorkersBackend(EnvBackend):
    """Backend that steps environments in worker processes.

    Useful if steps take longer than sending messages. Faster than Gymnasium's ``AsyncVectorEnv``
    (``benchmarks/results/workers.md``). Recovers from failures and captures the exact state of
    every environment.

    Args:
        make: function that creates one environment; pickled by value for the workers.
        num_envs: number of environments.
        name: id of the environment, for messages.
        num_workers: number of processes; ``None``: one per core, at most ``num_envs``.
        restarts: number of failures to recover from. An environment that raises is rebuilt. A
            process that dies is restarted with its environments. Affected episodes are truncated.
        step_timeout: timeout in seconds for one ``step`` or ``reset`` of one environment. On
            timeout, the process is killed and a failure is reported. ``None``: no limit.

    Raises:
        EnvError: if the worker processes cannot be started.
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
        step_timeout: float | None = None,
    ) -> None:
        one = make()  # raises the factory's errors here instead of in a worker
        self._describe(name, num_envs, one.observation_space, one.action_space)
        self._learns = learning_layer(one)
        close_quietly(one)
        self.restarts = restarts
        memory = _SharedMemory(num_envs, self.observation_leaves, self.action_leaves)
        self._arrays = memory.arrays(0, num_envs)
        count = min(num_workers or _cores(), num_envs)
        bounds = [num_envs * number // count for number in range(count + 1)]
        how = pickle.dumps(CloudpickleWrapper((make, name, restarts, step_timeout)))
        pairs = itertools.pairwise(bounds)
        self._workers = [_Worker(how, memory, a, b, step_timeout) for a, b in pairs]
        self._seeds = list(range(num_envs))
        # The finalizer must run before multiprocessing joins its processes at exit.
        self._closing = Finalize(self, _stop, (self._workers,), exitpriority=1)
        try:
            for worker in self._workers:
                worker.start()
            for worker in self._workers:
                self._receive(worker)
        except (RuntimeError, EOFError, OSError) as error:
            self.close()
            what = error.what if isinstance(error, EnvError) else error
            raise EnvError(name, None, f"the worker processes did not start: {what}") from error

    # ------------------------------------------------------------------ reset and step
    def reset(
        self, observation: Arrays, seeds: Sequence[int] | None = None, mask: Mask | None = None
    ) -> None:
        """Reset the environments in ``mask`` (``None``: all), in all workers in parallel."""
        if seeds is not None:
            self._seeds = [int(seed) for seed in seeds]
        for worker in self._workers:
            part = None if seeds is None else self._seeds[worker.envs]
            worker.send("reset", part, None if mask is None else mask[worker.envs])
        for dead in self._receive_all():
            self._revive(dead)
        chosen: Any = ... if mask is None else mask
        for key, values in observation.items():
            values[chosen] = self._arrays.result.observation[key][chosen]
        self.present = observation

    def step(self, actions: Arrays, result: StepArrays, active: Mask | None = None) -> Mask | None:
        """Step the environments in ``active`` (``None``: all), in all workers in parallel."""
        arrays = self._arrays
        for key, values in arrays.action.items():
            if actions[key].shape != values.shape:
                self.convert(actions)  # raises SettingError with the expected shape
            values[...] = actions[key]
        arrays.active[...] = True if active is None else active
        if active is not None or self.restarts:  # workers may repeat the previous observation
            for key, values in arrays.result.observation.items():
                values[...] = self.present[key]
        for worker in self._workers:
            worker.send("step")
        dead = self._receive_all()
        self.infos = {env: info for worker in self._workers for env, info in worker.answer.items()}
        for key, values in result.observation.items():
            values[...] = arrays.result.observation[key]
            result.next_observation[key][...] = arrays.result.next_observation[key]
        for name in ("reward", "terminated", "truncated", "env_steps"):
            getattr(result, name)[...] = getattr(arrays.result, name)
        recovered = arrays.recovered.copy()
        for worker in dead:
            recovered[worker.envs] = True
            self._truncate(worker, result, active)
        self.present = result.observation
        return recovered if recovered.any() else None

    def _receive(self, worker: _Worker) -> Any:
        """Wait for a worker's answer and count the failures that the worker recovered from."""
        recovered, answer = worker.receive()
        for fault in recovered:
            self._recovered(fault)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _receive_all(self) -> list[_Worker]:
        """Wait for the answers from all workers and return the crashed workers."""
        dead, faults = [], []
        for worker in self._workers:
            worker.answer = {}
            try:
                worker.answer = self._receive(worker) or {}
            except (EOFError, OSError):
                dead.append(worker)
            except Exception as fault:
                faults.append(fault)
        if faults:
            raise faults[0]
        return dead

    def _truncate(self, worker: _Worker, result: StepArrays, active: Mask | None) -> None:
        """Truncate a crashed worker's episodes and start new episodes in a new process."""
        envs = worker.envs
        hold(envs, result, self.present)
        self._revive(worker)
        result.truncated[envs] = True
        result.env_steps[envs] = 1 if active is None else active[envs]
        for key, values in result.observation.items():
            values[envs] = self._arrays.result.observation[key][envs]

    def _revive(self, worker: _Worker) -> None:
        """Replace a crashed process and reset its environments, or raise if no restart is left."""
        fault = self._death(worker)
        while True:
            self._recovered(fault)
            worker.start()
            seeds = [derived_seed(seed, self.faults) for seed in self._seeds[worker.envs]]
            try:
                self._receive(worker)
                worker.send("reset", seeds, None)
                self._receive(worker)
                return
            except (EOFError, OSError):
                fault = self._death(worker)
            except EnvError as error:  # creating or resetting the environment failed
                fault = error

    def _death(self, worker: _Worker) -> EnvError:
        which = f"envs {worker.envs.start} to {worker.envs.stop - 1}"
        if worker.hung is not None:
            what = f"took longer than {worker.step_timeout:g} seconds for a step (step_timeout)"
            return EnvError(self.name, worker.hung, what)
        how = how_it_ended(worker.process)
        return EnvError(self.name, None, f"the process of {which} died ({how})")

    # ------------------------------------------------------------------ state
    def full_states(self) -> list[Any]:
        """Return the states of all environments, as reported by the workers."""
        return [state for worker in self._workers for state in self._ask(worker, "full_states")]

    def set_full_states(self, states: list[Any]) -> None:
        """Send each worker the states of its environments."""
        for worker in self._workers:
            self._ask(worker, "set_full_states", states[worker.envs])
        self._seeds = [state["seed"] for state in states]

    def _ask(self, worker: _Worker, *message: Any) -> Any:
        worker.send(*message)
        try:
            return self._receive(worker)
        except (EOFError, OSError) as error:
            raise self._death(worker) from error

    def close(self) -> None:
        """Stop the worker processes."""
        self._closing()


class _Arrays(NamedTuple):
    """Arrays in shared memory, with one row per environment."""

    action: Arrays
    result: StepArrays
    active: Mask
    recovered: Mask
    clock: NDArray[np.float64]
    """``[num_envs, 2]``; row 0 holds the current environment's index and its step's start time."""


class _SharedMemory:
    """Memory shared by a backend and its worker processes."""

    def __init__(self, num_envs: int, observation: Sequence[Leaf], action: Sequence[Leaf]) -> None:
        self.num_envs = num_envs
        # Spaces are omitted because some cannot be pickled; workers use their environments' spaces.
        self.observation = [dataclasses.replace(leaf, space=None) for leaf in observation]
        self.action = [dataclasses.replace(leaf, space=None) for leaf in action]
        self._blocks: dict[str, Any] = {}

    def arrays(self, first: int, last: int) -> _Arrays:
        """Return the arrays for environments ``first`` to ``last - 1``; allocate missing arrays."""

        def get(name: str, dtype: Any, *shape: int) -> Any:
            whole = (self.num_envs, *shape)
            if name not in self._blocks:
                size = int(np.prod(whole)) * np.dtype(dtype).itemsize
                self._blocks[name] = _CONTEXT.RawArray("b", max(size, 1))
            return np.ndarray(whole, dtype, self._blocks[name])[first:last]

        def each(kind: str, found: Sequence[Leaf]) -> Arrays:
            return {leaf.key: get(f"{kind} {leaf.key}", leaf.dtype, *leaf.shape) for leaf in found}

        result = StepArrays(
            next_observation=each("next", self.observation),
            observation=each("observation", self.observation),
            reward=get("reward", np.float32),
            terminated=get("terminated", np.bool_),
            truncated=get("truncated", np.bool_),
            env_steps=get("env_steps", np.int32),
        )
        flags = get("active", np.bool_), get("recovered", np.bool_)
        clock = get("clock", np.float64, 2)
        return _Arrays(each("action", self.action), result, *flags, clock)


# ---------------------------------------------------------------------- parent side
class _Worker:
    """The parent's handle for a worker process with environments ``first`` to ``last - 1``."""

    process: Any = None
    pipe: Connection

    def __init__(
        self, how: bytes, memory: _SharedMemory, first: int, last: int, step_timeout: float | None
    ) -> None:
        self.how, self.memory, self.envs = how, memory, slice(first, last)
        self.answer: dict[int, Any] = {}
        self.step_timeout, self.clock = step_timeout, memory.arrays(first, last).clock
        self.busy = False  # whether a command has not been answered yet
        self.hung: int | None = None  # index of an environment that timed out

    def start(self) -> None:
        """Start the process and send the command to create its environments."""
        self.end(0.0)
        self.hung, self.clock[0, 1] = None, math.inf
        self.pipe, theirs = _CONTEXT.Pipe()
        arguments = (theirs, self.memory, self.envs.start, self.envs.stop, is_main_thread())
        self.process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        with without_main():
            self.process.start()
        theirs.close()
        self.send("make", self.how)

    def send(self, *message: Any) -> None:
        """Send a command. If the process has died, only :meth:`receive` raises an error.

        Raises:
            RuntimeError: if the backend was closed.
        """
        if self.process is None:
            raise RuntimeError("the environment was closed; create a new one")
        self.busy = message[0] != "close" or self.busy
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(pickle.dumps(message))

    def receive(self) -> tuple[list[EnvError], Any]:
        """Wait for an answer. Return the failures recovered from, and the result or an error.

        Raises:
            EOFError: if the process has died, or was killed by the step timeout.
        """
        timeout = self.step_timeout
        while timeout is not None and not self.pipe.poll(min(timeout / 10, _SECONDS_TO_LOOK)):
            env, began = self.clock[0]
            if time.monotonic() - began > timeout:
                self.hung = int(env)
                self.process.kill()
                raise EOFError
        answer = self.pipe.recv_bytes()
        self.busy = False
        return pickle.loads(answer)  # type: ignore[no-any-return]

    def end(self, seconds: float) -> None:
        """End the process, if it was started."""
        if self.process is not None:
            self.pipe.close()
            end_process(self.process, seconds)
            self.process = None


def _cores() -> int:
    """Return the number of usable CPU cores. Without CPU affinity (macOS), count all cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _stop(workers: Sequence[_Worker]) -> None:
    """Ask all processes to stop, then wait for each of them."""
    began = time.monotonic()
    for worker in workers:
        if worker.process is not None:
            worker.send("close")
    for worker in workers:
        seconds = _SECONDS_TO_FINISH if worker.busy else _SECONDS_TO_CLOSE
        worker.end(max(began + seconds - time.monotonic(), 0.0))


def how_it_ended(process: Any) -> str:
    """Return the exit code or signal of a terminated process as a string."""
    process.join(_SECONDS_TO_CLOSE)
    code = process.exitcode
    return f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Hide the main module and the start method of multiprocessing while processes are spawned.

    A spawned process imports the main module, and with it torch, which takes seconds and half a
    gigabyte. Workers do not need the main module because factories are pickled by value. A worker
    would also inherit the start method, which may be undefined in the worker (joblib's method).

    Signals are blocked during the spawn. Otherwise, signals would kill a worker that does not
    ignore them yet (:func:`~kit.envs.hanging.is_parents_affair`).
    """
    resource_tracker.ensure_running()  # starting the tracker later would unblock signals
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, OF_PARENT)
    main, method = sys.modules["__main__"], multiprocessing.get_start_method(allow_none=True)
    sys.modules["__main__"] = types.ModuleType("__main__")
    multiprocessing.set_start_method("spawn", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


# ---------------------------------------------------------------------- worker side
def _serve(
    pipe: Connection, memory: _SharedMemory, first: int, last: int, in_main_thread: bool
) -> None:
    """Execute commands from the pipe until ``close``, or until the parent closes the pipe."""
    is_parents_affair(in_main_thread)
    served = _Served(memory, first, last)
    try:
        while True:
            command, *arguments = pickle.loads(pipe.recv_bytes())
            if command == "close":
                return
            pipe.send_bytes(served.answer(command, arguments))
    except (EOFError, OSError):
        return  # the parent closed the pipe or died
    finally:
        if served.backend is not None:
            served.backend.close()


class _Served:
    """Environments of a worker process. Commands are methods of this class or its backend."""

    def __init__(self, memory: _SharedMemory, first: int, last: int) -> None:
        self.first, self.last, self.arrays = first, last, memory.arrays(first, last)
        self.faults: list[EnvError] = []
        self.backend: Any = None

    def answer(self, command: str, arguments: list[Any]) -> bytes:
        """Execute a command. Return the failures recovered from, and the result or an error."""
        try:
            owner = self if hasattr(self, command) else self.backend
            value = getattr(owner, command)(*arguments)
        except (EnvError, StateCaptureError, SettingError) as error:
            value = error
        except KeyboardInterrupt:  # raised by an environment; workers ignore Ctrl-C
            what = "raised KeyboardInterrupt in its process"
            value = EnvError(getattr(self.backend, "name", "env"), None, what)
        except Exception as error:  # some exceptions cannot be pickled, so send text
            value = RuntimeError(f"{type(error).__name__}: {error}")
        self.arrays.clock[0, 1] = math.inf
        answer = pickle.dumps((self.faults, value))
        self.faults.clear()
        return answer

    def make(self, how: bytes) -> None:
        """Create the environments."""
        make, name, restarts, step_timeout = pickle.loads(how).fn
        try:
            count = self.last - self.first
            self.backend = SerialBackend(make, count, name, restarts=restarts, first=self.first)
        except FAULTS as error:
            raise fault_of(name, None, error, "creating it") from error
        self.backend.tell = self.faults.append
        self.backend.clock = None if step_timeout is None else self.arrays.clock[0]

    def full_states(self) -> list[Any]:
        """Return the states of the environments and the process's random generators."""
        first, *others = self.backend.full_states()
        return [{**first, "process": capture_process()}, *others]

    def set_full_states(self, states: list[Any]) -> None:
        """Restore states returned by :meth:`full_states`."""
        self.backend.set_full_states(states)
        if "process" in states[0]:
            restore_process(states[0]["process"])
        else:  # no process state was saved with this environment
            seed_process(states[0]["seed"])

    def reset(self, seeds: Sequence[int] | None, mask: Mask | None) -> None:
        """Reset the environments in ``mask`` (``None``: all)."""
        if seeds is not None:
            seed_process(seeds[0])
        self.backend.reset(self.arrays.result.observation, seeds, mask)

    def step(self) -> dict[int, Any]:
        """Step the environments. Return ended episodes' numeric ``info``, keyed by environment."""
        result, active = self.arrays.result, self.arrays.active
        result.terminated[...] = result.truncated[...] = False
        result.env_steps[...] = 1
        some = None if active.all() else active.copy()
        recovered = self.backend.step(self.arrays.action, result, some)
        self.arrays.recovered[...] = False if recovered is None else recovered
        return {self.first + env: info for env, info in self.backend.infos.items()}
