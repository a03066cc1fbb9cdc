"""Envs in worker processes, several in each, which step at the same time.

The processes themselves, and what they exchange, are in :mod:`kit.envs.backends.worker_process`.
"""

from __future__ import annotations

import itertools
import os
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector.utils import CloudpickleWrapper

from kit.envs.backends.base import EnvBackend, Mask, StepArrays, hold, rebuilt_seed
from kit.envs.backends.serial import MakeCopy
from kit.envs.backends.worker_process import SharedMemory, Worker, stop
from kit.envs.errors import EnvironmentFault
from kit.envs.spaces import Arrays


class WorkersBackend(EnvBackend):
    """Envs in processes of their own: for environments whose step takes longer than a message.

    Faster than Gymnasium's ``AsyncVectorEnv`` (``benchmarks/results/workers.md``), with recovery
    from faults and the exact state of every environment.

    Args:
        make: makes one env; sent to the workers by value.
        num_envs: number of envs.
        name: id of the environment, for messages.
        num_workers: processes; ``None``: as many as there are cores for, at most one per env.
        restarts: faults recovered from: an env that raises is rebuilt, a process that dies is
            restarted with its envs; their episodes are truncated.

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
        shared = SharedMemory(num_envs, self.observation_leaves, self.action_leaves)
        self._arrays = shared.arrays()
        count = min(num_workers or len(os.sched_getaffinity(0)), num_envs)
        bounds = [num_envs * number // count for number in range(count + 1)]
        how = pickle.dumps(CloudpickleWrapper((make, name, restarts)))
        self._workers = [Worker(how, shared, a, b) for a, b in itertools.pairwise(bounds)]
        self._seeds = list(range(num_envs))
        self._present: Arrays = {}
        self._closing = weakref.finalize(self, stop, self._workers)
        try:
            for worker in self._workers:
                worker.start()
            for worker in self._workers:
                worker.receive()
        except (RuntimeError, EOFError, OSError) as error:
            self.close()
            what = error.what if isinstance(error, EnvironmentFault) else error
            raise EnvironmentFault(name, None, f"its processes did not start: {what}") from error

    # ------------------------------------------------------------------ all at once
    def reset(
        self,
        observation: Arrays,
        seeds: Sequence[int] | None = None,
        mask: Mask | None = None,
    ) -> None:
        """Reset the envs, all workers at once."""
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
        """Step the envs, all workers at once."""
        for key, values in self._arrays.action.items():
            if actions[key].shape != values.shape:
                self.convert(actions)  # says what is wrong
            values[...] = actions[key]
        self._arrays.active[...] = True if active is None else active
        for worker in self._workers:
            worker.send_step()
        dead = self._dead()
        self._copy_results(result)
        self.infos = {
            worker.first + number: info
            for worker in self._workers
            if worker.answer
            for number, info in worker.answer.items()
        }
        recovered = self._arrays.recovered.copy() if self._arrays.recovered.any() else None
        for worker in dead:
            recovered = np.zeros(self.num_envs, np.bool_) if recovered is None else recovered
            recovered[worker.first : worker.last] = True
            self._truncate(worker, result, active)
        self._present = result.observation
        return recovered

    def _copy_results(self, result: StepArrays) -> None:
        made = self._arrays.result
        for key, values in result.next_observation.items():
            values[...] = made.next_observation[key]
            result.observation[key][...] = made.observation[key]
        result.reward[...] = made.reward
        result.terminated[...] = made.terminated
        result.truncated[...] = made.truncated
        result.env_steps[...] = made.env_steps

    def _dead(self) -> list[Worker]:
        """Wait for all workers and return those that have died.

        Raises:
            EnvironmentFault: if an env failed and no restart is left.
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

    def _answered(self, worker: Worker) -> bool:
        """Wait for a worker and pass on the faults it recovered from; false if it has died."""
        try:
            worker.answer = None
            worker.answer = worker.receive()
        except (EOFError, OSError):
            return False
        finally:
            for fault in worker.take_mended():
                self._recovered(fault)
        return True

    def _truncate(self, worker: Worker, result: StepArrays, active: Mask | None) -> None:
        """Close the episodes of a worker that died, and begin others in a new process."""
        mine = slice(worker.first, worker.last)
        hold(mine, result, self._present)
        self._revive(worker)
        result.truncated[mine] = True
        result.env_steps[mine] = 1 if active is None else active[mine]
        for key, values in result.observation.items():
            values[mine] = self._arrays.result.observation[key][mine]

    def _revive(self, worker: Worker) -> None:
        """Start a new process in the place of one that died, and reset its envs.

        Raises:
            EnvironmentFault: if no restart is left.
        """
        fault = self._death(worker)
        while True:
            self._recovered(fault)
            worker.start()
            seeds = self._seeds[worker.first : worker.last]
            worker_seeds = [rebuilt_seed(seed, self.faults) for seed in seeds]
            try:
                worker.receive()
                worker.send(("reset", worker_seeds, None))
                if self._answered(worker):
                    return
                fault = self._death(worker)
            except (EOFError, OSError):
                fault = self._death(worker)
            except EnvironmentFault as error:  # it cannot be made, or reset
                fault = error

    def _death(self, worker: Worker) -> EnvironmentFault:
        which = f"envs {worker.first} to {worker.last - 1}"
        what = f"the process of {which} died ({worker.exit_code()})"
        return EnvironmentFault(self.name, None, what)

    # ------------------------------------------------------------------ in and out
    def full_states(self) -> list[Any]:
        """Ask the workers for the states of their envs."""
        return [state for worker in self._workers for state in self._ask(worker, ("states",))]

    def set_full_states(self, states: list[Any]) -> None:
        """Give the workers the states of their envs."""
        for worker in self._workers:
            self._ask(worker, ("set_states", states[worker.first : worker.last]))
        self._seeds = [state["seed"] for state in states]

    def _ask(self, worker: Worker, message: Any) -> Any:
        worker.send(message)
        try:
            return worker.receive()
        except (EOFError, OSError) as error:
            raise self._death(worker) from error

    def close(self) -> None:
        """End the processes."""
        self._closing()
