"""The part of a worker that collects chunks, independent of how messages travel."""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import resource
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kit import __version__
from kit.collectors.asynchronous import _policies, _sendable, _settings, _tensors
from kit.collectors.base import KitCollector
from kit.collectors.chunks import Chunk, Reply, Request, WorkerLostError
from kit.collectors.packing import pack
from kit.envs.backends.base import derived_seed
from kit.envs.normalize import RunningMeanStd
from kit.envs.state import capture_process, restore_process, seed_process
from kit.envs.vector_env import VectorEnv

FACTS = (
    "frames_per_batch",
    "requested_frames_per_batch",
    "exact_policy",
    "reset_at_each_iter",
)
"""Attributes of a worker's collector that the learner's process needs."""
_WORKER = 2  # separates the seeds of workers, ranks and restarted environments


class Weights(NamedTuple):
    """A version of everything that a worker needs for a chunk."""

    flat: NDArray[np.uint8]
    """Bytes of all parameters and buffers of the policies."""
    settings: dict[tuple[str, str], Any]
    """Plain attributes of the policies that changed since the policies were pickled."""
    statistics: list[RunningMeanStd] | None
    """Merged normalisation statistics; ``None`` if the environments are not normalised."""


class Blueprint(NamedTuple):
    """What a worker is created from."""

    make: Callable[..., KitCollector]
    """Class of the worker's collector."""
    make_env: Callable[..., VectorEnv]
    """Creates environments for the keyword arguments ``num_envs`` and ``seed``."""
    policy: Any
    settings: dict[str, Any]
    """Arguments for ``make``, except the seed."""
    num_envs: int
    """Number of environments of one worker."""
    seed: int
    """Seed of all workers."""
    threads: int
    """Number of PyTorch threads."""


def worker_seed(seed: int, worker: int) -> int:
    """Return a worker's seed. The first worker uses the seed of the run."""
    return derived_seed(seed, worker, _WORKER) if worker else seed


def versions() -> dict[str, str]:
    """Return the versions of the packages that must be equal in all processes."""
    packages = {"kit": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return {name: str(version) for name, version in packages.items()}


class ChunkWorker:
    """Collects chunks and executes other requests. Created in a worker process.

    Args:
        pickled: pickled wrapper of a :class:`Blueprint`.
        worker: index of the worker.
        state: state to continue from; ``None``: initial state.
    """

    def __init__(self, pickled: bytes, worker: int, state: Any = None) -> None:
        self._pickled, self._worker, self._state = pickled, worker, state
        self._host = f"{socket.gethostname()}, pid {os.getpid()}"
        self._collector: Any = None
        self._layout: Any = None
        self._is_exact = True

    def serve(self, request: Request, *weights: Any) -> Reply:
        """Execute a request. An error of the collector becomes part of the reply."""
        reply = Reply(request.life, request.number, self._host)
        try:
            if self._collector is None:
                self._create()
            if request.resumes and not self._is_exact:
                self._collector.env.abandon()
            if request.name == "chunk":
                value = self._collect(Weights(*weights))
            else:
                value = getattr(self, f"_{request.name}")(request.argument)
            state = self._state_dict() if request.with_state else None
            return reply._replace(value=value, state=state, is_exact=self._is_exact)
        except (Exception, KeyboardInterrupt) as error:
            return reply._replace(error=_sendable(error))

    def close(self) -> None:
        """Close the environments."""
        if self._collector is not None:
            self._collector.shutdown(raise_on_error=False)

    def _create(self) -> None:
        plan = Blueprint(*pickle.loads(self._pickled).fn)
        torch.set_num_threads(plan.threads)
        seed = worker_seed(plan.seed, self._worker)
        seed_process(seed)
        env = plan.make_env(num_envs=plan.num_envs, seed=seed)
        self._policies = _policies(plan.policy, plan.settings.get("exploration_policy"))
        self._tensors, self._initial = _tensors(self._policies), _settings(self._policies)
        self._changed: dict[tuple[str, str], Any] = {}
        self._collector = plan.make(env, plan.policy, seed=seed, **plan.settings)
        if hasattr(self._collector, "reuse"):
            self._collector.reuse = True  # chunks are copied at once
        self._counts = self._counters()
        if self._state is not None:
            self._is_exact = self._load(self._state)
            self._state = None

    # ------------------------------------------------------------------ chunks
    def _collect(self, weights: Weights) -> Chunk:
        self._apply(weights)
        collector, normalizer = self._collector, self._collector.normalizer
        if normalizer is not None:
            normalizer.restore(weights.statistics)
        data, layout = pack(collector.collect())
        before, self._counts = self._counts, self._counters()
        known, self._layout = self._layout, layout
        return Chunk(
            data=data,
            layout=None if layout == known else layout,
            counts=tuple(now - then for now, then in zip(self._counts, before)),
            episodes=[tuple(episode) for episode in collector.take_episodes()],
            learned=[] if normalizer is None else normalizer.learned_since(weights.statistics),
            continues=collector.continues_episodes,
        )

    def _apply(self, weights: Weights) -> None:
        """Copy weights and plain attributes into the policies."""
        load_flat(weights.flat, self._tensors)
        names = self._changed | weights.settings
        self._changed = weights.settings
        for path, name in names:
            value = weights.settings.get((path, name), self._initial.get((path, name)))
            setattr(self._policies.get_submodule(path), name, value)

    def _counters(self) -> tuple[int, ...]:
        return tuple(getattr(self._collector, name) for name in KitCollector._COUNTERS)

    # ------------------------------------------------------------------ other requests
    def _facts(self, _: Any) -> dict[str, Any]:
        facts = {name: getattr(self._collector, name, None) for name in FACTS}
        return {**facts, "versions": versions(), "host": self._host}

    def _raw(self, raw: bool) -> bool:
        return bool(self._collector.deliver_raw(raw))

    def _seed(self, seed: int) -> None:
        self._collector.set_seed(seed)

    def _usage(self, _: Any) -> dict[str, float]:
        """Return the CPU seconds and the peak memory of this process in MiB."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        scale = 2**20 if platform.system() == "Darwin" else 2**10
        return {"cpu": time.process_time(), "peak_memory": peak / scale}

    def _state_dict(self) -> dict[str, Any]:
        state = {**self._collector.state_dict(), "process": capture_process()}
        return {**state, "torch": torch.get_rng_state()}

    def _load(self, state: dict[str, Any]) -> bool:
        self._collector.load_state_dict(state)
        restore_process(state["process"])
        torch.set_rng_state(state["torch"])
        self._counts = self._counters()
        return bool(self._collector.exact_resume)

    _save = staticmethod(lambda _: None)
    """Do nothing; the reply contains the state."""


def flatten(tensors: list[torch.Tensor]) -> NDArray[np.uint8]:
    """Return the bytes of all tensors as one array."""
    parts = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    return torch.cat(parts).numpy() if parts else np.zeros(0, np.uint8)


def load_flat(data: NDArray[np.uint8], tensors: list[torch.Tensor]) -> None:
    """Copy an array from :func:`flatten` into tensors.

    Raises:
        ValueError: if the tensors have another total size.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if sum(sizes) != len(data):
        raise ValueError("the policy's parameters no longer match those in the workers")
    whole = torch.from_numpy(data.copy())
    with torch.no_grad():
        for tensor, part in zip(tensors, torch.split(whole, sizes)):
            # A clone is aligned for every type.
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


class LocalTransport:
    """Runs workers in this process, for tests and measurements. Requests run when replies are due.

    Args:
        pickled: pickled wrapper of a :class:`Blueprint`.
        workers: number of workers.
    """

    def __init__(self, pickled: bytes, workers: int, timeout: float = 0.0) -> None:
        del timeout
        self._pickled = pickled
        self.workers: list[ChunkWorker | None] = [None] * workers
        self._requests: list[deque[tuple[Request, Any]]] = [deque() for _ in range(workers)]

    def start(self, worker: int, life: int, state: Any) -> None:
        """Create a worker."""
        del life
        self.close(worker)
        self.workers[worker] = ChunkWorker(self._pickled, worker, state)
        self._requests[worker].clear()

    def share(self, weights: Weights) -> Weights:
        """Return the weights."""
        return weights

    fetch = share

    def send(self, worker: int, request: Request, shared: Any) -> None:
        """Queue a request."""
        self._requests[worker].append((request, shared))

    def receive(self, worker: int, timeout: float) -> Reply:
        """Execute the next request and return the reply."""
        del timeout
        served = self.workers[worker]
        if served is None or not self._requests[worker]:
            raise WorkerLostError("it does not exist")
        request, shared = self._requests[worker].popleft()
        return served.serve(request, *(shared or ()))

    def close(self, worker: int | None = None) -> None:
        """End one worker or all workers."""
        for served in self.workers if worker is None else [self.workers[worker]]:
            with contextlib.suppress(Exception):
                if served is not None:
                    served.close()
