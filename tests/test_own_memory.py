"""Programs that keep the memory of small results: the same results by fewer operations."""

from __future__ import annotations

import pytest
import torch

from kit.fast import program as traced_module
from kit.fast.executors import EXECUTORS
from kit.fast.memory import SMALL, with_own_memory
from kit.fast.trace import record
from kit.fast.traced import Traced


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def with_memory(function, *inputs):
    """The recording of a function, the same with memory of its own, and what it returned."""
    with torch.no_grad():
        recording, expected = record(function, inputs)
        expected = [one.clone() for one in expected]
        recording.restore()
    other = recording.__class__.__new__(recording.__class__)
    other.__dict__.update(vars(recording))
    other.graph, other.constants = with_own_memory(recording.graph, recording.constants)
    return recording, other, expected


def test_split_of_preallocated_buffer_is_computed_once():
    def function(x):
        first, second = torch.split(x * 2, [3, 5])
        return [first + 1, second.sum()]

    recording, other, expected = with_memory(function, numbers(8))
    assert all(map(torch.equal, EXECUTORS["interpreter"](other)(numbers(8)), expected))
    assert "aten.split_with_sizes.default" in recording.operations
    assert "aten.split_with_sizes.default" not in other.operations


def test_outputs_are_new_tensors_in_every_call():
    def function(given):
        twice = given * 2
        return [twice, twice.sum(0).view(2, 2)]

    _, other, _ = with_memory(function, numbers(3, 4))
    run = EXECUTORS["interpreter"](other)
    first = run(numbers(3, 4))
    before = [one.clone() for one in first]
    run(numbers(3, 4) + 1)
    assert all(map(torch.equal, first, before))


def test_random_results_are_not_preallocated():
    def function(given):
        return [torch.rand_like(given).exp().sum()]

    _, other, _ = with_memory(function, numbers(1, 2))
    assert {"aten.rand_like.default", "aten.exp_.default"} <= {*other.operations}


@pytest.mark.parametrize(("rows", "keeps"), [(SMALL // 8, True), (SMALL // 8 + 1, False)])
def test_large_result_disables_preallocation(rows, keeps):
    with torch.no_grad():
        recording, _ = record(lambda given: [(given.cos() + 1).sum()], [numbers(rows, 2)])
    assert (with_own_memory(recording.graph, recording.constants) is not None) == keeps


def test_buffers_are_reused_after_last_read():
    def function(given):
        for _ in range(9):
            given = given.cos()
        return [given.sum()]

    _, other, expected = with_memory(function, numbers(10))
    assert other.operations[:-1] == ["aten.cos.out"] * 9
    assert len({one.data_ptr() for one in other.constants}) == 2
    assert torch.equal(EXECUTORS["interpreter"](other)(numbers(10))[0], expected[0])


def test_writes_to_buffer_views_reach_later_operations():
    def function(given):
        sums = given.cumsum(0)
        sums[0].fill_(5.0)
        sums.t().mul_(2)
        return [sums + 1]

    recording, other, expected = with_memory(function, numbers(3, 3))
    found = EXECUTORS["interpreter"](other)(numbers(3, 3))
    assert torch.equal(found[0], expected[0])
    assert len(other.operations) < len(recording.operations)


def test_results_reshaped_in_place_are_not_preallocated():
    def function(given):
        return [(given * 2).unsqueeze_(0).add_(1).sum(0) + given.exp()]

    _, other, expected = with_memory(function, numbers(3))
    run = EXECUTORS["interpreter"](other)
    assert all(torch.equal(run(numbers(3))[0], expected[0]) for _ in range(3))
    assert {"aten.mul.Tensor", "aten.exp.out"} <= {*other.operations}


def test_traced_drops_preallocation_when_results_differ(monkeypatch):
    def wrong(graph, constants):
        copy, own = with_own_memory(graph, constants)
        doubled = next(node for node in copy.nodes if str(node.target) == "aten.mul.out")
        doubled.args = (doubled.args[0], 3)
        return copy, own

    monkeypatch.setattr(traced_module, "with_own_memory", wrong)
    call = Traced(lambda given: {"y": (given["x"] * 2).sum()}, name="it", read_only=True)
    assert [float(call({"x": torch.ones(4)})["y"]) for _ in range(4)] == [8.0] * 4
    assert (call.replays, call.reason) == (True, "")
