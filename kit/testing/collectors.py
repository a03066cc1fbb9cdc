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
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from kit.collectors.base import KitCollector
from kit.envs import VectorEnv, make_env
from kit.modules import make_actor
from kit.steps.errors import one_of
from kit.testing.counter import COUNTER, LIMIT
from kit.testing.tensor_counter import expected
from kit.testing.trial import CollectorCase, Make, Trial, take_episodes

CASES = (
    CollectorCase(),
    CollectorCase(num_envs=1, steps_per_env=1, batches=9),
    CollectorCase(num_envs=2, steps_per_env=13, batches=3),
)
"""Odd sizes; episodes are 1 to 4 steps long."""


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
        SettingError: if there is no such promise.
    """
    known = tuple(PROMISES)
    names = [one_of("promises", name, known) for name in (promises or known)]
    for case in cases:
        trial = Trial(make, replace(case))
        for name in names:
            PROMISES[name](trial)
    return names


# ---------------------------------------------------------------------- promises
def _counts(trial: Trial) -> None:
    """Batches have exactly the size asked for, and end with the total; counters agree."""
    case, batches, collector = trial.case, trial.whole.batches, trial.whole.collector
    sizes = [_size(batch) for batch in batches]
    if batches and _whole_episodes(batches[0]):
        least, most = case.frames_per_batch, case.frames_per_batch + case.num_envs * LIMIT
        good = all(least <= size < most for size in sizes)
        good &= sum(sizes[:-1]) < case.total_frames <= sum(sizes)
    else:
        good = sizes == [case.frames_per_batch] * case.batches
    trial.demand("counts", good, f"batches of {sizes} policy steps")
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
    trial.demand("counts", counted == wanted, f"counted {counted}, the batches have {wanted}")


def _transitions(trial: Trial) -> None:
    """Every step leads where the environment leads, also the last one of an episode."""
    for batch in trial.whole.batches:
        rows = _rows(batch)
        wanted = expected(rows["observation"], _integers(rows["action"]))
        for name, value in wanted.items():
            found = rows["next", name]
            same = torch.allclose(found.to(value.dtype).float(), value.float(), atol=1e-5)
            trial.demand("transitions", same, f"next {name} is {found}, not {value}")
        done = rows["next", "terminated"] | rows["next", "truncated"]
        trial.demand("transitions", torch.equal(rows["next", "done"], done), "done is wrong")


def _continuity(trial: Trial) -> None:
    """Within an episode steps follow one another; after its end comes the start of another."""
    batches, copies = trial.whole.batches, range(trial.case.num_envs)
    if _whole_episodes(batches[0]):
        sequences = [row for batch in batches for row in _episodes_of(batch)]
    else:
        sequences = [torch.cat([batch[copy] for batch in batches]) for copy in copies]
    for sequence in sequences:
        done = sequence["next", "done"].squeeze(-1)
        seen, following = sequence["observation"], sequence["next", "observation"]
        follows = (seen[1:] == following[:-1]).all(-1)
        begins = (seen[1:, 1:] == 0).all(-1)
        good = torch.where(done[:-1], begins, follows).all() and bool((seen[0, 1:] == 0).all())
        trial.demand("continuity", bool(good), f"observations are {seen}, ends {done}")


def _trajectories(trial: Trial) -> None:
    """Steps have the same ``("collector", "traj_ids")`` if they are of the same episode."""
    batches = trial.whole.batches
    steps = torch.cat([_rows(batch)["observation"][:, 0] for batch in batches])
    numbers = torch.cat([_rows(batch)["collector", "traj_ids"] for batch in batches])
    pairs = set(zip(numbers.tolist(), steps.tolist()))
    good = len(pairs) == len({n for n, _ in pairs}) == len({x for _, x in pairs})
    trial.demand("trajectories", good, f"numbers and episodes are {sorted(pairs)}")


def _reports(trial: Trial) -> None:
    """The episodes that are reported are those of the batches, and each is reported once."""
    reported = sorted(
        (e.length, round(e.episode_return, 3), e.env_steps, e.terminated)
        for e in trial.whole.episodes
    )
    again = take_episodes(trial.whole.collector)
    trial.demand("reports", not again, "episodes are reported twice")
    sums: dict[int, list[float]] = {}
    ended = []
    for batch in trial.whole.batches:
        rows = _rows(batch)
        names = (
            ("collector", "traj_ids"),
            *[("next", n) for n in ("reward", "done", "terminated")],
        )
        for number, reward, done, end in zip(*[rows[name].flatten().tolist() for name in names]):
            sums.setdefault(number, []).append(reward)
            if done:
                length = len(sums[number])
                ended.append((length, round(sum(sums[number]), 3), length, end))
    trial.demand("reports", reported == sorted(ended), f"{reported} for {sorted(ended)}")


def _seeds(trial: Trial) -> None:
    """The same seed gives the same batches, another one others."""
    one, two = trial.whole.batches, trial.run().batches
    trial.demand("seeds", _equal(one, two), "the same seed gives other batches")
    other = trial.run(seed=trial.case.seed + 1).batches
    trial.demand("seeds", not _equal(one, other), "another seed gives the same batches")


def _plain(trial: Trial) -> None:
    """A fast path gives what the plain one gives, bit by bit."""
    plain = trial.run(fast=False).batches
    good = _equal(trial.whole.batches, plain)
    trial.demand("plain", good, "the fast path gives other batches")


def _random_numbers(trial: Trial) -> None:
    """Nobody else's random numbers are used or disturbed."""
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        runs.append(trial.run().batches)
        undisturbed = torch.equal(before, torch.get_rng_state())
        trial.demand("random_numbers", undisturbed, "disturbs PyTorch's")
    trial.demand("random_numbers", _equal(*runs), "depends on PyTorch's")


def _memory(trial: Trial) -> None:
    """A batch belongs to the receiver: later ones do not change it, and he may change it."""
    collector = trial.make(trial.case)
    try:
        iterator = iter(collector)
        first = next(iterator)
        kept = first.clone()
        second = next(iterator)
        trial.demand("memory", _equal([kept], [first]), "a later batch changed the first one")
        kept = second.clone()
        first.zero_()
        trial.demand("memory", _equal([kept], [second]), "batches share memory")
    finally:
        collector.shutdown()


def _checkpoint(trial: Trial) -> None:
    """A collector goes on from a saved state, in the middle of episodes, bit by bit."""
    whole, half = trial.whole, trial.case.batches // 2
    saving = trial.make(trial.case)
    going_on = trial.make(replace(trial.case, seed=trial.case.seed + 100))
    try:
        iterator = iter(saving)
        for _ in range(half):
            next(iterator)
        file = io.BytesIO()
        torch.save(dict(saving.state_dict()), file)
        file.seek(0)
        going_on.load_state_dict(torch.load(file, weights_only=True))
        good = _equal(whole.batches[half:], list(going_on))
        trial.demand("checkpoint", good, "other batches come after loading a saved state")
        for name in ("policy_steps", "env_steps", "episodes"):
            counts = getattr(whole.collector, name, None), getattr(going_on, name, None)
            trial.demand("checkpoint", counts[0] == counts[1], f"{name} are {counts}")
        reported = whole.episodes, take_episodes(going_on)
        trial.demand("checkpoint", reported[0] == reported[1], f"reports are {reported}")
    finally:
        saving.shutdown()
        going_on.shutdown()


def _shutdown(trial: Trial) -> None:
    """Nothing is left after :meth:`shutdown`: no process, no thread; twice is fine."""
    gc.collect()
    processes, threads = set(multiprocessing.active_children()), set(threading.enumerate())
    collector = trial.make(trial.case)
    next(iter(collector))
    collector.shutdown()
    collector.shutdown()
    left = set(multiprocessing.active_children()) - processes
    trial.demand("shutdown", not left, f"processes are left: {left}")
    alive = {t for t in set(threading.enumerate()) - threads if not t.daemon and t.is_alive()}
    trial.demand("shutdown", not alive, f"threads are left: {alive}")


Check = Callable[[Trial], None]

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
