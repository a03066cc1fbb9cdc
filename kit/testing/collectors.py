"""A conformance suite for collectors: the kit's, TorchRL's and anybody's.

    def make(case):
        env = counter_env(case)
        return MyCollector(env, counter_policy(env), total_frames=case.total_frames, ...)

    check_collector(make)

The environment is one that counts (:mod:`kit.testing.counter`): from an observation and an action
follows everything else, so that each transition of each batch can be checked, and whether episodes
are mixed up.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import BaseCollector

from kit.collectors.base import KitCollector
from kit.envs import VectorEnv, make_env
from kit.modules import make_actor
from kit.testing.counter import COUNTER, LIMIT
from kit.testing.tensor_counter import expected


@dataclass(frozen=True)
class CollectorCase:
    """What a collector is made for."""

    num_envs: int = 3
    """environment copies."""
    steps_per_env: int = 5
    """policy steps of each copy in a batch; whole episodes: their product at least."""
    batches: int = 4
    """in all."""
    seed: int = 0
    """of environments, policy and random actions."""
    fast: bool = True
    """whether a fast path may be taken, where there is one."""

    @property
    def frames_per_batch(self) -> int:
        """Policy steps of a batch."""
        return self.num_envs * self.steps_per_env

    @property
    def total_frames(self) -> int:
        """Policy steps in all."""
        return self.frames_per_batch * self.batches


Make = Callable[[CollectorCase], BaseCollector]

CASES = (
    CollectorCase(),
    CollectorCase(num_envs=1, steps_per_env=1, batches=9),
    CollectorCase(num_envs=2, steps_per_env=13, batches=3),
)
"""Odd sizes; episodes are 1 to 4 steps long."""


class BrokenPromise(AssertionError):
    """A collector does not do what it has to.

    Args:
        promise: name of the check.
        case: what the collector was made for.
        what: what is wrong.
    """

    def __init__(self, promise: str, case: CollectorCase, what: str) -> None:
        self.promise, self.case = promise, case
        super().__init__(f"{promise}: {what} ({case})")


def counter_env(case: CollectorCase, vectorization: Any = "sync", **kwargs: Any) -> VectorEnv:
    """Return the environment of a case: the one that counts."""
    return make_env(COUNTER, case.num_envs, vectorization=vectorization, seed=case.seed, **kwargs)


def counter_policy(env: Any, seed: int = 0) -> Any:
    """Return a policy that samples, with the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_actor(env, hidden_sizes=(8,))


def check_collector(
    make: Make,
    *,
    promises: Sequence[str] | None = None,
    cases: Sequence[CollectorCase] = CASES,
) -> list[str]:
    """Check that a collector keeps its promises.

    Args:
        make: makes a collector of the environment that counts (:func:`counter_env`) for a case.
        promises: names of :data:`PROMISES` to check; all of them by default.
            :data:`TORCHRL_PROMISES` are those that TorchRL makes too.
        cases: sizes to check them with.

    Returns:
        The promises that were checked.

    Raises:
        BrokenPromise: at the first that is not kept.
    """
    names = list(PROMISES if promises is None else promises)
    for case in cases:
        for name in names:
            PROMISES[name](make, replace(case))
    return names


# ---------------------------------------------------------------------- promises
def _counts(make: Make, case: CollectorCase) -> None:
    """Batches have exactly the size asked for, and end with the total; counters agree."""
    batches, collector = _run(make, case)
    sizes = [_size(batch) for batch in batches]
    if _whole_episodes(batches[0]):
        least, most = case.frames_per_batch, case.frames_per_batch + case.num_envs * LIMIT
        good = all(least <= size < most for size in sizes) and sum(sizes) >= case.total_frames
    else:
        good = sizes == [case.frames_per_batch] * case.batches
    _demand("counts", case, good, f"batches of {sizes} policy steps")
    if not isinstance(collector, KitCollector):
        return
    counted = {name: getattr(collector, name) for name in collector._COUNTERS}
    ends = sum(int(batch["next", "done"].sum()) for batch in batches)
    wanted = {
        "policy_steps": sum(sizes),
        "random_policy_steps": 0,
        "env_steps": sum(sizes),
        "episodes": ends,
        "environment_errors": 0,
    }
    _demand("counts", case, counted == wanted, f"counted {counted}, the batches have {wanted}")


def _transitions(make: Make, case: CollectorCase) -> None:
    """Every step leads where the environment leads, also the last one of an episode."""
    for batch in _run(make, case)[0]:
        rows = _rows(batch)
        wanted = expected(rows["observation"], _integers(rows["action"]))
        for name, value in wanted.items():
            found = rows["next", name]
            same = torch.allclose(found.to(value.dtype).float(), value.float(), atol=1e-5)
            _demand("transitions", case, same, f"next {name} is {found}, not {value}")
        done = rows["next", "terminated"] | rows["next", "truncated"]
        _demand("transitions", case, torch.equal(rows["next", "done"], done), "done is wrong")


def _continuity(make: Make, case: CollectorCase) -> None:
    """Within an episode steps follow one another; after its end comes the start of another."""
    batches = _run(make, case)[0]
    if _whole_episodes(batches[0]):
        sequences = [row for batch in batches for row in _episodes_of(batch)]
    else:
        sequences = [torch.cat([batch[copy] for batch in batches]) for copy in range(case.num_envs)]
    for sequence in sequences:
        done = sequence["next", "done"].squeeze(-1)
        seen, following = sequence["observation"], sequence["next", "observation"]
        follows = (seen[1:] == following[:-1]).all(-1)
        begins = (seen[1:, 1:] == 0).all(-1)
        good = torch.where(done[:-1], begins, follows).all() and bool((seen[0, 1:] == 0).all())
        _demand("continuity", case, bool(good), f"observations are {seen}, ends {done}")


def _trajectories(make: Make, case: CollectorCase) -> None:
    """Steps have the same ``("collector", "traj_ids")`` if they are of the same episode."""
    batches = _run(make, case)[0]
    steps = torch.cat([_rows(batch)["observation"][:, 0] for batch in batches])
    numbers = torch.cat([_rows(batch)["collector", "traj_ids"] for batch in batches])
    pairs = set(zip(numbers.tolist(), steps.tolist()))
    good = len(pairs) == len({n for n, _ in pairs}) == len({x for _, x in pairs})
    _demand("trajectories", case, good, f"numbers and episodes are {sorted(pairs)}")


def _reports(make: Make, case: CollectorCase) -> None:
    """The episodes that are reported are those of the batches."""
    batches, collector = _run(make, case)
    assert isinstance(collector, KitCollector)
    reported = sorted((e.length, round(e.episode_return, 3)) for e in collector.take_episodes())
    _demand("reports", case, not collector.take_episodes(), "episodes are reported twice")
    sums: dict[int, list[float]] = {}
    ended = []
    for batch in batches:
        rows = _rows(batch)
        ids, rewards = rows["collector", "traj_ids"].tolist(), rows["next", "reward"][:, 0].tolist()
        for number, reward, done in zip(ids, rewards, rows["next", "done"][:, 0].tolist()):
            sums.setdefault(number, []).append(reward)
            if done:
                ended.append((len(sums[number]), round(sum(sums[number]), 3)))
    _demand("reports", case, reported == sorted(ended), f"{reported} for {sorted(ended)}")


def _seeds(make: Make, case: CollectorCase) -> None:
    """The same seed gives the same batches, another one others."""
    one, two = _run(make, case)[0], _run(make, case)[0]
    _demand("seeds", case, _equal(one, two), "the same seed gives other batches")
    other = _run(make, replace(case, seed=case.seed + 1))[0]
    _demand("seeds", case, not _equal(one, other), "another seed gives the same batches")


def _plain(make: Make, case: CollectorCase) -> None:
    """A fast path gives what the plain one gives, bit by bit."""
    fast, plain = _run(make, case)[0], _run(make, replace(case, fast=False))[0]
    _demand("plain", case, _equal(fast, plain), "the fast path gives other batches")


def _random_numbers(make: Make, case: CollectorCase) -> None:
    """Nobody else's random numbers are used or disturbed."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    quiet = _run(make, case)[0]
    _demand(
        "random_numbers", case, torch.equal(before, torch.get_rng_state()), "disturbs PyTorch's"
    )
    torch.manual_seed(2)
    _demand("random_numbers", case, _equal(quiet, _run(make, case)[0]), "depends on PyTorch's")


def _memory(make: Make, case: CollectorCase) -> None:
    """A batch belongs to the receiver: later ones do not change it, and he may change it."""
    collector = make(case)
    try:
        iterator = iter(collector)
        first = next(iterator)
        kept = first.clone()
        second = next(iterator)
        _demand("memory", case, _equal([kept], [first]), "a later batch changed the first one")
        kept = second.clone()
        first.zero_()
        _demand("memory", case, _equal([kept], [second]), "batches share memory")
    finally:
        collector.shutdown()


def _checkpoint(make: Make, case: CollectorCase) -> None:
    """A collector goes on from a saved state, in the middle of episodes, bit by bit."""
    whole, collector = _run(make, case)
    half = case.batches // 2
    saving, going_on = make(case), make(replace(case, seed=case.seed + 100))
    try:
        iterator = iter(saving)
        for _ in range(half):
            next(iterator)
        file = io.BytesIO()
        torch.save(dict(saving.state_dict()), file)
        file.seek(0)
        going_on.load_state_dict(torch.load(file, weights_only=True))
        good = _equal(whole[half:], list(going_on))
        _demand("checkpoint", case, good, "other batches come after loading a saved state")
        for name in ("policy_steps", "env_steps", "episodes"):
            counts = getattr(collector, name, None), getattr(going_on, name, None)
            _demand("checkpoint", case, counts[0] == counts[1], f"{name} are {counts}")
    finally:
        saving.shutdown()
        going_on.shutdown()


def _shutdown(make: Make, case: CollectorCase) -> None:
    """Nothing is left after :meth:`shutdown`: no process, no thread; twice is fine."""
    gc.collect()
    processes, threads = set(multiprocessing.active_children()), set(threading.enumerate())
    collector = make(case)
    next(iter(collector))
    collector.shutdown()
    collector.shutdown()
    left = set(multiprocessing.active_children()) - processes
    _demand("shutdown", case, not left, f"processes are left: {left}")
    alive = {t for t in set(threading.enumerate()) - threads if not t.daemon and t.is_alive()}
    _demand("shutdown", case, not alive, f"threads are left: {alive}")


Check = Callable[[Make, CollectorCase], None]

PROMISES: dict[str, Check] = {
    "counts": _counts,
    "transitions": _transitions,
    "continuity": _continuity,
    "trajectories": _trajectories,
    "reports": _reports,
    "seeds": _seeds,
    "plain": _plain,
    "random_numbers": _random_numbers,
    "memory": _memory,
    "checkpoint": _checkpoint,
    "shutdown": _shutdown,
}
"""What a collector of the kit promises, by name."""

TORCHRL_PROMISES = ("counts", "transitions", "continuity", "trajectories", "seeds", "shutdown")
"""What TorchRL's collectors promise too."""


# ---------------------------------------------------------------------- helpers
def _demand(promise: str, case: CollectorCase, kept: bool, what: str) -> None:
    if not kept:
        raise BrokenPromise(promise, case, what)


def _run(make: Make, case: CollectorCase) -> tuple[list[TensorDictBase], BaseCollector]:
    """Return all batches of a collector, and the collector, shut down."""
    collector = make(case)
    try:
        return [batch.clone() for batch in collector], collector
    finally:
        collector.shutdown()


def _whole_episodes(batch: TensorDictBase) -> bool:
    return batch.ndim == 1 or batch.get(("collector", "mask"), None) is not None


def _size(batch: TensorDictBase) -> int:
    mask = batch.get(("collector", "mask"), None)
    return batch.numel() if mask is None else int(mask.sum())


def _rows(batch: TensorDictBase) -> TensorDictBase:
    """Return the transitions of a batch, copy by copy in the order of time, without padding."""
    mask = batch.get(("collector", "mask"), None)
    return batch.reshape(-1) if mask is None else batch[mask]


def _episodes_of(batch: TensorDictBase) -> list[TensorDictBase]:
    rows = _rows(batch)
    numbers = rows["collector", "traj_ids"]
    return [rows[numbers == number] for number in numbers.unique()]


def _integers(action: Tensor) -> Tensor:
    """Return actions as integers, also where they are one-hot."""
    return action.argmax(-1) if action.ndim > 1 else action


def _equal(one: Sequence[TensorDictBase], other: Sequence[TensorDictBase]) -> bool:
    if len(one) != len(other):
        return False
    for a, b in zip(one, other):
        keys = set(a.keys(True, True))
        if a.shape != b.shape or keys != set(b.keys(True, True)):
            return False
        if not all(torch.equal(a.get(key), b.get(key)) for key in keys):
            return False
    return True
