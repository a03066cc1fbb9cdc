"""Every kind of collector keeps every promise."""

from __future__ import annotations

import pytest

from kit.testing import (
    CARTPOLE,
    COLLECTOR_CHECKS,
    REPEATING,
    TORCHRL_COLLECTOR_CHECKS,
    CollectorCase,
    ConformanceError,
    check_collector,
    recurrent_policy,
)
from tests.collectors import kinds
from tests.collectors.kinds import (
    CARTPOLE_KINDS,
    ENVPOOL_KINDS,
    KINDS,
    REPEATING_KINDS,
    TORCHRL_KINDS,
    asynchronous,
    asynchronous_on_envpool,
    episodes,
    tensor,
    vector,
)

IN_PROCESSES = ("vector, async", "episode, async", "async")
"""Kinds that start processes, which takes seconds each time; the fast suite does so once a kind."""
ONE_CASE = (CollectorCase(batches=3),)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in IN_PROCESSES])
def test_in_process_collector_passes_all_checks(kind):
    assert check_collector(KINDS[kind]) == list(COLLECTOR_CHECKS)


@pytest.mark.parametrize(
    "make", [vector, tensor, episodes, pytest.param(asynchronous, marks=pytest.mark.nightly)]
)
def test_collector_calls_its_hooks(make):
    calls: list = []
    pre, post = lambda: calls.append("pre"), calls.append
    collector = make(CollectorCase(batches=2), pre_collect_hook=pre, post_collect_hook=post)
    first, second = list(collector)
    collector.shutdown()
    assert calls[::2] == ["pre", "pre"]
    assert calls[1] is first
    assert calls[3] is second


@pytest.mark.guard
@pytest.mark.parametrize("kind", ["vector, sync", "vector, torch", "tensor", "episode"])
def test_collector_passes_all_checks_with_recurrent_policy(kind, monkeypatch):
    monkeypatch.setattr(kinds, "counter_policy", recurrent_policy)
    assert check_collector(KINDS[kind], cases=ONE_CASE) == list(COLLECTOR_CHECKS)


@pytest.mark.parametrize("kind", list(CARTPOLE_KINDS))
def test_collector_passes_all_checks_on_cartpole(kind):
    assert check_collector(CARTPOLE_KINDS[kind], world=CARTPOLE) == list(COLLECTOR_CHECKS)


@pytest.mark.parametrize("kind", list(REPEATING_KINDS))
def test_collector_passes_all_checks_with_action_repeat(kind):
    assert check_collector(REPEATING_KINDS[kind], world=REPEATING) == list(COLLECTOR_CHECKS)


def test_async_collector_counts_steps_with_action_repeat():
    def make(case):
        return asynchronous(case, REPEATING.env(case))

    promises = ["counts", "transitions", "continuity", "reports"]
    check_collector(make, world=REPEATING, promises=promises, cases=ONE_CASE)


@pytest.mark.parametrize("kind", list(ENVPOOL_KINDS))
def test_envpool_collector_passes_all_checks_but_exact_resume(kind):
    pytest.importorskip("envpool")
    make = ENVPOOL_KINDS[kind]
    assert check_collector(make, world=CARTPOLE, exact_resume=False) == list(COLLECTOR_CHECKS)
    with pytest.raises(ConformanceError, match=r"^checkpoint: does not resume exactly"):
        check_collector(make, world=CARTPOLE, promises=["checkpoint"])


@pytest.mark.parametrize("kind", ["vector, async", "episode, async"])
def test_collector_with_worker_processes_passes_all_checks(kind):
    assert check_collector(KINDS[kind], cases=ONE_CASE) == list(COLLECTOR_CHECKS)


@pytest.mark.guard
def test_async_collector_passes_hardest_checks():
    promises = ["transitions", "checkpoint", "shutdown"]
    assert check_collector(asynchronous, promises=promises, cases=ONE_CASE) == promises


@pytest.mark.nightly
def test_async_envpool_restarts_episodes_after_pending_batches():
    pytest.importorskip("envpool")
    cases, promises = CARTPOLE.cases[2:], ["counts", "checkpoint", "shutdown"]
    settings = {"world": CARTPOLE, "cases": cases, "promises": promises, "exact_resume": False}
    assert check_collector(asynchronous_on_envpool, **settings) == promises


@pytest.mark.nightly
@pytest.mark.parametrize("kind", IN_PROCESSES)
def test_multiprocess_collector_passes_all_checks_at_all_sizes(kind):
    assert check_collector(KINDS[kind]) == list(COLLECTOR_CHECKS)


@pytest.mark.parametrize("kind", list(TORCHRL_KINDS))
def test_torchrl_collector_passes_torchrl_checks(kind):
    assert check_collector(TORCHRL_KINDS[kind], promises=TORCHRL_COLLECTOR_CHECKS)


@pytest.mark.parametrize("make", [vector, tensor])
def test_collector_passes_checks_with_extreme_batch_lengths(make):
    sizes = [
        CollectorCase(num_envs=5, steps_per_env=1),
        CollectorCase(num_envs=1, steps_per_env=50),
    ]
    check_collector(make, cases=sizes)


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_min_episodes_collector_passes_checks_but_step_counts(layout):
    def make(case):
        return episodes(case, min_episodes=5, layout=layout)

    others = [name for name in COLLECTOR_CHECKS if name not in ("counts", "checkpoint")]
    check_collector(make, promises=others, cases=[CollectorCase(batches=9)])
