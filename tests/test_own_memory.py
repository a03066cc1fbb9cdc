"""Programs that keep the memory of small results: the same results by fewer operations."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.optim import Adam

from kit.fast import traced as traced_module
from kit.fast.executors import EXECUTORS
from kit.fast.memory import SMALL, with_own_memory
from kit.fast.trace import record
from kit.fast.traced import Traced
from kit.update import Update
from tests.losses import LOSSES, make_loss, minibatch_for
from tests.plain_steps import assert_same, state_of

READ_ON_THE_HOST = {"KLPENPPOLoss", "DistributionalDQNLoss"}


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


def gradients(network, x):
    """A function with the gradients of a network as one vector."""

    def function(given):
        with torch.enable_grad():
            found = torch.autograd.grad(network(given).pow(2).mean(), list(network.parameters()))
        whole = torch.cat([one.flatten() for one in found])
        return [whole * 2, torch.linalg.vector_norm(whole)]

    return with_memory(function, x)


def network(*widths):
    torch.manual_seed(0)
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*[one for pair in pairs for one in (nn.Linear(*pair), nn.ReLU())][:-1])


@pytest.mark.parametrize("executor", ["interpreter", "python"])
@pytest.mark.parametrize("widths", [(4, 64, 64, 2), (4, 16, 3, 16, 1), (3, 1)])
def test_gradients_are_computed_where_their_vector_is(executor, widths):
    recording, other, expected = gradients(network(*widths), numbers(32, widths[0]))
    for _ in range(2):
        found = EXECUTORS[executor](other)(numbers(32, widths[0]))
        assert all(map(torch.equal, found, expected))
    assert "aten.cat.default" in recording.operations
    assert "aten.cat.default" not in other.operations
    assert not {"aten.view.default", "aten.t.default"} & {*other.operations}


def test_memory_of_its_own_is_taken_apart_once():
    def function(x):
        first, second = torch.split(x * 2, [3, 5])
        return [first + 1, second.sum()]

    recording, other, expected = with_memory(function, numbers(8))
    assert all(map(torch.equal, EXECUTORS["interpreter"](other)(numbers(8)), expected))
    assert "aten.split_with_sizes.default" in recording.operations
    assert "aten.split_with_sizes.default" not in other.operations


def test_a_product_is_not_computed_where_it_might_be_rounded_otherwise():
    _, other, _ = gradients(network(4, 3, 16, 2), numbers(32, 4))  # 12, 3, 48, 16, 32, 2
    # What comes after the three numbers begins at no multiple of 64 bytes.
    assert other.operations.count("aten.copy_.default") == 2


def test_what_a_program_returns_is_new_in_every_call():
    def function(given):
        twice = given * 2
        return [twice, twice.sum(0).view(2, 2)]

    _, other, _ = with_memory(function, numbers(3, 4))
    run = EXECUTORS["interpreter"](other)
    first = run(numbers(3, 4))
    before = [one.clone() for one in first]
    run(numbers(3, 4) + 1)
    assert all(map(torch.equal, first, before))


def test_results_of_chance_are_left_alone():
    def function(given):
        return [torch.rand_like(given).exp().sum()]

    _, other, _ = with_memory(function, numbers(1, 2))
    assert {"aten.rand_like.default", "aten.exp_.default"} <= {*other.operations}


@pytest.mark.parametrize(("rows", "keeps"), [(SMALL // 8, True), (SMALL // 8 + 1, False)])
def test_a_program_with_a_large_result_keeps_no_memory(rows, keeps):
    with torch.no_grad():
        recording, _ = record(lambda given: [(given.cos() + 1).sum()], [numbers(rows, 2)])
    assert (with_own_memory(recording.graph, recording.constants) is not None) == keeps


def test_memory_that_nothing_reads_any_more_is_used_again():
    def function(given):
        for _ in range(9):
            given = given.cos()
        return [given.sum()]

    _, other, expected = with_memory(function, numbers(10))
    assert other.operations[:-1] == ["aten.cos.out"] * 9
    assert len({one.data_ptr() for one in other.constants}) == 2
    assert torch.equal(EXECUTORS["interpreter"](other)(numbers(10))[0], expected[0])


def test_writing_to_a_view_of_its_memory_is_seen_by_what_follows():
    def function(given):
        sums = given.cumsum(0)
        sums[0].fill_(5.0)
        sums.t().mul_(2)
        return [sums + 1]

    recording, other, expected = with_memory(function, numbers(3, 3))
    found = EXECUTORS["interpreter"](other)(numbers(3, 3))
    assert torch.equal(found[0], expected[0])
    assert len(other.operations) < len(recording.operations)


def test_memory_whose_shape_is_changed_in_place_is_left_alone():
    def function(given):
        return [(given * 2).unsqueeze_(0).add_(1).sum(0) + given.exp()]

    _, other, expected = with_memory(function, numbers(3))
    run = EXECUTORS["interpreter"](other)
    assert all(torch.equal(run(numbers(3))[0], expected[0]) for _ in range(3))
    assert {"aten.mul.Tensor", "aten.exp.out"} <= {*other.operations}


def test_parts_of_another_type_than_the_vector_are_converted():
    def function(given):
        double = given.double()
        return [torch.cat([double.cos(), double.sin(), given.exp()]).prod()]

    _, other, expected = with_memory(function, numbers(16))
    assert torch.equal(EXECUTORS["interpreter"](other)(numbers(16))[0], expected[0])
    assert [other.operations.count(f"aten.{name}.default") for name in ("copy_", "cat")] == [1, 0]


def test_a_program_whose_memory_makes_a_difference_does_without(monkeypatch):
    def wrong(graph, constants):
        copy, own = with_own_memory(graph, constants)
        doubled = next(node for node in copy.nodes if str(node.target) == "aten.mul.out")
        doubled.args = (doubled.args[0], 3)
        return copy, own

    monkeypatch.setattr(traced_module, "with_own_memory", wrong)
    call = Traced(lambda given: {"y": (given["x"] * 2).sum()}, name="it", read_only=True)
    assert [float(call({"x": torch.ones(4)})["y"]) for _ in range(4)] == [8.0] * 4
    assert (call.replays, call.reason) == (True, "")


@pytest.mark.parametrize("name", sorted(set(LOSSES) - READ_ON_THE_HOST))
def test_gradient_steps_keep_their_memory_and_are_bitwise_those_without(name, monkeypatch):
    states = []
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(traced_module._Program, "verify_memory", lambda *args: None)
        loss = make_loss(name)
        update = Update(loss, Adam(loss.parameters(), lr=0.01, fused=True), max_grad_norm=0.5)
        torch.manual_seed(0)
        for step in range(8):
            update(minibatch_for(name, seed=step))
        states.append(state_of(loss))
        (program,) = [
            p for t in update._traced.values() for p in t._programs.values() if p.verified
        ]
        assert (program._run is program._in_own_memory) == keeps
    assert_same(*states)
