"""Lockstep: counts, order and staleness hold when replies are lost, delayed or repeated."""

from __future__ import annotations

import copy
import io
import warnings
from collections import Counter, deque

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kit.collectors.chunks import DEATHS, Chunk, Lockstep, Reply, WorkerError, WorkerLostError
from tests.errors import raises_setting


class Counting:
    """A worker whose chunks depend on its whole past: a running sum of versions and seeds."""

    def __init__(self, worker, state):
        self.worker = worker
        self.total, self.made = state or (worker, 0)
        self.layout = "layout"

    def serve(self, request, version):
        value = None
        if request.name == "chunk":
            self.made += 1
            self.total = (31 * self.total + version + 1) % 2**31
            data = np.array([self.worker, self.made, version, self.total]).view(np.uint8)
            value = Chunk(data, self.layout, (self.worker + 2, 1), [], [], continues=True)
            self.layout = None
        elif request.name == "seed":
            self.total = value = request.argument
        elif request.name == "load":
            (self.total, self.made), value = request.argument, True
        state = (self.total, self.made) if request.with_state else None
        return Reply(request.life, request.number, "here", value, state)


class Lossy:
    """A transport that executes requests at once and treats each reply as its faults say.

    A fault is the fate of one reply: it arrives, arrives twice, comes too late, gets lost, or the
    worker dies before it replies. No request loses more than two replies.
    """

    def __init__(self, workers, faults=()):
        self.faults, self.workers = deque(faults), [None] * workers
        self.replies = [deque() for _ in range(workers)]
        self.delayed = [deque() for _ in range(workers)]
        self.losses = Counter()

    def start(self, worker, life, state):
        self.replies[worker].clear()
        self.workers[worker] = Counting(worker, copy.deepcopy(state))

    def share(self, weights):
        return weights

    fetch = share

    def send(self, worker, request, shared):
        self.replies[worker].append(self.workers[worker].serve(request, shared))

    def receive(self, worker, timeout):
        if self.delayed[worker]:
            return self.delayed[worker].popleft()
        fate = self.faults.popleft() if self.faults else "arrives"
        place = worker, self.replies[worker][0].number
        lost = fate in ("late", "lost", "dies") and self.losses[place] < DEATHS - 1
        self.losses[place] += lost
        if lost and fate == "late":
            self.delayed[worker].append(self.replies[worker].popleft())
        if lost and fate == "lost":
            self.replies[worker].popleft()
        if lost and not (fate == "lost" and self.replies[worker]):
            raise WorkerLostError("it is a test")
        reply = self.replies[worker].popleft()
        if fate == "twice":
            self.delayed[worker].append(reply)
        return reply

    def close(self):
        self.workers = []


def collected(lockstep, batches):
    """Publish and collect batches; return worker, position, version and sum of each chunk."""
    found = []
    for _ in range(batches):
        lockstep.publish(lockstep.published + 1)
        chunks = lockstep.collect()
        assert all(chunk.layout == "layout" for chunk in chunks)
        found.append([chunk.data.view(np.int64).tolist() for chunk in chunks])
    return found


FATES = st.sampled_from(["arrives", "arrives", "twice", "late", "lost", "dies"])
BATCHES = 7


@pytest.mark.guard
@given(
    workers=st.integers(1, 3),
    max_staleness=st.integers(0, 2),
    state_every=st.integers(1, 4),
    faults=st.lists(FATES, max_size=40),
)
@settings(max_examples=500)
def test_lossy_transport_keeps_counts_order_and_staleness(
    workers, max_staleness, state_every, faults
):
    how = {"max_staleness": max_staleness, "state_every": state_every}
    lockstep = Lockstep(Lossy(workers, faults), workers, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collected(lockstep, BATCHES)
    assert found == collected(Lockstep(Lossy(workers), workers, **how), BATCHES)
    expected = [
        [[worker, batch + 1, max(batch - max_staleness, 0)] for worker in range(workers)]
        for batch in range(BATCHES)
    ]
    assert [[chunk[:3] for chunk in batch] for batch in found] == expected
    per_batch = sum(worker + 2 for worker in range(workers))
    assert lockstep.counts == (BATCHES * per_batch, BATCHES * workers)


def dying(*faults, **how):
    """A lockstep of one worker, and of what happens to its replies."""
    return Lockstep(Lossy(1, faults), 1, **how)


def test_death_warns_with_worker_and_counts_redone_steps():
    lockstep = dying("arrives", "arrives", "dies", state_every=2)
    with pytest.warns(UserWarning, match=r"Worker 0 \(here\) was lost in batch 2: it is a test"):
        collected(lockstep, 3)
    assert (lockstep.deaths, lockstep.redone_policy_steps) == (1, 0)  # the state is of batch 1
    lockstep = dying("arrives", "arrives", "dies", state_every=8)
    with pytest.warns(UserWarning, match="repeats its last chunks"):
        collected(lockstep, 3)
    assert (lockstep.deaths, lockstep.redone_policy_steps) == (1, 2 * 2)


class Dead(Lossy):
    """A worker that dies in its second chunk, always."""

    def receive(self, worker, timeout):
        if self.replies[worker][0].number > 0:
            raise WorkerLostError("it exits")
        return self.replies[worker].popleft()


def test_third_death_in_same_batch_raises_worker_error():
    lockstep = Lockstep(Dead(1), 1, state_every=1)
    third = r"in batch 1: it exits\. This was its death 3"
    with pytest.warns(UserWarning, match="lost"), pytest.raises(WorkerError, match=third):
        collected(lockstep, 2)


def test_death_ends_run_without_states():
    lockstep = dying("arrives", "dies", state_every=0)
    with pytest.raises(WorkerError, match="cannot be recovered with state_every=0"):
        collected(lockstep, 2)


class Forgetful(Lossy):
    """A worker that begins anew with something else when it is created again."""

    def start(self, worker, life, state):
        super().start(worker, life, state)
        self.workers[worker].total += 100 * life


def test_inexact_recovery_warns_and_breaks_episodes():
    lockstep = Lockstep(Forgetful(2, ["arrives"] * 4 + ["dies"]), 2, state_every=8)
    collected(lockstep, 2)
    lockstep.publish(2)
    with pytest.warns(UserWarning, match="the run is not bit-exact"):
        chunks = lockstep.collect()
    assert [chunk.continues for chunk in chunks] == [False, True]
    lockstep.publish(3)
    assert all(chunk.continues for chunk in lockstep.collect())
    assert lockstep.counts[1] == 8


def test_commands_run_after_requested_batches():
    lockstep = Lockstep(Lossy(2), 2, max_staleness=1)
    lockstep.publish(0)  # requests batches 0 and 1
    assert lockstep.command("seed", [7, 8]) == [7, 8]
    before = [lockstep.collect() for _ in range(2)]
    lockstep.publish(1)
    (after,) = [lockstep.collect()]
    totals = [chunk.data.view(np.int64)[3] for chunk in (before[0][0], *after)]
    assert totals == [1, 31 * 7 + 2, 31 * 8 + 2]


def test_number_of_batches_limits_requests():
    lockstep = Lockstep(Lossy(1), 1, max_staleness=2)
    lockstep.batches = 4
    lockstep.publish(0)
    lockstep.publish(1)
    lockstep.publish(2)
    lockstep.command("save")
    assert [len(lockstep.collect()) for _ in range(4)] == [1] * 4
    assert lockstep.transport.workers[0].made == 4


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_loaded_state_continues_with_pending_batches(max_staleness):
    saving, going_on = (Lockstep(Lossy(2), 2, max_staleness=max_staleness) for _ in range(2))
    collected(saving, 3)
    state = copy.deepcopy(saving.state_dict())
    assert going_on.load_state_dict(state)
    assert going_on.taken == 3
    assert collected(going_on, 4) == collected(saving, 4)
    assert going_on.counts == saving.counts


def test_load_rejects_other_workers_and_larger_staleness():
    state = Lockstep(Lossy(2), 2).state_dict()
    with raises_setting("workers"):
        Lockstep(Lossy(1), 1).load_state_dict(state)
    with raises_setting("max_staleness"):
        Lockstep(Lossy(2), 2, max_staleness=1).load_state_dict(state)


class Failing(Lossy):
    """A worker that reports an error with its second chunk."""

    def receive(self, worker, timeout):
        reply = super().receive(worker, timeout)
        return reply._replace(error=ValueError("bad")) if reply.number == 1 else reply


def test_reported_error_is_raised_again_by_later_batches():
    lockstep = Lockstep(Failing(2), 2, located=lambda error, worker: KeyError(worker))
    collected(lockstep, 1)
    lockstep.publish(1)
    for _ in range(2):
        with pytest.raises(KeyError, match="0"):
            lockstep.collect()


def test_requests_and_weights_do_not_accumulate():
    lockstep = Lockstep(Lossy(2), 2, max_staleness=1, state_every=3)
    collected(lockstep, 100)
    assert len(lockstep._requests) <= 4
    assert len(lockstep._versions) <= 5


def test_saved_state_is_plain_after_conversion():
    from kit.collectors.ray import _to_arrays, _to_tensors

    tree = {"a": [np.arange(3), (np.float64(2.0), "x")], 1: None}
    file = io.BytesIO()
    torch.save(_to_tensors(tree), file)
    file.seek(0)
    loaded = _to_arrays(torch.load(file, weights_only=True))
    assert loaded["a"][0].tolist() == [0, 1, 2]
    assert loaded["a"][1] == (2.0, "x")
