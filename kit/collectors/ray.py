"""Collector whose batches are collected by several worker processes, on one or more machines."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import signal
import socket
import statistics
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium.vector.utils import CloudpickleWrapper
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs import EnvBase

from kit.collectors.asynchronous import AsyncCollector, _plain, _policies, _settings, _tensors
from kit.collectors.base import (
    KitCollector,
    PolicyError,
    StepsCollector,
    check_multiple,
    check_total,
)
from kit.collectors.chunk_worker import (
    Blueprint,
    ChunkWorker,
    Weights,
    flatten,
    versions,
    worker_seed,
)
from kit.collectors.chunks import Chunk, Lockstep, Reply, Request, Transport, WorkerLostError
from kit.collectors.packing import join, last_id
from kit.collectors.policy import Policy
from kit.collectors.rollout import VectorCollector, as_vector_env
from kit.distributed.ray_session import import_ray, start_ray
from kit.envs.episodes import Episode
from kit.envs.errors import EnvError
from kit.envs.normalize import RunningMeanStd
from kit.envs.vector_env import VectorEnv
from kit.steps import SettingError
from kit.steps.errors import real_number, whole_number

_SECONDS_FOR_CPUS = 60.0
"""Time that a cluster may take until it has a free CPU for every worker."""
_SECONDS_TO_CLOSE = 10.0
_INLINE = 90_000
"""Size in bytes below which Ray sends an array inside a message."""
_COUNTS = ("frames_per_batch", "init_random_frames", "exploration_frames", "prefill_frames")


class RayCollector(KitCollector):
    """Collects each batch with several Ray workers, in lockstep.

    A batch consists of one chunk of every worker, in worker order. Every worker steps
    ``num_envs / workers`` environments with a collector of this kit, and is seeded from ``seed``
    and its index. Batch ``b`` is collected with the weights, and with the merged normalisation
    statistics, that the learner had when it requested batch ``b - max_staleness``.

    A worker that dies, or does not reply within ``worker_timeout`` seconds, is created again from
    its last saved state and collects the same chunks again. The batches are then bitwise equal
    to an undisturbed run if the state of the environments can be captured.

    Args:
        create_env_fn: environment from ``make_env``, or a function that returns one. Workers create
            it again with ``env.make_again(num_envs=..., seed=...)``. The environment itself is not
            stepped; its normaliser has the merged statistics.
        policy: module that takes and returns a TensorDict. Workers receive its parameters, buffers,
            and public attributes of type int, float, bool or str, and execute it on the CPU. The
            same applies to ``exploration_policy``.
        workers: number of worker processes; must divide the number of environments.
        collector: class of the collector in each worker: ``VectorCollector``, ``EpisodeCollector``
            or another host collector.
        max_staleness: maximum number of update phases by which a batch's policy lags behind the
            learner; 0: the learner waits for each batch.
        state_every: a worker's state is saved with every ``state_every``-th chunk; 0: never, so
            that the death of a worker ends the run.
        worker_timeout: seconds after which a worker that sends no chunk counts as dead. Must be
            longer than the collection of a chunk.
        threads: number of PyTorch threads in each worker.
        total_frames: total number of policy steps; -1: no limit.
        seed: seed from which the seed of each worker is derived.
        storing_device: device of the returned batches.
        pre_collect_hook: called in this process before it waits for a batch.
        post_collect_hook: called in this process with each batch before it is returned.
        transport: creates the :class:`~kit.collectors.chunks.Transport`, from a pickled blueprint,
            the number of workers and the timeout.
        **kwargs: arguments for the collectors in the workers. Step and episode counts describe
            whole batches.

    Attributes:
        staleness: staleness of the last batch, in update phases.

    Raises:
        SettingError: if Ray is not installed or cannot be started, counts cannot be divided among
            the workers, or a collector in a worker raises it.
    """

    collects_on_host = True
    steps_elsewhere = True

    def __init__(
        self,
        create_env_fn: Callable[[], EnvBase] | EnvBase,
        policy: Policy | None = None,
        *,
        workers: int = 2,
        collector: type[KitCollector] = VectorCollector,
        max_staleness: int = 0,
        state_every: int = 8,
        worker_timeout: float = 300.0,
        threads: int = 1,
        total_frames: int = -1,
        seed: int = 0,
        storing_device: torch.device | str = "cpu",
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[TensorDictBase], None] | None = None,
        transport: Callable[[bytes, int, float], Transport] | None = None,
        **kwargs: Any,
    ) -> None:
        env = as_vector_env(create_env_fn)
        self.workers = whole_number("workers", workers, at_least=1)
        self.max_staleness = whole_number("max_staleness", max_staleness)
        self._state_every = whole_number("state_every", state_every)
        self._timeout = real_number("worker_timeout", worker_timeout, 0.0)
        _check_workers(self.workers, env, collector)
        counts = divided(kwargs, self.workers, env.num_envs, collector)
        super().__init__(
            env.num_envs,
            total_frames=total_frames,
            init_random_frames=kwargs.get("init_random_frames"),
            exploration_frames=kwargs.get("exploration_frames", 0),
            exploration_policy=kwargs.get("exploration_policy"),
            storing_device=storing_device,
            pre_collect_hook=pre_collect_hook,
            post_collect_hook=post_collect_hook,
        )
        self.env, self.policy = env, policy
        self.prefill_frames = whole_number("prefill_frames", kwargs.get("prefill_frames", 0))
        for name in ("min_episodes", "min_steps", "episode_length"):
            if name in kwargs:
                setattr(self, name, kwargs[name])
        self._inner, self._arguments = collector, {**kwargs, **counts}
        self._seed, self._threads, self._raw = seed, threads, False
        self._transport = transport or RayTransport
        self.staleness = 0
        self._staleness_since_row: list[int] = []
        self._is_owner = transport is None
        if self._is_owner:
            _RAY.acquire(self.workers)
        try:
            self._check_store()
            self._start()
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise

    # ------------------------------------------------------------------ workers
    def _start(self) -> None:
        """Create the workers, and check that they fit this process and each other."""
        policies = _on_cpu((self.policy, self.exploration_policy))
        self._initial = _settings(_policies(*policies))
        settings = {**self._arguments}
        if self.exploration_policy is not None:
            settings["exploration_policy"] = policies[1]
        each = self.num_envs // self.workers
        make_env = self.env.make_again
        plan = Blueprint(
            self._inner, make_env, policies[0], settings, each, self._seed, self._threads
        )
        pickled = pickle.dumps(CloudpickleWrapper(tuple(plan)))
        self._lockstep = Lockstep(
            self._transport(pickled, self.workers, self._timeout),
            self.workers,
            max_staleness=self.max_staleness,
            state_every=self._state_every,
            timeout=self._timeout,
            located=self._located,
        )
        self._offsets, self._last_ids = [0] * self.workers, [-1] * self.workers
        facts = self._lockstep.command("facts")
        _check_versions(facts)
        for name in ("exact_policy", "reset_at_each_iter"):
            setattr(self, name, facts[0][name])
        for name in ("frames_per_batch", "requested_frames_per_batch"):
            size = facts[0][name]
            setattr(self, name, size * self.workers if size > 0 else size)
        if issubclass(self._inner, StepsCollector) and self.total_frames >= 0:
            check_total(self.total_frames, self.prefill_frames, self.frames_per_batch)
            self._lockstep.batches = len(self)

    def _check_store(self) -> None:
        """Check that Ray's object store has enough memory for all chunks in progress.

        Raises:
            SettingError: if chunks need more memory, not counting the policy's outputs.
        """
        if not self._is_owner:
            return
        needed = self.workers * (self.max_staleness + 1) * self._bytes_of_chunk()
        if needed > (available := _RAY.object_store_memory()):
            reason = f"The chunks of workers * (max_staleness + 1) = {self.workers} * "
            reason += f"{self.max_staleness + 1} need at least {needed:,} bytes, but Ray's object "
            reason += f"store has {available:,} bytes"
            hint = "Collect smaller batches, or start Ray with a larger --object-store-memory"
            raise SettingError("workers", self.workers, reason, hint)

    def _bytes_of_chunk(self) -> int:
        """Return the minimum size of a chunk, without outputs of the policy except actions."""
        leaves = [*self.env.observation_leaves, *self.env.action_leaves]
        size = sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
        arguments = self._arguments
        steps: int = arguments.get("frames_per_batch") or arguments.get("min_steps") or 1
        if "steps_per_env" in arguments and not arguments.get("frames_per_batch"):
            steps = (arguments["steps_per_env"] or 1) * self.num_envs // self.workers
        return int(steps * size)

    def _located(self, error: Exception, worker: int) -> Exception:
        """Return a worker's error with the index of the environment in the whole run."""
        first = worker * (self.num_envs // self.workers)
        if isinstance(error, EnvError):
            env = None if error.env is None else error.env + first
            return EnvError(error.name, env, error.what, error.policy_step, worker)
        if isinstance(error, PolicyError):
            return PolicyError(error.key, error.env + first, error.policy_step, worker)
        if isinstance(error, SettingError):
            return error
        return RuntimeError(f"worker {worker}: {error}")

    # ------------------------------------------------------------------ batch collection
    def _prepared(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()  # the RNG states are in the workers

    def _collect(self) -> TensorDictBase:
        """Send the current weights, then wait for the next batch and return it."""
        self.update_policy_weights_()
        lockstep = self._lockstep
        self.staleness = lockstep.taken - lockstep.version_of(lockstep.taken)
        chunks = lockstep.collect()
        self._staleness_since_row.append(self.staleness)
        for name, count in zip(self._COUNTERS, lockstep.counts):
            setattr(self, name, count)
        self.continues_episodes = all(chunk.continues for chunk in chunks)
        self._finish_episodes(chunks)
        if self.normalizer is not None:
            self.normalizer.merge([RunningMeanStd(*m) for m in c.learned] for c in chunks)
        batch = self._joined(chunks)
        return batch if self.storing_device.type == "cpu" else batch.to(self.storing_device)

    def _finish_episodes(self, chunks: list[Chunk]) -> None:
        each = self.num_envs // self.workers
        for worker, chunk in enumerate(chunks):
            for fields in chunk.episodes:
                episode = Episode(*fields)
                self._finished.append(episode._replace(env=episode.env + worker * each))

    def _joined(self, chunks: list[Chunk]) -> TensorDictBase:
        """Return the chunks as one batch. Trajectory ids are distinct across workers."""
        packed = [(chunk.data, chunk.layout) for chunk in chunks]
        for worker, chunk in enumerate(chunks):
            if not chunk.continues:  # a recovered worker may use its earlier ids again
                self._offsets[worker] = self._last_ids[worker] + 1
            last = last_id(packed[worker]) + self._offsets[worker]
            self._last_ids[worker] = max(self._last_ids[worker], last)
        return join(packed, self._offsets)

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Send the policy's current weights and the merged normalisation to the workers.

        Only the first call after each batch has an effect. Without such a call, weights are sent
        when the next batch is requested.
        """
        if args or kwargs:
            super().update_policy_weights_(*args, **kwargs)
        if self._lockstep.published < self._lockstep.taken:
            self._lockstep.publish(self._weights())

    def _weights(self) -> Weights:
        policies = _policies(self.policy, self.exploration_policy)
        changed = {
            name: value
            for name, value in _settings(policies).items()
            if self._initial.get(name, self._initial) != value
        }
        statistics = None if self.normalizer is None else self.normalizer.snapshot()
        return Weights(flatten(_tensors(policies)), changed, statistics)

    def metrics(self) -> dict[str, float]:
        """Return the mean staleness since the last call, and the deaths of workers so far."""
        since, self._staleness_since_row = self._staleness_since_row, []
        staleness = {"collector/staleness": statistics.fmean(since)} if since else {}
        return {
            **staleness,
            "collector/worker_deaths": float(self._lockstep.deaths),
            "collector/redone_policy_steps": float(self._lockstep.redone_policy_steps),
        }

    def deliver_raw(self, raw: bool) -> bool:
        """Set whether batches are raw or normalised. Both are supported by kit's collectors."""
        self._raw = raw
        return all(self._lockstep.command("raw", [raw] * self.workers))

    def usage(self) -> list[dict[str, float]]:
        """Return the CPU seconds and the peak memory in MiB of each worker process."""
        found: list[dict[str, float]] = self._lockstep.command("usage")
        return found

    # ------------------------------------------------------------------ seed and state
    def _seed_environments(self, seed: int) -> None:
        seeds = [worker_seed(seed, worker) for worker in range(self.workers)]
        self._lockstep.command("seed", seeds)

    def begin_again(self, seed: int, random_steps: int) -> None:
        """Start again with new workers and counts of 0.

        Args:
            seed: seed of all workers.
            random_steps: number of policy steps with random actions at the start.
        """
        if not self.closed:
            self._lockstep.transport.close()
        elif self._is_owner:
            _RAY.acquire(self.workers)
        self.closed = False
        self.take_episodes()
        for name in self._COUNTERS:
            setattr(self, name, 0)
        self._iter, self._seed, self.init_random_frames = -1, seed, random_steps
        self._arguments["init_random_frames"] = -(-random_steps // self.workers)
        self._start()
        self.deliver_raw(self._raw)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the counters, the states of all workers, and the chunks of later batches."""
        state = super().state_dict()
        state["lockstep"] = _to_tensors(self._lockstep.state_dict())
        reasons = [one["env"]["not_resumable"] for one in state["lockstep"]["workers"]]
        state["env"] = {"not_resumable": next(filter(None, reasons), "")}
        state["normalizer"] = None if self.normalizer is None else self.normalizer.state_dict()
        state["ids"] = [[*self._offsets], [*self._last_ids]]
        state["staleness"] = [self.staleness, [*self._staleness_since_row]]
        return state

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Restore a saved state, which must have the same number of workers.

        If the state of the environments could not be captured, their workers begin new episodes
        and ``exact_resume`` is set to false.
        """
        saved = dict(state_dict["lockstep"])
        workers = saved.pop("workers")
        self.exact_resume = self._lockstep.load_state_dict(
            {**_to_arrays(saved), "workers": workers}
        )
        super().load_state_dict(state_dict)
        if self.normalizer is not None:
            self.normalizer.load_state_dict(state_dict["normalizer"])
        self._offsets, self._last_ids = map(list, state_dict["ids"])
        self.staleness, self._staleness_since_row = state_dict["staleness"]

    def _release(self) -> None:
        """End the workers, and Ray if this process started it."""
        if (lockstep := vars(self).get("_lockstep")) is not None:
            lockstep.transport.close()
        if self._is_owner:
            _RAY.release()


def _on_cpu(policies: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return copies of the policies on the CPU, because workers have no GPU."""
    tensors = _tensors(_policies(*policies))
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return policies
    copied = copy.deepcopy(policies)
    return tuple(p.to("cpu") if isinstance(p, nn.Module) else p for p in copied)


def _to_tensors(value: Any) -> Any:
    """Replace arrays by tensors and named tuples by tuples, so that checkpoints can be saved."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Weights):
        value = value._replace(settings=_plain(value.settings))
    if isinstance(value, dict):
        return type(value)((key, _to_tensors(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return (
            [*map(_to_tensors, value)]
            if isinstance(value, list)
            else tuple(map(_to_tensors, value))
        )
    return value


def _to_arrays(value: Any) -> Any:
    """Undo :func:`_to_tensors`, except that named tuples remain tuples."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {key: _to_arrays(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_to_arrays, value))
    return value


# ---------------------------------------------------------------------- checks
def _check_workers(workers: int, env: VectorEnv, collector: type[KitCollector]) -> None:
    """Raise an error if the workers cannot be created."""
    if env.num_envs % workers:
        divisors = [n for n in range(1, env.num_envs + 1) if env.num_envs % n == 0]
        lower, higher = ([n for n in divisors if (n < workers) is low] for low in (True, False))
        near = [*lower[-1:], *higher[:1]]
        reason = f"does not divide env.num_envs={env.num_envs}"
        raise SettingError("workers", workers, reason, near)
    if env.make_again is None:
        reason = "The environment cannot be created again in the workers"
        raise SettingError("env", env.name, reason, "Pass an id or a function to make_env")
    supported = issubclass(collector, KitCollector) and collector.collects_on_host
    if not supported or issubclass(collector, (AsyncCollector, RayCollector)):
        reason = "cannot collect chunks in a worker"
        raise SettingError("collector", collector.__name__, reason, ["vector", "episode"])


def divided(
    kwargs: dict[str, Any], workers: int, num_envs: int, collector: type[KitCollector]
) -> dict[str, Any]:
    """Return the counts of one worker.

    Args:
        kwargs: arguments for the collector, with the counts of the whole run.
        workers: number of workers.
        num_envs: number of environments of all workers.
        collector: class of the collectors in the workers.

    Raises:
        SettingError: if a count cannot be divided exactly.
    """
    counts: dict[str, Any] = {}
    for name in _COUNTS:
        if kwargs.get(name) is None:
            continue
        value = whole_number(name, kwargs[name])
        if issubclass(collector, StepsCollector):
            check_multiple(name, value, num_envs)
        counts[name] = -(-value // workers)
    steps, episodes = kwargs.get("min_steps"), kwargs.get("min_episodes")
    if (length := kwargs.get("episode_length")) is not None:
        episodes, steps = max(episodes or 1, -(-(steps or 1) // length)), None
    if episodes is not None:
        if episodes % workers:
            reason = f"episodes per batch cannot be divided among {workers} workers"
            down = episodes // workers * workers
            near = [n for n in (down, down + workers) if n]
            raise SettingError("min_episodes", episodes, reason, near)
        counts["min_episodes"] = episodes // workers
    if "min_steps" in kwargs:
        counts["min_steps"] = None if steps is None else -(-steps // workers)
    return counts


def _check_versions(facts: list[dict[str, Any]]) -> None:
    """Raise an error if a worker has another version of a package."""
    for worker, fact in enumerate(facts):
        for package, here in versions().items():
            if (there := fact["versions"][package]) != here:
                reason = f"This process has {package} {here}, but worker {worker} "
                reason += f"({fact['host']}) has {package} {there}"
                hint = "Install the same version on all machines"
                raise SettingError(package, here, reason, hint)


# ---------------------------------------------------------------------- Ray
class _Ray:
    """Starts Ray for the first collector, and ends it after the last one if it started it."""

    def __init__(self) -> None:
        self._users = 0
        self._has_started = False

    def acquire(self, workers: int) -> None:
        """Connect to Ray, and wait until it has a free CPU for each worker.

        Raises:
            SettingError: if Ray is not installed, cannot be started or has too few CPUs.
        """
        ray = import_ray("collector", "ray")
        self._users += 1
        try:
            if not ray.is_initialized():
                self._has_started = True
                with _process_kept():
                    start_ray("collector", "ray")
            self._await_cpus(ray, workers)
        except BaseException:
            self.release()
            raise

    def _await_cpus(self, ray: Any, workers: int) -> None:
        end = time.monotonic() + _SECONDS_FOR_CPUS
        while (free := int(ray.available_resources().get("CPU", 0))) < workers:
            total = int(ray.cluster_resources().get("CPU", 0))
            is_fixed = self._has_started and not os.environ.get("RAY_ADDRESS")
            if time.monotonic() > end or (is_fixed and total < workers):
                reason = f"needs {workers} CPUs, but only {free} of Ray's {total} CPUs are free"
                hint = "add machines to the cluster, or use fewer workers"
                works = [free] if free else []
                raise SettingError("workers", workers, reason, works, f"or {hint}")
            time.sleep(0.2)

    def release(self) -> None:
        """End Ray after its last user, if it was started here."""
        self._users = max(self._users - 1, 0)
        if not self._users and self._has_started:
            self._has_started = False
            import_ray("collector", "ray").shutdown()

    @staticmethod
    def object_store_memory() -> int:
        """Return the size of this machine's object store in bytes."""
        ray = import_ray("collector", "ray")
        here = ray.get_runtime_context().get_node_id()
        nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
        return int(nodes.get(here, {}).get("object_store_memory", 2**62))


_RAY = _Ray()


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Restore the random state and the SIGTERM handler, which ``ray.init`` changes."""
    numbers, arrays = random.getstate(), np.random.get_state(legacy=False)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        random.setstate(numbers)
        np.random.set_state(arrays)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


class RayChunkWorker(ChunkWorker):
    """Worker in a Ray actor. SIGTERM ends the process at once.

    Ray's handler would raise SystemExit, which an environment step would report as its own failure.
    """

    def __init__(self, pickled: bytes, worker: int, state: Any = None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        super().__init__(pickled, worker, state)


class RayTransport:
    """Runs each worker as a Ray actor with one CPU.

    Args:
        pickled: pickled wrapper of a :class:`~kit.collectors.chunk_worker.Blueprint`.
        workers: number of workers.
        timeout: seconds after which a worker counts as dead.
    """

    def __init__(self, pickled: bytes, workers: int, timeout: float) -> None:
        self._ray = ray = import_ray("collector", "ray")
        self._blueprint = ray.put(pickled)
        self._make = ray.remote(num_cpus=1, max_restarts=0)(RayChunkWorker)
        self._actors: list[Any] = [None] * workers
        self._replies: list[deque[Any]] = [deque() for _ in range(workers)]
        self._hosts = [""] * workers

    def start(self, worker: int, life: int, state: Any) -> None:
        """Create the actor of a worker, and kill the previous actor."""
        if self._actors[worker] is not None:
            self._ray.kill(self._actors[worker])
            self._kill_stopped(worker)
        self._replies[worker].clear()
        self._actors[worker] = self._make.remote(self._blueprint, worker, state)

    def _kill_stopped(self, worker: int) -> None:
        """Kill the worker's process if it is stopped on this machine, because Ray does not."""
        host, _, process = self._hosts[worker].partition(", pid ")
        if host == socket.gethostname() and process:
            with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "T":
                    os.kill(int(process), signal.SIGKILL)

    def share(self, weights: Weights) -> Any:
        """Store large weights once for all workers."""
        flat = weights[0] if len(weights[0]) < _INLINE else self._ray.put(weights[0])
        return (flat, *weights[1:])

    def fetch(self, shared: Any) -> Weights:
        """Return weights that were shared."""
        flat = shared[0] if isinstance(shared[0], np.ndarray) else self._ray.get(shared[0])
        return Weights(flat, *shared[1:])

    def send(self, worker: int, request: Request, shared: Any) -> None:
        """Send a request to the worker's actor."""
        reply = self._actors[worker].serve.remote(request, *(shared or ()))
        self._replies[worker].append(reply)

    def receive(self, worker: int, timeout: float) -> Reply:
        """Return the worker's next reply.

        Raises:
            WorkerLostError: if the actor died or did not reply in time.
        """
        exceptions = self._ray.exceptions
        try:
            reply: Reply = self._ray.get(self._replies[worker][0], timeout=timeout)
        except exceptions.GetTimeoutError:
            raise WorkerLostError(f"it sent nothing for {timeout:g} seconds") from None
        except exceptions.RayTaskError:
            raise
        except exceptions.RayError as error:
            raise WorkerLostError(_reason(error)) from None
        self._replies[worker].popleft()
        self._hosts[worker] = reply.host
        return reply

    def close(self) -> None:
        """Close the environments of all workers, then kill the workers."""
        actors = [actor for actor in self._actors if actor is not None]
        self._actors = [None] * len(self._actors)
        if not self._ray.is_initialized():
            return
        ends = [actor.close.remote() for actor in actors]
        with contextlib.suppress(Exception):
            self._ray.wait(ends, num_returns=len(ends), timeout=_SECONDS_TO_CLOSE)
        for actor in actors:
            self._ray.kill(actor)
        for worker in range(len(self._actors)):
            self._kill_stopped(worker)


def _reason(error: Exception) -> str:
    """Return the cause of death in an error of Ray as one short line."""
    text = " ".join(str(error).split())
    for start in ("The actor is dead because ", "Worker exit detail: "):
        if start in text:
            return text.partition(start)[2].partition(".")[0]
    return f"{type(error).__name__}: {text.partition('.')[0]}"[:200]
