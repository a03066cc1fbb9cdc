"""What functions enclose, are bound to and name is noticed when it changes, as attributes are."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from kit.fast.traced import Traced

SCALE = 1.0
SCALES = {"now": 1.0}


def scaled(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * (scale * SCALE * SCALES["now"])


class Agent:
    """A policy in a class of its own."""

    def __init__(self) -> None:
        self.scale, self.network = 1.0, nn.Dropout(0.0)

    def act(self, x: Tensor) -> Tensor:
        return self.network(x) * self.scale


class Ledger:
    """A counter behind a property, as the trainer's policy steps are."""

    def __init__(self) -> None:
        self.count = 1.0

    @property
    def scale(self) -> float:
        return self.count


class OfLedger(nn.Module):
    """Reads an attribute of an object of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = SimpleNamespace(ledger=Ledger(), scales={"now": 1.0})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.owner.ledger.scale * self.owner.scales["now"]


class OfGlobals(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return next(scaled(one) for one in (x,))


def functions() -> dict[str, tuple[Any, Any]]:
    """Functions, and what doubles their results."""
    enclosed, doubled = {"scale": 1.0}, {"scale": 2.0}
    number, agent, other = 1.0, Agent(), Agent()
    keywords = {"scale": 1.0}
    partial = functools.partial(scaled, **keywords)

    def by_number(x: Tensor) -> Tensor:
        return x * number

    def of_number() -> None:
        nonlocal number
        number = 2.0

    decorated, counting, other_counting = nn.Identity(), OfLedger(), OfLedger()
    decorated.forward = torch.no_grad()(lambda x: x * enclosed["scale"])
    in_a_module = TensorDictModule(lambda x: x * enclosed["scale"], ["x"], ["y"])
    in_an_attribute = nn.Identity()
    in_an_attribute.scaled = by_number

    def globally() -> None:
        SCALES["now"] = 2.0

    def by_name() -> None:
        globals()["SCALE"] = 2.0

    return {
        "an entry that is enclosed": (
            lambda x: x * enclosed["scale"], lambda: enclosed.update(doubled)
        ),
        "a number that is enclosed": (by_number, of_number),
        "an attribute of its owner": (agent.act, lambda: vars(agent).update(doubled)),
        "a module of its owner": (other.act, lambda: vars(other).update(network=Double())),
        "a partial argument": (partial, lambda: partial.keywords.update(doubled)),
        "an entry of a global": (scaled, globally),
        "a global of another function": (lambda x: scaled(x), by_name),
        "a global of a module": (OfGlobals(), by_name),
        "a function in a module": (
            lambda x: in_a_module(TensorDict({"x": x}))["y"], lambda: enclosed.update(doubled)
        ),
        "a decorated function in a module": (decorated, lambda: enclosed.update(doubled)),
        "a property of an object of an object": (
            counting, lambda: vars(counting.owner.ledger).update(count=2.0)
        ),
        "an entry of an object of a module": (
            other_counting, lambda: other_counting.owner.scales.update(now=2.0)
        ),
        "a function in an attribute": (lambda x: in_an_attribute.scaled(x), of_number),
    }  # fmt: skip


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("used", functions())
def test_traced_detects_changed_function_dependencies(used, monkeypatch):
    monkeypatch.setitem(SCALES, "now", 1.0)
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    function, change = functions()[used]
    call, x = Traced(lambda given: {"y": function(given["x"])}, function, name="it"), torch.ones(2)
    found = [call({"x": x})["y"] for _ in range(3)][-1]
    assert not call.refresh()
    change()
    assert call.refresh()
    assert torch.equal(call({"x": x})["y"], 2 * found)


def test_traced_calls_hooks_of_enclosed_module():
    network, called = nn.Linear(2, 1), []
    call = Traced(lambda given: {"y": network(given["x"])}, lambda: network, name="")
    network.register_forward_hook(lambda *given: called.append(given))
    for _ in range(4):
        call({"x": torch.ones(2)})
    assert len(called) == 4
