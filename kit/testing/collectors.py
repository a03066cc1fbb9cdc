"""Conformance suite for collectors from kit, TorchRL and third parties.

    def make(case):
        env = counter_env(case)
        return MyCollector(env, counter_policy(env), total_frames=case.total_frames, ...)

    check_collector(make)

In the default environment (:mod:`kit.testing.counter`), observation and action determine the next
transition, so the suite can verify each transition and detect mixed episodes. Libraries with fixed
environments can be tested with CartPole (:data:`~kit.testing.cartpole.CARTPOLE`).
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
    """Create the counter environment for a case."""
    return COUNTING.env(case, vectorization, **kwargs)


def counter_policy(env: Any, seed: int = 0) -> Any:
    """Create a policy that samples actions; equal seeds give equal weights."""
    return COUNTING.policy(env, seed)


class _StepCounter(TensorDictModuleBase):  # type: ignore[misc, unused-ignore]
    """Recurrent module that counts the steps of an episode in a hidden state ``[..., 1]``."""

    in_keys = ("memory",)
    out_keys = ("remembered", ("next", "memory"))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Count a step."""
        tensordict["remembered"] = tensordict["next", "memory"] = tensordict["memory"] + 1.0
        return tensordict

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return a primer for the initial hidden state."""
        return TensorDictPrimer({"memory": Unbounded((1,))}, expand_specs=True)


def recurrent_policy(env: Any, seed: int = 0) -> Any:
    """Create a recurrent policy. The suite uses it to check that hidden state is reset."""
    actor = COUNTING.policy(env, seed)
    COUNTING.policies.append(ProbabilisticTensorDictSequential(_StepCounter(), *actor))
    return COUNTING.policies[-1]


def check_collector(
    make: Make,
    *,
    promises: Sequence[str] | None = None,
    world: SuiteEnv = COUNTING,
    cases: Sequence[CollectorCase] | None = None,
    exact_resume: bool = True,
) -> list[str]:
    """Run the conformance checks on a collector.

    Args:
        make: function that creates a collector for a case, using ``world.env(case)``.
        promises: names of the :data:`COLLECTOR_CHECKS` to run; default: all. TorchRL's collectors
            pass :data:`TORCHRL_COLLECTOR_CHECKS`.
        world: environment with its expected transitions.
        cases: sizes and seeds to test; by default the cases of ``world``.
        exact_resume: whether a resumed run must continue bit by bit. If false, for environments
            whose state cannot be captured, only the counters must continue, and all environments
            must start new episodes. A collector that reports ``exact_resume`` must always resume
            exactly.

    Returns:
        Names of the checks that were run.

    Raises:
        ConformanceError: for the first check that fails.
        SettingError: if a check's name is unknown.
    """
    available = tuple(COLLECTOR_CHECKS)
    names = [one_of("promises", name, available) for name in (promises or available)]
    for number, case in enumerate(world.cases if cases is None else cases):
        trial = CollectorUnderTest(make, case, world, exact_resume)
        trial.first = number == 0
        for trial.promise in names:
            COLLECTOR_CHECKS[trial.promise](trial)
    return names


# ---------------------------------------------------------------------- checks with several runs
def _seeds(trial: CollectorUnderTest) -> None:
    """Check that equal seeds give equal batches, and different seeds give different ones.

    Both episodes and sampled actions must differ. Samples are compared for a policy that ignores
    observations, so that they do not depend on episodes. ``set_seed`` of kit's collectors is also
    checked.
    """
    seeds = trial.case.seed, trial.case.seed + 1
    first, second = trial.whole.batches, trial.run().batches
    trial.demand(equal(first, second), "the same seed gives different batches")
    other = trial.run(seed=seeds[1]).batches
    trial.demand(not equal(first, other), "another seed gives the same batches")
    if (episode := trial.world.episode) is not None:
        begun = [{*episode(_steps(run)["observation"]).tolist()} for run in (first, other)]
        trial.demand(begun[0].isdisjoint(begun[1]), "another seed gives the same episodes")
    if not trial.first:  # the following checks do not depend on the case
        return
    blind = [trial.run(before=_weights(trial, 0.0), seed=seed) for seed in seeds]
    if trial.world.policies:
        samples = [_steps(run.batches)["action"] for run in blind]
        same = len(samples[0]) >= _ENOUGH_SAMPLES and torch.equal(*samples)
        trial.demand(not same, "another seed gives the same policy samples")
        _demand_others(trial, blind[0])
    if isinstance(trial.whole.collector, KitCollector):
        again = [trial.run(before=lambda c: c.set_seed(0), seed=seed).batches for seed in seeds]
        trial.demand(equal(again[0], again[1]), "set_seed does not reset the whole RNG state")


def _random_actions(trial: CollectorUnderTest) -> None:
    """Check that initial random steps ignore the policy, and that later steps use it."""
    if trial.case.random_steps:
        more = 2 * trial.case.total_frames  # complete episodes can exceed total_frames
        both = [trial.run(before=_weights(trial, by), random_steps=more) for by in (0.0, 9.0)]
        same = torch.equal(*(_steps(run.batches)["action"] for run in both))
        trial.demand(same, "actions depend on the weights of the policy")
        _demand_others(trial, both[0])
    if 0 < trial.case.random_steps <= trial.case.total_frames - trial.case.frames_per_batch:
        runs = (trial.run(before=_weights(trial, by)) for by in (0.0, 1e3))
        last = [rows(run.batches[-1])["action"] for run in runs]
        same = len(last[0]) >= _ENOUGH_SAMPLES and torch.equal(*last)
        trial.demand(not same, "actions after random steps do not depend on the policy's weights")


def _demand_others(trial: CollectorUnderTest, run: Run) -> None:
    """Check that observation-independent samples differ between batches and environments."""
    envs = sequences(run, trial.case.num_envs)
    for where, parts in (("batch", [*map(rows, run.batches)]), ("env", envs)):
        actions = [part["action"][: min(map(len, parts))] for part in parts]
        same = all(torch.equal(actions[0], other) for other in actions)
        enough = sum(map(len, actions[1:])) >= _ENOUGH_SAMPLES
        trial.demand(not (same and enough), f"samples are the same in every {where}")


def _steps(batches: Sequence[TensorDictBase]) -> TensorDictBase:
    return torch.cat([rows(batch).select("observation", "action") for batch in batches])


def _weights(trial: CollectorUnderTest, factor: float) -> Callable[[Any], None]:
    """Return a function that scales the policy's weights and sends them to the collector."""
    trial.world.policies.clear()

    def change(collector: Any) -> None:
        with torch.no_grad():
            for policy in trial.world.policies:
                for weights in policy.parameters():
                    weights.mul_(factor)
        collector.update_policy_weights_()

    return change


def _plain(trial: CollectorUnderTest) -> None:
    """Check that the fast path matches the module (bit for bit if ``exact_policy`` is true)."""
    plain = trial.run(fast=False).batches
    exact = getattr(trial.whole.collector, "exact_policy", True)
    good = equal(trial.whole.batches, plain, 0.0 if exact else _ROUNDING)
    trial.demand(good, "the fast path gives different batches")


def _random_numbers(trial: CollectorUnderTest) -> None:
    """Check that collectors neither change global RNG states nor use PyTorch's global RNG."""
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # to detect collectors that reseed NumPy
        random.seed(seed)
        before = _global_random_numbers()
        runs.append(trial.run().batches)
        _demand_undisturbed(trial, before)
    trial.demand(equal(runs[0], runs[1]), "depends on PyTorch's global RNG")
    before = _global_random_numbers()
    with trial.create() as collector:
        collector.load_state_dict(collector.state_dict())
    _demand_undisturbed(trial, before)


def _global_random_numbers() -> dict[str, Any]:
    """Return the global RNG states by library."""
    numpy = np.random.get_state(legacy=True)
    return {
        "PyTorch's": torch.get_rng_state().tolist(),
        "NumPy's": [part.tolist() if isinstance(part, np.ndarray) else part for part in numpy],
        "Python's": random.getstate(),
    }


def _demand_undisturbed(trial: CollectorUnderTest, before: dict[str, Any]) -> None:
    for name, state in _global_random_numbers().items():
        trial.demand(state == before[name], f"changes {name} global RNG state")


def _memory(trial: CollectorUnderTest) -> None:
    """Check that batches do not share memory and carry no gradients."""
    batches, copies = [], []
    with trial.create() as collector:
        for batch in collector:
            grown = [key for key in batch.keys(True, True) if batch.get(key).requires_grad]
            trial.demand(not grown, f"entries {grown} of a batch require gradients")
            batches.append(batch)
            copies.append(batch.clone())
        trial.demand(equal(batches, copies), "a later batch changed an earlier batch")
        batches[0].zero_()
        trial.demand(equal(batches[1:], copies[1:]), "batches share memory")
    changed = trial.run(after=lambda batch: batch.zero_()).batches
    good = equal(changed, trial.whole.batches)
    trial.demand(good, "changing a batch changes later batches")


def _policy(trial: CollectorUnderTest) -> None:
    """Check that the policy is unmodified and that actions are sampled from its distribution.

    New weights are sent after the first batch, and the last batch must use them. If present,
    ``action_log_prob`` must match the new or the previous weights.
    """
    trial.world.policies.clear()
    with trial.create(batches=_BATCHES_TO_FOLLOW, random_steps=0) as collector:
        policy: Any = trial.world.policies[-1] if trial.world.policies else None
        before, good, wanted = copy.deepcopy(policy), [True], [torch.zeros(1)]
        for number, batch in enumerate(collector):
            steps = rows(batch).clone()
            if policy is None:
                return
            if number == 0:
                left_alone = _is_left_alone(policy, [*before.parameters()])
                trial.demand(left_alone, "the policy was modified")
                likeliest = policy.get_dist(steps.clone()).mode == steps["action"]
                greedy = bool(likeliest.all()) and len(steps) >= _ENOUGH_SAMPLES
                trial.demand(not greedy, "actions are the most likely actions, not samples")
            wanted = [_log_prob(module, steps) for module in (before, policy)]
            found = steps.get("action_log_prob", wanted[-1])
            good = [torch.allclose(found, w, rtol=_ROUNDING, atol=_ROUNDING) for w in wanted]
            what = f"action_log_prob is {found.tolist()}, but the policy's {wanted[-1].tolist()}"
            trial.demand(any(good), what)
            if number == 0:
                generator = torch.Generator().manual_seed(0)
                with torch.no_grad():
                    for w in policy.parameters():
                        w.add_(_WEIGHT_STD * torch.randn(w.shape, generator=generator).to(w.device))
                collector.update_policy_weights_()
    trial.demand(good[-1], "action_log_prob does not match the newest weights")
    likely = bool((wanted[-1] > _MIN_LOG_PROB).all())
    trial.demand(likely, "actions do not match the newest weights")


def _log_prob(policy: Any, steps: TensorDictBase) -> Tensor:
    with torch.no_grad():
        log_prob: Tensor = policy.get_dist(steps.clone()).log_prob(steps["action"])
        return log_prob


def _is_left_alone(policy: Any, weights: Sequence[Tensor]) -> bool:
    """Return whether a policy has the given weights and is otherwise unmodified."""
    parameters = [*policy.parameters()]
    trained = all(parameter.requires_grad for parameter in parameters)
    trained &= all(module.training for module in policy.modules())
    return trained and all(map(torch.equal, parameters, weights))


def _checkpoint(trial: CollectorUnderTest) -> None:
    """Check that a collector resumes bit by bit from a saved state, even within episodes.

    The state is loaded into a second collector, saved again and loaded into a third one. A saved
    state must not change when its collector continues.
    """
    half, seed = len(trial.whole.batches) // 2, trial.case.seed
    with (
        trial.create() as saving,
        trial.create(seed=seed + 50) as between,
        trial.create(seed=seed + 100) as resumed,
    ):
        iterator = iter(saving)
        before = [next(iterator).clone() for _ in range(half)]
        state = saving.state_dict()
        undisturbed = [*before, *[batch.clone() for batch in iterator]]
        between.load_state_dict(state)
        resumed.load_state_dict(_saved(between))
        exact = bool(getattr(resumed, "exact_resume", True))
        claimed = exact or not trial.exact_resume
        trial.demand(claimed, "does not resume exactly: exact_resume is false")
        batches = [*before, *[batch.clone() for batch in resumed]]
        restarted = 0 if exact else restart(batches, half)
        run = Run(batches, take_episodes(resumed), resumed, restarted)
    good = equal(undisturbed, trial.whole.batches)
    trial.demand(good, "saving changes later batches")
    (_check_exact if exact else _check_restarted)(trial, run)


def _saved(collector: Any) -> Any:
    """Return the state of a collector after saving and loading the state with torch."""
    file = io.BytesIO()
    torch.save(dict(collector.state_dict()), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _check_exact(trial: CollectorUnderTest, run: Run) -> None:
    """Check that a resumed run equals the uninterrupted run."""
    whole = trial.whole
    good = equal(whole.batches, run.batches)
    trial.demand(good, "batches differ after loading a saved state")
    for name in KitCollector._COUNTERS:
        counted = [getattr(r.collector, name, None) for r in (whole, run)]
        trial.demand(counted[0] == counted[1], f"{name} are {counted} (uninterrupted, resumed)")
    reported = whole.episodes, run.episodes
    trial.demand(reported[0] == reported[1], f"episodes are {reported} (uninterrupted, resumed)")


def _check_restarted(trial: CollectorUnderTest, run: Run) -> None:
    """Check a run that was restarted. Interrupted episodes must not be counted or reported."""
    for name, check in ONE_RUN.items():
        try:
            check(trial, run)
        except ConformanceError as broken:
            what = f"after a restart, {name}: {broken.what}"
            raise ConformanceError("checkpoint", trial.case, what) from broken


_SECONDS_TO_END = 5.0
"""Maximum time in seconds for threads to end."""


def _shutdown(trial: CollectorUnderTest) -> None:
    """Check that ``shutdown`` stops all processes and threads and prevents further collection."""
    # Complete a run first, because libraries keep some threads after their first use.
    trial.demand(bool(trial.whole.batches), "the collector returns no batch")
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
            trial.demand(False, "the collector still collects after shutdown")
    left: set[Any] = set(multiprocessing.active_children()) - processes
    trial.demand(not left, f"processes are left running: {left}")
    left = _left_in_time(lambda: set(threading.enumerate()) - threads)
    trial.demand(not left, f"threads are left running: {left}")
    left = _left_in_time(lambda: _threads_of_libraries() - others)
    trial.demand(not left, f"threads not started by Python are left running: {left}")


def _left_in_time(find: Callable[[], set[Any]]) -> set[Any]:
    """Call ``find`` until it returns an empty set or time runs out. Return the last set."""
    until = time.monotonic() + _SECONDS_TO_END
    while (left := find()) and time.monotonic() < until:
        time.sleep(0.01)
    return left


def _threads_of_libraries() -> set[int]:
    """Return the IDs of threads that Python did not start, if the system lists them."""
    tasks = Path("/proc/self/task")
    found = {int(task.name) for task in tasks.iterdir()} if tasks.exists() else set()
    return found - {thread.native_id for thread in threading.enumerate()}


_ENOUGH_SAMPLES = 10
"""Number of samples for which the probability of a false failure is below 1 in 10,000."""
_BATCHES_TO_FOLLOW = 5
"""Number of batches after which new weights must be in use."""
_WEIGHT_STD = 6.0
"""Standard deviation of weight noise; large, so that the new policy makes few actions likely."""
_MIN_LOG_PROB = -20.0
"""Minimum accepted log-probability. One in 500 million correct samples is below it."""
_ROUNDING = 1e-5
"""Tolerance for a float32 policy that sums in a different order."""

Check = Callable[[CollectorUnderTest], None]


def _check_whole_run(name: str, trial: CollectorUnderTest) -> None:
    ONE_RUN[name](trial, trial.whole)


COLLECTOR_CHECKS: dict[str, Check] = {
    **{name: functools.partial(_check_whole_run, name) for name in ONE_RUN},
    "seeds": _seeds,
    "plain": _plain,
    "random_numbers": _random_numbers,
    "random_actions": _random_actions,
    "memory": _memory,
    "policy": _policy,
    "checkpoint": _checkpoint,
    "shutdown": _shutdown,
}
"""Conformance checks for kit's collectors, keyed by name."""

TORCHRL_COLLECTOR_CHECKS = (
    "counts",
    "transitions",
    "continuity",
    "trajectories",
    "seeds",
    "shutdown",
)
"""Names of the checks that TorchRL's collectors also pass."""
