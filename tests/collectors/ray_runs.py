"""Runs of RayCollector and of the same collectors in one process, for comparison."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from kit.collectors import EpisodeCollector, RayCollector, VectorCollector
from kit.collectors.chunk_worker import LocalTransport, worker_seed
from kit.collectors.chunks import WorkerLostError
from kit.collectors.ray import divided
from kit.envs import make_env
from kit.modules import make_actor
from tests.collectors.test_recurrence import recurrent
from tests.envs.odd_envs import Steps

WORKERS, ENVS = 3, 6
NORMALIZED = {"normalize_observation": True, "normalize_reward": True}


class Kind(NamedTuple):
    """What is collected, and how."""

    collector: Any
    counts: dict[str, Any]
    env: Mapping[str, Any] = MappingProxyType({})
    is_recurrent: bool = False


STEPS = {"frames_per_batch": ENVS * 10}
KINDS = {
    "steps": Kind(VectorCollector, {**STEPS, "init_random_frames": ENVS * 12}),
    "normalized": Kind(VectorCollector, {**STEPS, "prefill_frames": ENVS * 3}, NORMALIZED),
    "episodes": Kind(EpisodeCollector, {"min_steps": 100, "layout": "padded"}, NORMALIZED),
    "flat": Kind(EpisodeCollector, {"min_episodes": 9, "layout": "flat"}),
    "recurrent": Kind(VectorCollector, STEPS, NORMALIZED, is_recurrent=True),
}


def made(kind: Kind, make_env_id: Any = "CartPole-v1") -> tuple[Any, Any]:
    """Return the environment of the whole run and a policy."""
    if kind.is_recurrent:
        make_env_id = "kit.testing.counter:kit/Counter-v0"
    env = make_env(make_env_id, ENVS, seed=4, **kind.env)
    if kind.is_recurrent:
        return env, recurrent(env, "gru")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return env, make_actor(env, hidden_sizes=(8,))


def train(policy: Any) -> None:
    """Stand in for an update phase."""
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(0.97)


def ray_collector(
    name: str, *, transport: Any = None, make_env_id: Any = "CartPole-v1", **how: Any
):
    """Create a RayCollector of a kind; ``transport=None``: with Ray."""
    kind = KINDS[name]
    env, policy = made(kind, make_env_id)
    settings = {"workers": WORKERS, "collector": kind.collector, "seed": 4, **kind.counts, **how}
    return RayCollector(env, policy, transport=transport, **settings)


def batches_of(collector: Any, count: int, before: Any = None) -> list[TensorDictBase]:
    """Collect batches, with an update phase after each; ``before`` is called with each number."""
    found = []
    for number in range(count):
        if before is not None:
            before(number)
        found.append(collector.collect().clone())
        train(collector.policy)
    return found


def batches_in_one_process(name: str, count: int) -> tuple[list[TensorDictBase], Any]:
    """Collect with three collectors of the kit whose normalisation is merged after each batch."""
    kind = KINDS[name]
    env, policy = made(kind)
    counts = {**kind.counts, **divided(kind.counts, WORKERS, ENVS, kind.collector)}
    seeds = [worker_seed(4, worker) for worker in range(WORKERS)]
    again = functools.partial(env.make_again, num_envs=ENVS // WORKERS)
    collectors = [kind.collector(again(seed=s), policy, seed=s, **counts) for s in seeds]
    found = []
    for _ in range(count):
        parts, running = [], env.normalizer
        known = None if running is None else running.snapshot()
        learned = []
        for worker, collector in enumerate(collectors):
            if running is not None:
                collector.normalizer.restore(known)
            part = collector.collect().clone()
            part["collector", "traj_ids"] = part["collector", "traj_ids"] * WORKERS + worker
            parts.append(part)
            if running is not None:
                learned.append(collector.normalizer.learned_since(known))
        if running is not None:
            running.merge(learned)
        found.append(_joined(parts))
        train(policy)
    return found, running


def _joined(parts: list[TensorDictBase]) -> TensorDictBase:
    """Concatenate batches; episodes are padded to the longest one."""
    if ("collector", "mask") not in parts[0].keys(True):
        return torch.cat(parts)
    most = max(part.shape[1] for part in parts)
    padded = []
    for part in parts:
        whole = part.new_zeros((part.shape[0], most))
        whole[:, : part.shape[1]] = part
        whole["collector", "traj_ids"][...] = part["collector", "traj_ids"][:, :1]
        padded.append(whole)
    return torch.cat(padded)


def assert_equal(found: list[TensorDictBase], expected: list[TensorDictBase]) -> None:
    """Check that batches have the same entries, bit for bit."""
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected)):
        keys = [{key if isinstance(key, str) else tuple(key) for key in batch.keys(True, True)}
                for batch in (one, other)]  # fmt: skip
        assert keys[0] == keys[1]
        for key in keys[0]:
            assert torch.equal(one[key], other[key]), (number, key)


class ExitsOnce(Steps):
    """Ends its process in a step if it can remove a file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def step(self, action):
        if self.count == 2:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.path)  # only one worker can
                os._exit(7)
        return super().step(action)


class Dying(LocalTransport):
    """Workers in this process that die before they reply to some requests.

    ``deaths`` counts how often a worker still dies, keyed by worker and number of the request. The
    first request asks for facts; the requests for chunks follow.
    """

    deaths: Counter[tuple[int, int]]

    def receive(self, worker: int, timeout: float) -> Any:
        """Return the next reply unless the worker dies."""
        place = worker, self._requests[worker][0][0].number
        if self.deaths[place] > 0:
            self.deaths[place] -= 1
            raise WorkerLostError("it dies in a test")
        return super().receive(worker, timeout)


def dying(*places: tuple[int, int]) -> type[Dying]:
    """Return a transport whose workers die at the given requests."""
    return type("Dies", (Dying,), {"deaths": Counter(places)})
