"""Large matrix products by oneDNN: which, how near, and from the first call on."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.optim import Adam
from torchrl.objectives import LossModule

from kit.fast import products
from kit.fast import traced as traced_module
from kit.fast.executors import EXECUTORS
from kit.fast.products import LARGE, with_fast_products
from kit.fast.trace import record
from kit.fast.traced import Traced
from kit.update import Update
from tests.plain_steps import assert_same, state_of

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"
)
aten = torch.ops.aten
ONEDNN = "mkldnn._linear_pointwise.default"
ROWS, WIDTH = 128, 128
assert ROWS * WIDTH * WIDTH >= LARGE


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """As on a processor that multiplies faster by oneDNN."""
    monkeypatch.setattr(traced_module, "are_faster", lambda: True)


@pytest.fixture
def otherwise(monkeypatch):
    """Products that differ from PyTorch's on any processor: oneDNN may round alike."""
    product = products._pointwise

    def larger(graph, *operands):
        node = graph.call_function(aten.mul.Tensor, (product(graph, *operands), 1.001))
        node.meta = {"dtype": torch.float32}
        return node

    monkeypatch.setattr(products, "_pointwise", larger)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# ---------------------------------------------------------------------- which products
PRODUCTS = {
    "outputs": (lambda x, w, b: torch.addmm(b, x, w.t()), (256, 23), (256, 23), (256,)),
    "without bias": (lambda x, w: x @ w.t(), (128, 128), (128, 128)),
    "gradient of inputs": (lambda g, w: g @ w, (256, 256), (256, 23)),
    "gradient of weights": (lambda g, x: g.t() @ x, (256, 256), (256, 128)),
    "gradient of weights of few inputs": (lambda g, x: g.t() @ x, (256, 256), (256, 23)),
    "both turned": (lambda x, y: x.t() @ y.t(), (128, 256), (128, 128)),
    "an ensemble's outputs": (lambda x, w: torch.bmm(x, w.mT), (3, 128, 128), (3, 128, 128)),
    "an ensemble's one input": (
        lambda x, w: torch.bmm(x.expand(3, -1, -1), w.mT), (256, 23), (3, 256, 23),
    ),
    "an ensemble's gradients": (
        lambda g, x: torch.bmm(g.mT, x), (2, 256, 256), (2, 256, 23),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(PRODUCTS))
@pytest.mark.parametrize("executor", ["interpreter", "python"])
def test_large_products_use_onednn_in_same_layout(name, executor):
    function, *shapes = PRODUCTS[name]
    inputs = [numbers(*shape) for shape in shapes]
    recording, expected = record(lambda *given: [function(*given)], inputs)
    graph = with_fast_products(recording.graph)
    other = copy.copy(recording)
    other.graph = graph
    assert ONEDNN in other.operations
    assert not {"aten.mm.default", "aten.bmm.default", "aten.addmm.default"} & {*other.operations}
    assert ONEDNN not in recording.operations
    found = EXECUTORS[executor](other)(*inputs)
    assert found[0].stride() == expected[0].stride()
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)


LEFT_ALONE = {
    "small": (lambda x, w: x @ w.t(), (64, 64), (64, 64)),
    "of double precision": (lambda x, w: (x.double() @ w.double().t()).float(), *[(256, 256)] * 2),
    "a matrix is added": (lambda x, w: torch.addmm(x, x, w), (256, 256), (256, 256)),
    "with factors": (lambda x, w: torch.addmm(x[0], x, w, beta=2.0), (256, 256), (256, 256)),
}


@pytest.mark.parametrize("name", list(LEFT_ALONE))
def test_other_products_stay_unchanged(name):
    function, *shapes = LEFT_ALONE[name]
    recording, _ = record(lambda *given: [function(*given)], [numbers(*s) for s in shapes])
    assert with_fast_products(recording.graph) is None


# ---------------------------------------------------------------------- from the first call on
class Layer(nn.Module):
    """A product that is large, random numbers, and a counter of calls."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, given):
        self.calls += 1
        x = given["x"]
        return {"y": self.layer(x), "noise": torch.randn(2), "calls": self.calls.clone()}


def fast(module, **settings):
    return Traced(module, module, name="", fast_products=True, **settings)


def test_traced_calls_round_alike_and_draw_like_eager_calls(otherwise):
    torch.manual_seed(0)
    module = Layer()
    eager, act, given = copy.deepcopy(module), fast(module), {"x": numbers(ROWS, WIDTH)}
    torch.manual_seed(1)
    found = [act(given) for _ in range(4)]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    expected = [eager(given) for _ in range(4)]
    assert act.replays
    assert torch.equal(state, torch.get_rng_state())
    for one, other in zip(found, expected):
        assert torch.equal(one["y"], found[0]["y"])  # whether recorded, verified or replayed
        assert not torch.equal(one["y"], other["y"])
        assert torch.equal(one["noise"], other["noise"])
        assert torch.equal(one["calls"], other["calls"])
    assert not any(value.is_inference() for one in found for value in one.values())


def test_traced_rounds_alike_after_many_input_shapes(otherwise):
    torch.manual_seed(0)
    module = Layer()
    act, whole = fast(module), numbers(2 * ROWS, WIDTH)
    first = fast(module)({"x": whole[:ROWS]})["y"]
    for rows in range(ROWS + 1, ROWS + 41):
        act({"x": whole[:rows]})
    assert not act.reason
    assert torch.equal(act({"x": whole[:ROWS]})["y"], first)


class Growing(Layer):
    """Its first calls change its own attributes, or every one does."""

    def __init__(self, changes):
        super().__init__()
        self.changes, self.called = changes, 0

    def forward(self, given):
        self.called = min(self.called + 1, self.changes)
        return super().forward(given)


@pytest.mark.filterwarnings("error:.*runs eagerly")
@pytest.mark.parametrize("changes", [1, 2, 100])
def test_traced_rounds_alike_when_calls_change_module(changes, otherwise):
    torch.manual_seed(0)
    module, given = Growing(changes), {"x": numbers(ROWS, WIDTH)}
    act = fast(module)
    found = [act(given) for _ in range(7)]
    assert act.replays == (changes < 100)
    assert [int(one["calls"]) for one in found] == [*range(1, 8)]
    assert all(torch.equal(one["y"], found[0]["y"]) for one in found)


def test_traced_rounds_alike_when_module_changes_between_calls(otherwise):
    torch.manual_seed(0)
    module, given = Layer(), {"x": numbers(ROWS, WIDTH)}
    act, found = fast(module), []
    for value in range(30):
        module.coefficient = value
        act.refresh()
        found.append(act(given)["y"])
    assert all(torch.equal(one, found[0]) for one in found)


def test_traced_uses_pytorch_products_when_host_reads_tensor():
    module = nn.Linear(WIDTH, WIDTH)
    x = numbers(ROWS, WIDTH)

    def decides(given):
        y = module(given["x"])
        return {"y": y if y.sum() > 0 else 2 * y}

    act = fast(decides)
    assert torch.equal(act({"x": x})["y"], decides({"x": x})["y"])
    assert "reads a tensor on the host" in act.reason


# ---------------------------------------------------------------------- gradient steps
class Regression(LossModule):
    """Squared errors of a network with one large layer."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.in_keys, self.out_keys = ["x", "y"], ["loss"]

    def forward(self, minibatch):
        output = self.network(minibatch.select("x"))["output"]
        return TensorDict({"loss": (output - minibatch["y"]).square().mean()})


def updates(compile):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    loss = Regression(TensorDictModule(network, ["x"], ["output"]))
    optimizer = Adam(loss.parameters(), lr=1e-3, fused=True)
    return Update(loss, optimizer, compile=compile), loss, optimizer


def minibatch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return TensorDict({"x": x, "y": x[:, :1].sin()}, [ROWS])


def steps(update, numbers):
    for step in numbers:
        update(minibatch(step))


def test_compile_exact_equals_eager_and_auto_is_close():
    states = {}
    for compile in ("auto", "exact", False):
        update, loss, optimizer = updates(compile)
        steps(update, range(6))
        states[compile] = state_of(loss, optimizer)
    assert_same(states["exact"], states[False])
    update, loss, _ = updates("auto")
    steps(update, range(6))
    exact, exact_loss, _ = updates("exact")
    steps(exact, range(6))
    for one, other in zip(loss.parameters(), exact_loss.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_resumed_update_rounds_like_uninterrupted_update(at, otherwise):
    update, loss, optimizer = updates("auto")
    steps(update, range(6))
    assert any(
        program.rounds_otherwise
        for traced in update.traced_step.traced.values()
        for program in traced._programs.values()
    )
    killed, killed_loss, killed_optimizer = updates("auto")
    steps(killed, range(at))
    resumed, resumed_loss, resumed_optimizer = updates("auto")
    resumed_loss.load_state_dict(killed_loss.state_dict())
    resumed_optimizer.load_state_dict(copy.deepcopy(killed_optimizer.state_dict()))
    steps(resumed, range(at, 6))
    assert_same(state_of(loss, optimizer), state_of(resumed_loss, resumed_optimizer))
