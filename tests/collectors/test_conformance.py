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
def test_a_kind_in_this_process_keeps_every_promise(kind):
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
def test_a_kind_keeps_every_promise_to_a_policy_with_a_memory(kind, monkeypatch):
    monkeypatch.setattr(kinds, "counter_policy", recurrent_policy)
    assert check_collector(KINDS[kind], cases=ONE_CASE) == list(COLLECTOR_CHECKS)


@pytest.mark.parametrize("kind", list(CARTPOLE_KINDS))
def test_a_kind_keeps_every_promise_in_cartpole(kind):
    assert check_collector(CARTPOLE_KINDS[kind], world=CARTPOLE) == list(COLLECTOR_CHECKS)


@pytest.mark.parametrize("kind", list(REPEATING_KINDS))
def test_a_kind_keeps_every_promise_where_actions_are_repeated(kind):
    assert check_collector(REPEATING_KINDS[kind], world=REPEATING) == list(COLLECTOR_CHECKS)


def test_the_asynchronous_kind_counts_where_actions_are_repeated():
    def make(case):
        return asynchronous(case, REPEATING.env(case))

    promises = ["counts", "transitions", "continuity", "reports"]
    check_collector(make, world=REPEATING, promises=promises, cases=ONE_CASE)


@pytest.mark.parametrize("kind", list(ENVPOOL_KINDS))
def test_a_kind_on_envpool_keeps_every_promise_but_that_a_saved_run_goes_on_exactly(kind):
    pytest.importorskip("envpool")
    make = ENVPOOL_KINDS[kind]
    assert check_collector(make, world=CARTPOLE, exact_resume=False) == list(COLLECTOR_CHECKS)
    with pytest.raises(ConformanceError, match=r"^checkpoint: does not resume exactly"):
        check_collector(make, world=CARTPOLE, promises=["checkpoint"])


@pytest.mark.parametrize("kind", ["vector, async", "episode, async"])
def test_a_kind_with_worker_processes_keeps_every_promise(kind):
    assert check_collector(KINDS[kind], cases=ONE_CASE) == list(COLLECTOR_CHECKS)


@pytest.mark.guard
def test_the_asynchronous_kind_keeps_the_promises_that_are_hardest_for_it():
    promises = ["transitions", "checkpoint", "shutdown"]
    assert check_collector(asynchronous, promises=promises, cases=ONE_CASE) == promises


@pytest.mark.nightly
def test_the_asynchronous_kind_on_envpool_begins_anew_after_the_batches_that_were_under_way():
    pytest.importorskip("envpool")
    cases, promises = CARTPOLE.cases[2:], ["counts", "checkpoint", "shutdown"]
    settings = {"world": CARTPOLE, "cases": cases, "promises": promises, "exact_resume": False}
    assert check_collector(asynchronous_on_envpool, **settings) == promises


@pytest.mark.nightly
@pytest.mark.parametrize("kind", IN_PROCESSES)
def test_a_kind_in_processes_keeps_every_promise_at_all_sizes(kind):
    assert check_collector(KINDS[kind]) == list(COLLECTOR_CHECKS)


@pytest.mark.parametrize("kind", list(TORCHRL_KINDS))
def test_a_collector_of_torchrl_keeps_the_promises_that_torchrl_makes(kind):
    assert check_collector(TORCHRL_KINDS[kind], promises=TORCHRL_COLLECTOR_CHECKS)


@pytest.mark.parametrize("make", [vector, tensor])
def test_a_batch_can_be_a_single_policy_step_or_longer_than_many_episodes(make):
    sizes = [
        CollectorCase(num_envs=5, steps_per_env=1),
        CollectorCase(num_envs=1, steps_per_env=50),
    ]
    check_collector(make, cases=sizes)


@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_exactly_n_episodes_keep_every_promise_but_the_number_of_steps(layout):
    def make(case):
        return episodes(case, min_episodes=5, layout=layout)

    others = [name for name in COLLECTOR_CHECKS if name not in ("counts", "checkpoint")]
    check_collector(make, promises=others, cases=[CollectorCase(batches=9)])
