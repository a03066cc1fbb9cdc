"""Lockstep collection by several workers: request, order, count and recover their chunks.

A *worker* is a process that only collects. A *chunk* is one worker's part of a batch. A batch
contains one chunk of every worker, in worker order. Every worker executes the same numbered
requests in the same order. A worker that is lost is created again from its last saved state and
executes the requests since that state again. This module does not know how messages travel: a
:class:`Transport` sends requests and returns replies.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kit.steps import SettingError

DEATHS = 3
"""Number of deaths at the same request after which the run ends."""
SECONDS_TO_START = 300.0
"""Minimum time until a new worker counts as lost. Imports take long on a loaded machine."""


class WorkerLostError(Exception):
    """Raised by a transport if a worker died or did not reply in time. The message is the reason.

    Args:
        reason: what happened to the worker.
    """


class WorkerError(RuntimeError):
    """Raised if a worker cannot be recovered."""


class Request(NamedTuple):
    """A message to a worker."""

    life: int
    """How many times the worker has been created again. Replies to earlier lives are ignored."""
    number: int
    """Position among all requests to this worker."""
    name: str
    """Name of the operation; ``chunk`` collects a chunk."""
    with_state: bool
    """Whether the reply must contain the worker's state after the operation."""
    argument: Any = None
    """Argument of the operation, except the weights for a chunk."""
    resumes: bool = False
    """Whether this is the first request after a death that is not a repetition. A worker that does
    not continue exactly begins new episodes before it."""


class Reply(NamedTuple):
    """A worker's reply to one request."""

    life: int
    """``life`` of the request."""
    number: int
    """``number`` of the request."""
    host: str
    """Host and process of the worker."""
    value: Any = None
    """Result of the operation: a :class:`Chunk` or another value."""
    state: Any = None
    """State of the worker after the operation, if it was requested."""
    is_exact: bool = True
    """Whether the worker continues exactly from the state that it was created from."""
    error: Exception | None = None
    """Error that the operation raised."""


class Chunk(NamedTuple):
    """One worker's part of a batch."""

    data: Any
    """Entries of the chunk as one array of bytes."""
    layout: Any
    """Layout of ``data``. In a reply, ``None`` means that the layout has not changed."""
    counts: tuple[int, ...]
    """Increments of the collector's counters. The first counter is the number of policy steps."""
    episodes: list[tuple[Any, ...]]
    """Episodes that ended in this chunk."""
    learned: list[Any]
    """Normalisation statistics of this chunk's observations and rewards."""
    continues: bool
    """Whether the chunk continues the episodes of the worker's previous chunk."""


class Transport(Protocol):
    """Sends requests to workers and returns their replies."""

    def start(self, worker: int, life: int, state: Any) -> None:
        """Create a worker, which replaces a previous one.

        Args:
            worker: index of the worker.
            life: how many times the worker has been created again.
            state: state from which the worker continues; ``None``: initial state.
        """

    def share(self, weights: Any) -> Any:
        """Prepare a version of the weights for sending it several times."""

    def fetch(self, shared: Any) -> Any:
        """Return the weights that :meth:`share` prepared."""

    def send(self, worker: int, request: Request, shared: Any) -> None:
        """Send a request, with a version of the weights if it requests a chunk."""

    def receive(self, worker: int, timeout: float) -> Reply:
        """Return the worker's next reply.

        Raises:
            WorkerLostError: if the worker died, or did not reply within ``timeout`` seconds.
        """

    def close(self) -> None:
        """End all workers."""


@dataclass
class _Stream:
    """Requests to one worker and replies from it."""

    state: Any = None
    """Last state of the worker."""
    start: int = 0
    """Number of the first request after ``state``."""
    expected: int = 0
    """Number of the next reply in this life."""
    received: int = 0
    """Number of replies received over all lives, without repetitions."""
    life: int = 0
    host: str = "not started"
    layout: Any = None
    """Layout of the last chunk."""
    checksums: dict[int, int] = field(default_factory=dict)
    """Checksums of the chunks since ``state``, keyed by request number."""
    deaths: Counter[int] = field(default_factory=Counter)
    """Number of deaths, keyed by the number of the expected reply."""
    has_started: bool = False
    """Whether the worker has replied in this life."""
    is_broken: bool = False
    """Whether the next chunk does not continue the episodes of the last one."""


class Lockstep:
    """Collects one chunk of every worker per batch, with weights of known staleness.

    Batch ``b``, counted from 0, is collected with version ``max(b - max_staleness, 0)`` of the
    weights. The learner publishes version ``b`` when it requests batch ``b``.

    Args:
        transport: sends requests and returns replies.
        workers: number of workers.
        max_staleness: number of versions by which a batch's weights lag behind.
        state_every: a worker's state is saved with every ``state_every``-th chunk; 0: never, so
            that a lost worker ends the run.
        timeout: seconds after which a worker that does not reply counts as lost.
        located: function that adds the index of the worker to an error that a worker reported.

    Attributes:
        batches: number of batches to collect; ``None``: unlimited.
        taken: number of batches that :meth:`collect` has returned.
        published: last published version of the weights; -1 before the first.
        counts: sums of the counters of all returned chunks.
        deaths: number of workers lost so far.
        redone_policy_steps: number of policy steps that were collected again after a death. They
            are part of no other count.
    """

    def __init__(
        self,
        transport: Transport,
        workers: int,
        *,
        max_staleness: int = 0,
        state_every: int = 8,
        timeout: float = math.inf,
        located: Callable[[Exception, int], Exception] = lambda error, worker: error,
    ) -> None:
        self.transport, self.workers = transport, workers
        self.max_staleness, self.state_every, self.timeout = max_staleness, state_every, timeout
        self._located = located
        self._error: Exception | None = None  # ends the collection
        self.batches: int | None = None
        self.taken, self.published = 0, -1
        self.counts: tuple[int, ...] = ()
        self.deaths = self.redone_policy_steps = 0
        self._requested = 0  # number of requested batches
        self._sent = 0  # number of requests
        self._requests: dict[int, tuple[Request, list[Any] | None, int | None]] = {}
        self._versions: dict[int, Any] = {}
        self._arrived: deque[list[Chunk]] = deque()  # received before they were needed
        self._partial: list[Chunk] = []  # chunks of the next batch, if receiving was interrupted
        self._streams = [_Stream() for _ in range(workers)]
        for worker in range(workers):
            transport.start(worker, 0, None)

    # ------------------------------------------------------------------ batches
    def publish(self, weights: Any) -> None:
        """Publish the next version of the weights and request the batches that use it."""
        self.published += 1
        self._versions[self.published] = self.transport.share(weights)
        self._request_due()

    def collect(self) -> list[Chunk]:
        """Return the chunks of the next batch in worker order. Wait for them if necessary."""
        if not self._arrived:
            self._receive_batch()
        chunks = self._arrived.popleft()
        self.taken += 1
        self._add(chunk.counts for chunk in chunks)
        return chunks

    def version_of(self, batch: int) -> int:
        """Return the version of the weights with which a batch is collected."""
        return max(batch - self.max_staleness, 0)

    def _add(self, increments: Iterable[tuple[int, ...]]) -> None:
        for counts in increments:
            before = self.counts or (0,) * len(counts)
            self.counts = tuple(map(sum, zip(before, counts)))

    def _request_due(self) -> None:
        """Request every batch whose weights have been published."""
        while self.version_of(self._requested) <= self.published and (
            self.batches is None or self._requested < self.batches
        ):
            self._requested += 1
            with_state = bool(self.state_every) and self._requested % self.state_every == 0
            self._request("chunk", with_state, version=self.version_of(self._requested - 1))

    def _receive_batch(self) -> None:
        for worker in range(len(self._partial), self.workers):
            chunk, stream = self._receive(worker).value, self._streams[worker]
            if stream.is_broken:
                chunk, stream.is_broken = chunk._replace(continues=False), False
            self._partial.append(chunk._replace(layout=stream.layout))
        self._arrived.append(self._partial)
        self._partial = []
        self._forget()

    # ------------------------------------------------------------------ other requests
    def command(self, name: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """Let every worker execute an operation after all requested batches.

        Args:
            name: name of the operation.
            arguments: one argument for each worker.

        Returns:
            One result of each worker.
        """
        while self.taken + len(self._arrived) < self._requested:
            self._receive_batch()
        self._request(name, True, arguments)
        values = [self._receive(worker).value for worker in range(self.workers)]
        self._forget()
        return values

    # ------------------------------------------------------------------ requests and replies
    def _request(
        self,
        name: str,
        with_state: bool,
        arguments: Sequence[Any] | None = None,
        version: int | None = None,
    ) -> None:
        request = Request(0, self._sent, name, with_state)
        self._requests[self._sent] = request, None if arguments is None else [*arguments], version
        self._sent += 1
        for worker in range(self.workers):
            self._send(worker, request.number)

    def _send(self, worker: int, number: int, resumes: bool = False) -> None:
        request, arguments, version = self._requests[number]
        argument = None if arguments is None else arguments[worker]
        life = self._streams[worker].life
        request = request._replace(life=life, argument=argument, resumes=resumes)
        self.transport.send(worker, request, None if version is None else self._versions[version])

    def _receive(self, worker: int) -> Reply:
        """Return a worker's next new reply. Create the worker again if it is lost.

        Raises:
            WorkerError: if the worker cannot be recovered.
            Exception: an error that the worker reported.
        """
        stream = self._streams[worker]
        while self._error is None:
            try:
                reply = self.transport.receive(worker, self._patience(stream))
                if reply.life != stream.life or reply.number < stream.expected:
                    continue  # a repetition
                if reply.number > stream.expected:
                    raise WorkerLostError("a reply was lost")
            except WorkerLostError as error:
                self._recover(worker, str(error))
                continue
            if reply.error is not None:
                self._error = self._located(reply.error, worker)
                break
            is_new = reply.number >= stream.received
            self._check(worker, reply, is_new)
            if is_new:
                return reply
        raise self._error

    def _patience(self, stream: _Stream) -> float:
        """Return how many seconds a worker may take to reply. A new process takes longer."""
        return self.timeout if stream.has_started else max(self.timeout, SECONDS_TO_START)

    def _check(self, worker: int, reply: Reply, is_new: bool) -> None:
        """Record a reply, and check whether a recovered worker repeats its chunks exactly."""
        stream = self._streams[worker]
        stream.expected, stream.host = reply.number + 1, reply.host
        stream.received = max(stream.received, stream.expected)
        is_exact = stream.has_started or reply.is_exact
        if isinstance(chunk := reply.value, Chunk):
            stream.layout = stream.layout if chunk.layout is None else chunk.layout
            self.redone_policy_steps += 0 if is_new else chunk.counts[0]
            if self.state_every:
                checksum = zlib.crc32(chunk.data)
                is_exact &= stream.checksums.setdefault(reply.number, checksum) == checksum
        if not is_exact and not stream.is_broken:
            stream.is_broken = True
            if stream.deaths:
                text = f"Worker {worker} could not repeat its last chunks exactly. It continues "
                text += "with new episodes: all counts are exact, but the run is not bit-exact."
                warnings.warn(text, stacklevel=2)
        stream.has_started = True
        if reply.state is not None:
            stream.state, stream.start = reply.state, stream.expected
            stream.checksums.clear()

    def _recover(self, worker: int, reason: str) -> None:
        """Create a lost worker again and repeat its requests since its last state."""
        stream = self._streams[worker]
        self.deaths += 1
        stream.deaths[stream.expected] += 1
        text = f"Worker {worker} ({stream.host}) was lost in batch {self._batch_of(stream)}: "
        text += reason
        if stream.deaths[stream.expected] >= DEATHS:
            raise WorkerError(f"{text}. This was its death {DEATHS} in this batch.")
        if not self.state_every:
            raise WorkerError(f"{text}. It cannot be recovered with state_every=0.")
        warnings.warn(f"{text}. It is created again and repeats its last chunks.", stacklevel=2)
        stream.life += 1
        stream.expected, stream.has_started = stream.start, False
        self.transport.start(worker, stream.life, stream.state)
        for number in range(stream.start, self._sent):
            self._send(worker, number, number == stream.received)

    def _batch_of(self, stream: _Stream) -> int:
        """Return the number of the batch, from 0, that a worker was collecting."""
        numbers = range(stream.expected, self._sent)
        later = sum(self._requests[number][2] is not None for number in numbers)
        return self._requested - later

    def _forget(self) -> None:
        """Drop requests and weights that are not needed any more."""
        starts = (s.start if self.state_every else s.received for s in self._streams)
        first = min(starts)
        for number in [number for number in self._requests if number < first]:
            del self._requests[number]
        versions = [v for _, _, v in self._requests.values() if v is not None]
        oldest = min([*versions, self.version_of(self._requested)])
        for version in [version for version in self._versions if version < oldest]:
            del self._versions[version]

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """Return the states of all workers, and the chunks and weights of later batches."""
        self.command("save")
        unused = range(self.version_of(self._requested), self.published + 1)
        return {
            "workers": [stream.state for stream in self._streams],
            "arrived": [[chunk._asdict() for chunk in chunks] for chunks in self._arrived],
            "broken": [stream.is_broken for stream in self._streams],
            "weights": {v: self.transport.fetch(self._versions[v]) for v in unused},
            "taken": self.taken,
            "published": self.published,
            "requested": self._requested,
            "max_staleness": self.max_staleness,
            "counts": [*self.counts],
            "deaths": self.deaths,
            "redone_policy_steps": self.redone_policy_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore a state returned by :meth:`state_dict`.

        Returns:
            Whether all workers continue exactly.

        Raises:
            SettingError: if the state has another number of workers or a lower ``max_staleness``.
        """
        if (saved := len(state["workers"])) != self.workers:
            reason = f"differs from the checkpoint, which has the state of {saved} workers"
            raise SettingError("workers", self.workers, reason, [saved])
        if self.max_staleness > (most := int(state["max_staleness"])):
            reason = "is larger than in the checkpoint, which lacks the required older weights"
            raise SettingError("max_staleness", self.max_staleness, reason, [most])
        exact = self.command("load", state["workers"])
        for stream, is_exact, was_broken in zip(self._streams, exact, state["broken"]):
            stream.is_broken = was_broken or not is_exact
        self.taken, self.published = int(state["taken"]), int(state["published"])
        self._requested = int(state["requested"])
        self._arrived = deque([Chunk(**chunk) for chunk in chunks] for chunks in state["arrived"])
        self._versions = {int(v): self.transport.share(w) for v, w in state["weights"].items()}
        self.counts, self.deaths = tuple(state["counts"]), int(state["deaths"])
        self.redone_policy_steps = int(state["redone_policy_steps"])
        self._request_due()
        return all(exact)
