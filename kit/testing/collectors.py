"""A conformance suite for collectors: the kit's, TorchRL's and those of third parties.

    def make(case):
        env = counter_env(case)
        return MyCollector(env, counter_policy(env), total_frames=case.total_frames, ...)

    check_collector(make)

The environment is one that counts (:mod:`kit.testing.counter`): from an observation and an action
follows everything else, so that each transition of each batch can be checked, and whether episodes
are mixed up. Environments that only exist ready-made are put on trial with CartPole
(:data:`~kit.testing.cartpole.CARTPOLE`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer

from kit.collectors.base import KitCollector
from kit.envs import VectorEnv
from kit.steps.errors import one_of
from kit.testing.batches import equal, restart, rows, sequences
from kit.testing.one_run import ONE_RUN
from kit.testing.tensor_counter import COUNTING
from kit.testing.trial import (
    CollectorCase,
    CollectorUnderTest,
    ConformanceError,
    Make,
    Run,
    SuiteEnv,
    take_episodes,
)


def counter_env(case: CollectorCase, vectorization: Any = "sync", **kwargs: Any) -> VectorEnv:
    """The environment of a case: the one that counts."""
    return COUNTING.env(case, vectorization, **kwargs)


def counter_policy(env: Any, seed: int = 0) -> Any:
    """A policy that samples, with the same weights for the same seed."""
    return COUNTING.policy(env, seed)


class _Remembering(TensorDictModuleBase):  # type: ignore[misc, unused-ignore]
    """Counts the policy steps of an episode in a memory, ``[..., 1]``, that begins with zeros."""

    in_keys = ("memory",)
    out_keys = ("remembered", ("next", "memory"))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Count a step."""
        tensordict["remembered"] = tensordict["next", "memory"] = tensordict["memory"] + 1.0
        return tensordict

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """What gives the memory at the beginning of an episode."""
        return TensorDictPrimer({"memory": Unbounded((1,))}, expand_specs=True)


def recurrent_policy(env: Any, seed: int = 0) -> Any:
    """The same policy with a memory: ``continuity`` asks that no episode remembers another."""
    actor = COUNTING.policy(env, seed)
    COUNTING.policies.append(ProbabilisticTensorDictSequential(_Remembering(), *actor))
    return COUNTING.policies[-1]


def check_collector(
    make: Make,
    *,
    promises: Sequence[str] | None = None,
    world: SuiteEnv = COUNTING,
    cases: Sequence[CollectorCase] | None = None,
    exact_resume: bool = True,
) -> list[str]:
    """Check that a collector keeps its promises.

    Args:
        make: makes a collector of ``world.env(case)`` for a case.
        promises: names of :data:`COLLECTOR_CHECKS` to check; all of them by default.
            :data:`TORCHRL_COLLECTOR_CHECKS` are those that TorchRL makes too.
        world: the environment, and what is known of it.
        cases: sizes to check them with; those of the world by default.
        exact_resume: whether a saved run has to continue bit for bit. False where an
            environment cannot give its state. A collector that claims exact resumption is held to
            it all the same; otherwise counts have to continue and all envs to begin new episodes.

    Returns:
        The promises that were checked.

    Raises:
        ConformanceError: at the first that is not kept.
        SettingError: if there is no such promise.
    """
    known = tuple(COLLECTOR_CHECKS)
    names = [one_of("promises", name, known) for name in (promises or known)]
    for number, case in enumerate(world.cases if cases is None else cases):
        trial = CollectorUnderTest(make, case, world, exact_resume)
        trial.first = number == 0
        for trial.promise in names:
            COLLECTOR_CHECKS[trial.promise](trial)
    return names


# ---------------------------------------------------------------------- promises of several runs
def _seeds(trial: CollectorUnderTest) -> None:
    """The same seed gives the same batches, another one other episodes and other samples.

    Samples are those of a policy that ignores observations, so that other episodes do not change
    them. A collector of the kit may be seeded after it was made.
    """
    seeds = trial.case.seed, trial.case.seed + 1
    one, two = trial.whole.batches, trial.run().batches
    trial.demand(equal(one, two), "the same seed gives other batches")
    other = trial.run(seed=seeds[1]).batches
    trial.demand(not equal(one, other), "another seed gives the same batches")
    if (episode := trial.world.episode) is not None:
        begun = [{*episode(_steps(run)["observation"]).tolist()} for run in (one, other)]
        trial.demand(begun[0].isdisjoint(begun[1]), "another seed gives the same episodes")
    if not trial.first:  # sizes make no difference to the others
        return
    blind = [trial.run(before=_weights(trial, 0.0), seed=seed) for seed in seeds]
    if trial.world.policies:
        samples = [_steps(run.batches)["action"] for run in blind]
        same = len(samples[0]) >= _ENOUGH_SAMPLES and torch.equal(*samples)
        trial.demand(not same, "another seed gives the same samples of the policy")
        _demand_others(trial, blind[0])
    if isinstance(trial.whole.collector, KitCollector):
        again = [trial.run(before=lambda c: c.set_seed(0), seed=seed).batches for seed in seeds]
        trial.demand(equal(again[0], again[1]), "set_seed leaves something as it was seeded before")


def _random_actions(trial: CollectorUnderTest) -> None:
    """Actions of random steps, where a case has some, are random; those after are the policy's."""
    if trial.case.random_steps:
        more = 2 * trial.case.total_frames  # whole episodes may be more than the total
        both = [trial.run(before=_weights(trial, by), random_steps=more) for by in (0.0, 9.0)]
        same = torch.equal(*(_steps(run.batches)["action"] for run in both))
        trial.demand(same, "actions depend on the weights of the policy")
        _demand_others(trial, both[0])
    if 0 < trial.case.random_steps <= trial.case.total_frames - trial.case.frames_per_batch:
        runs = (trial.run(before=_weights(trial, by)) for by in (0.0, 1e3))
        last = [rows(run.batches[-1])["action"] for run in runs]
        same = len(last[0]) >= _ENOUGH_SAMPLES and torch.equal(*last)
        trial.demand(not same, "actions after these do not depend on the weights of the policy")


def _demand_others(trial: CollectorUnderTest, run: Run) -> None:
    """Actions that depend on no observation are not the same in all batches, nor in all envs."""
    envs = sequences(run, trial.case.num_envs)
    for where, parts in (("batch", [*map(rows, run.batches)]), ("env", envs)):
        actions = [part["action"][: min(map(len, parts))] for part in parts]
        same = all(torch.equal(actions[0], other) for other in actions)
        enough = sum(map(len, actions[1:])) >= _ENOUGH_SAMPLES
        trial.demand(not (same and enough), f"samples are the same in every {where}")


def _steps(batches: Sequence[TensorDictBase]) -> TensorDictBase:
    return torch.cat([rows(batch).select("observation", "action") for batch in batches])


def _weights(trial: CollectorUnderTest, factor: float) -> Callable[[Any], None]:
    """What multiplies the weights of a policy of the world, and sends them."""
    trial.world.policies.clear()

    def change(collector: Any) -> None:
        with torch.no_grad():
            for policy in trial.world.policies:
                for weights in policy.parameters():
                    weights.mul_(factor)
        collector.update_policy_weights_()

    return change


def _plain(trial: CollectorUnderTest) -> None:
    """A fast path gives the plain one's batches bit by bit, or up to rounding if it says so."""
    plain = trial.run(fast=False).batches
    exact = getattr(trial.whole.collector, "exact_policy", True)
    good = equal(trial.whole.batches, plain, 0.0 if exact else _ROUNDING)
    trial.demand(good, "the fast path gives other batches")


def _random_numbers(trial: CollectorUnderTest) -> None:
    """Global random numbers are not changed, and PyTorch's are not used."""
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # a collector that seeds them leaves others behind
        random.seed(seed)
        before = _global_random_numbers()
        runs.append(trial.run().batches)
        _demand_undisturbed(trial, before)
    trial.demand(equal(runs[0], runs[1]), "depends on PyTorch's")
    before = _global_random_numbers()
    with trial.made() as collector:
        collector.load_state_dict(collector.state_dict())
    _demand_undisturbed(trial, before)


def _global_random_numbers() -> dict[str, Any]:
    """Where everybody's random numbers stand, by whose they are."""
    numpy = np.random.get_state(legacy=True)
    return {
        "PyTorch's": torch.get_rng_state().tolist(),
        "NumPy's": [part.tolist() if isinstance(part, np.ndarray) else part for part in numpy],
        "Python's": random.getstate(),
    }


def _demand_undisturbed(trial: CollectorUnderTest, before: dict[str, Any]) -> None:
    for name, state in _global_random_numbers().items():
        trial.demand(state == before[name], f"disturbs {name}")


def _memory(trial: CollectorUnderTest) -> None:
    """A batch is the receiver's to change: no later one changes it, and it has no gradients."""
    batches, copies = [], []
    with trial.made() as collector:
        for batch in collector:
            grown = [key for key in batch.keys(True, True) if batch.get(key).requires_grad]
            trial.demand(not grown, f"gradients go on into what made {grown}")
            batches.append(batch)
            copies.append(batch.clone())
        trial.demand(equal(batches, copies), "a later batch changed one before")
        batches[0].zero_()
        trial.demand(equal(batches[1:], copies[1:]), "batches share memory")
    changed = trial.run(after=lambda batch: batch.zero_()).batches
    good = equal(changed, trial.whole.batches)
    trial.demand(good, "what is done to a batch changes later ones")


def _policy(trial: CollectorUnderTest) -> None:
    """The learner's policy samples the actions, from the observation of the step, and is unchanged.

    After new weights were sent, the last batch at the latest has actions of the new policy.
    ``action_log_prob``, where it is in the batches, is that of the new weights or the old ones.
    """
    trial.world.policies.clear()
    with trial.made(batches=_BATCHES_TO_FOLLOW, random_steps=0) as collector:
        policy: Any = trial.world.policies[-1] if trial.world.policies else None
        before, good, wanted = copy.deepcopy(policy), [True], [torch.zeros(1)]
        for number, batch in enumerate(collector):
            steps = rows(batch).clone()
            if policy is None:
                return
            if number == 0:
                left_alone = _is_left_alone(policy, [*before.parameters()])
                trial.demand(left_alone, "the policy is changed")
                likeliest = policy.get_dist(steps.clone()).mode == steps["action"]
                greedy = bool(likeliest.all()) and len(steps) >= _ENOUGH_SAMPLES
                trial.demand(not greedy, "actions are the likeliest ones, not samples")
            wanted = [_log_prob(one, steps) for one in (before, policy)]
            found = steps.get("action_log_prob", wanted[-1])
            good = [torch.allclose(found, one, rtol=_ROUNDING, atol=_ROUNDING) for one in wanted]
            what = f"action_log_prob is {found.tolist()}, that of the weights {wanted[-1].tolist()}"
            trial.demand(any(good), what)
            if number == 0:
                generator = torch.Generator().manual_seed(0)
                with torch.no_grad():
                    for one in policy.parameters():
                        one.add_(_FAR * torch.randn(one.shape, generator=generator).to(one.device))
                collector.update_policy_weights_()
    trial.demand(good[-1], "action_log_prob is not that of the newest weights")
    likely = bool((wanted[-1] > _LEAST_LOG_PROB).all())
    trial.demand(likely, "actions are not those of the newest weights")


def _log_prob(policy: Any, steps: TensorDictBase) -> Tensor:
    with torch.no_grad():
        log_prob: Tensor = policy.get_dist(steps.clone()).log_prob(steps["action"])
        return log_prob


def _is_left_alone(policy: Any, weights: Sequence[Tensor]) -> bool:
    """Whether a policy of the world is as it was made, and has ``weights``."""
    own = [*policy.parameters()]
    trained = all(one.requires_grad for one in own)
    trained &= all(module.training for module in policy.modules())
    return trained and all(map(torch.equal, own, weights))


def _checkpoint(trial: CollectorUnderTest) -> None:
    """A collector continues from a saved state, in the middle of episodes, bit by bit.

    The state may have been loaded and saved again. It stays unchanged when its collector continues.
    """
    half, seed = len(trial.whole.batches) // 2, trial.case.seed
    with (
        trial.made() as saving,
        trial.made(seed=seed + 50) as between,
        trial.made(seed=seed + 100) as resumed,
    ):
        iterator = iter(saving)
        before = [next(iterator).clone() for _ in range(half)]
        state = saving.state_dict()
        undisturbed = [*before, *[batch.clone() for batch in iterator]]
        between.load_state_dict(state)
        resumed.load_state_dict(_saved(between))
        exact = bool(getattr(resumed, "exact_resume", True))
        claimed = exact or not trial.exact_resume
        trial.demand(claimed, "does not resume exactly, as exact_resume says")
        batches = [*before, *[batch.clone() for batch in resumed]]
        restarted = 0 if exact else restart(batches, half)
        run = Run(batches, take_episodes(resumed), resumed, restarted)
    good = equal(undisturbed, trial.whole.batches)
    trial.demand(good, "saving changes the batches that come after it")
    (_check_exact if exact else _check_restarted)(trial, run)


def _saved(collector: Any) -> Any:
    """The state of a collector, written and read."""
    file = io.BytesIO()
    torch.save(dict(collector.state_dict()), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _check_exact(trial: CollectorUnderTest, run: Run) -> None:
    """A resumed run is the uninterrupted one."""
    whole = trial.whole
    good = equal(whole.batches, run.batches)
    trial.demand(good, "other batches come after loading a saved state")
    for name in KitCollector._COUNTERS:
        counted = [getattr(one.collector, name, None) for one in (whole, run)]
        trial.demand(counted[0] == counted[1], f"{name} are {counted}")
    reported = whole.episodes, run.episodes
    trial.demand(reported[0] == reported[1], f"reports are {reported}")


def _check_restarted(trial: CollectorUnderTest, run: Run) -> None:
    """Both parts of a run are right; open episodes are neither counted nor reported."""
    for name, check in ONE_RUN.items():
        try:
            check(trial, run)
        except ConformanceError as broken:
            what = f"after a restart, {name}: {broken.what}"
            raise ConformanceError("checkpoint", trial.case, what) from broken


_SECONDS_TO_END = 5.0
"""How long threads may take to end."""


def _shutdown(trial: CollectorUnderTest) -> None:
    """``shutdown`` leaves no process and no thread, and nothing can be collected after it."""
    # A whole run comes first: libraries keep some threads from their first use on.
    trial.demand(bool(trial.whole.batches), "there is no batch")
    gc.collect()
    processes, threads = set(multiprocessing.active_children()), set(threading.enumerate())
    others = _threads_of_libraries()
    collector = trial.make(trial.case)
    next(iter(collector))
    collector.shutdown()
    collector.shutdown()
    if isinstance(collector, KitCollector):
        with contextlib.suppress(RuntimeError):
            collector.collect()
            trial.demand(False, "collects after it was shut down")
    left: set[Any] = set(multiprocessing.active_children()) - processes
    trial.demand(not left, f"processes are left: {left}")
    left = _left_in_time(lambda: set(threading.enumerate()) - threads)
    trial.demand(not left, f"threads are left: {left}")
    left = _left_in_time(lambda: _threads_of_libraries() - others)
    trial.demand(not left, f"threads are left that are not Python's: {left}")


def _left_in_time(find: Callable[[], set[Any]]) -> set[Any]:
    """What is still found when it had time to end."""
    until = time.monotonic() + _SECONDS_TO_END
    while (left := find()) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def _threads_of_libraries() -> set[int]:
    """The threads that Python did not start; none where they are unknown."""
    tasks = Path("/proc/self/task")
    found = {int(task.name) for task in tasks.iterdir()} if tasks.exists() else set()
    return found - {thread.native_id for thread in threading.enumerate()}


_ENOUGH_SAMPLES = 10
"""Of which all are the likeliest ones, or those of others, in one of 10,000 runs at most."""
_BATCHES_TO_FOLLOW = 5
"""Batches after which a policy with new weights has to act."""
_FAR = 6.0
"""Standard deviation of what is added to weights, so that few actions are likely."""
_LEAST_LOG_PROB = -20.0
"""Of samples: one in 500 million is less likely."""
_ROUNDING = 1e-5
"""Of a policy in float32 that sums in another order."""

Check = Callable[[CollectorUnderTest], None]


def _of_one_run(name: str, trial: CollectorUnderTest) -> None:
    ONE_RUN[name](trial, trial.whole)


COLLECTOR_CHECKS: dict[str, Check] = {
    **{name: functools.partial(_of_one_run, name) for name in ONE_RUN},
    "seeds": _seeds,
    "plain": _plain,
    "random_numbers": _random_numbers,
    "random_actions": _random_actions,
    "memory": _memory,
    "policy": _policy,
    "checkpoint": _checkpoint,
    "shutdown": _shutdown,
}
"""What a collector of the kit promises, by name."""

TORCHRL_COLLECTOR_CHECKS = (
    "counts",
    "transitions",
    "continuity",
    "trajectories",
    "seeds",
    "shutdown",
)
"""What TorchRL's collectors promise too."""
