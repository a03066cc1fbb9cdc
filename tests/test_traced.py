"""Functions of tensors that are recorded, verified once, and replayed without Python."""

from __future__ import annotations

import collections
import contextlib
import enum
import random
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.testing import assert_close

from kit.fast import executors
from kit.fast.trace import TraceError, record
from kit.fast.traced import Traced
from kit.fast.watch import Watch

ON_THE_CPU = ("interpreter", "python", "cudagraph")


class Noisy(nn.Module):
    """Everything a program has to repeat: parameters, running statistics, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x) + torch.randn(2))


def traced(module: nn.Module, **settings) -> Traced:
    return Traced(lambda given: {"y": module(given["x"])}, module, name="the module", **settings)


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


# ---------------------------------------------------------------------- the same results
@pytest.mark.parametrize("executor", ON_THE_CPU)
def test_traced_call_matches_eager_call_bitwise(executor):
    ours, theirs = Noisy(), Noisy()
    call = traced(ours, executor=executor)
    for step in range(6):
        x = torch.randn(5, 3)
        torch.manual_seed(step)
        found, after = call({"x": x})["y"], torch.get_rng_state()
        torch.manual_seed(step)
        assert torch.equal(found, theirs(x))
        assert torch.equal(after, torch.get_rng_state())
        for one, other in zip(ours.state_dict().values(), theirs.state_dict().values()):
            assert torch.equal(one, other)
    assert (call.replays, call.executor, call.reason) == (True, executor, "")


@pytest.mark.parametrize("executor", ON_THE_CPU)
def test_traced_call_writes_to_inputs_once(executor):
    def add(given):
        given["rows"][1].add_(given["x"])
        return {"sum": given["rows"].sum()}

    call, rows = Traced(add, name="add", executor=executor), torch.zeros(2, 3)
    for step in range(1, 6):
        total = call({"rows": rows, "x": torch.ones(3)})["sum"]
        assert (rows.tolist(), float(total)) == ([[0.0] * 3, [float(step)] * 3], 3.0 * step)


# ---------------------------------------------------------------------- inputs
def test_traced_ignores_added_or_removed_unread_inputs():
    call = traced(nn.Linear(3, 2))
    for extra in ({}, {"z": torch.ones(1)}, {"a": torch.ones(2)}, {}):
        call({"x": torch.ones(1, 3), **extra})
    assert (call.programs, call.keys_read) == (1, ["x"])


OPTIONAL = {
    "asked for": lambda batch: batch.get("weight", None),
    "looked for": lambda batch: batch["weight"] if "weight" in batch.keys() else None,
    "nested": lambda batch: batch.get(("next", "weight"), None),
    "of a selection": lambda batch: batch.select("weight", strict=False).get("weight", None),
}


@pytest.mark.parametrize("how", OPTIONAL)
def test_traced_reads_optional_input_added_later(how):
    def weighted(batch):
        weight = OPTIONAL[how](batch)
        return {"y": batch["x"] if weight is None else batch["x"] * weight}

    call = Traced(weighted, name="weighted")
    for step in range(12):
        batch = TensorDict({"x": torch.ones(2), "next": TensorDict({"x": torch.ones(2)}, [2])}, [2])
        if step // 4 == 1:
            batch["weight"] = batch["next", "weight"] = torch.full((2,), 3.0)
        assert call(batch)["y"].tolist() == [3.0 if step // 4 == 1 else 1.0] * 2
    assert (call.programs, call.replays) == (2, True)


def test_traced_records_one_graph_per_layout():
    def strided(given):
        x = given["x"]
        return {"flat": x.reshape(-1) * 1, "own": torch.as_strided(x, (2, 2), x.stride()) * 1}

    call = Traced(strided, name="strided")
    for step in range(10):
        x = torch.arange(9.0).view(3, 3)
        x = x.t() if step % 5 > 2 else x
        found, expected = call({"x": x}), strided({"x": x})
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert (call.programs, call.replays) == (2, True)


def test_traced_call_leaves_input_tensordict_unchanged():
    def double(given):
        given["out"] = given["next", "x"] * 2
        return {"out": given["out"]}

    call = Traced(double, name="double")
    for step in range(4):
        batch = TensorDict({"next": {"x": torch.full((2,), float(step))}, "words": "text"}, [2])
        assert call(batch)["out"].tolist() == [2.0 * step] * 2
        assert set(batch.keys()) == {"next", "words"}
    assert call.keys_read == [("next", "x")]


def test_traced_accepts_aliased_inputs_that_later_differ():
    call = Traced(lambda given: {"d": given["a"] - given["b"]}, name="difference")
    same = torch.ones(2)
    for _ in range(3):
        assert call({"a": same, "b": same})["d"].tolist() == [0.0, 0.0]
    assert call({"a": same, "b": same + 1})["d"].tolist() == [-1.0, -1.0]


# ---------------------------------------------------------------------- changes
class Sign(enum.Enum):
    PLUS, MINUS = 1.0, -1.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.gain = 1.0, np.float64(1.0)
        self.mode, self.sign = None, Sign.PLUS
        self.factors, self.shifts = [1.0], {"one": 0.0}
        self.body = nn.Linear(3, 3)
        self.offset = nn.Parameter(torch.zeros(()))
        self.steps = nn.ModuleList()
        self.register_buffer("bound", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.steps:
            x = module(x)
        x = x * self.gain * self.factors[0] * self.sign.value + self.shifts["one"] + self.offset
        y = self.body(x).clamp(-float(self.bound), float(self.bound)) * self.scale
        return y if getattr(self, "mode", None) is None else -y * getattr(self, "more", 1.0)


CHANGES = {
    "a plain number": lambda module: setattr(module, "scale", 3.0),
    "a number of NumPy": lambda module: setattr(module, "gain", np.float64(3.0)),
    "a choice that was none": lambda module: setattr(module, "mode", "negative"),
    "a choice of an enumeration": lambda module: setattr(module, "sign", Sign.MINUS),
    "a list in place of another": lambda module: setattr(module, "factors", [2.0]),
    "an entry of a list": lambda module: module.factors.__setitem__(0, 2.0),
    "an entry of a dictionary": lambda module: module.shifts.__setitem__("one", 2.0),
    "a parameter object": lambda module: setattr(
        module.body, "weight", nn.Parameter(torch.ones(3, 3))
    ),
    "a parameter of one number that is equal": lambda module: setattr(
        module, "offset", nn.Parameter(module.offset.clone())
    ),
    "a parameter that does without gradients": lambda module: module.body.requires_grad_(False),
    "a submodule in place of another": lambda module: setattr(module, "body", nn.Linear(3, 3)),
    "a submodule more": lambda module: module.steps.append(nn.Tanh()),
    "a number that was read on the host": lambda module: module.bound.fill_(0.1),
    "data of a number that was read on the host": lambda module: module.bound.data.fill_(0.1),
    "other data of a number that was read on the host": lambda module: setattr(
        module.bound, "data", torch.tensor(0.1)
    ),
    "memory of a parameter that is transposed": lambda module: setattr(
        module.body.weight, "data", torch.ones(3, 3)
    ),
}  # fmt: skip


class Outside(Scaled):
    """A module whose body is an attribute, as the networks of TorchRL's losses are."""

    def __init__(self) -> None:
        super().__init__()
        body = self._modules.pop("body")
        self.__dict__["body"] = nn.Sequential(body, nn.Dropout(0.0))


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module.body[1], "p", 1.0),
        lambda module: module.body.eval(),
        lambda module: module.body[0].register_forward_hook(lambda *call: call[2] * 2),
        lambda module: setattr(module.body[0], "weight", nn.Parameter(torch.ones(3, 3))),
    ],
    ids=["a number", "its mode", "a hook", "a parameter"],
)
def test_refresh_detects_changes_in_unregistered_module(change):
    module = Outside()
    call = traced(module)
    for step in range(8):
        if step == 4:
            change(module)
        assert call.refresh() == (step == 4)
        x = torch.randn(2, 3)
        assert torch.equal(call({"x": x})["y"], module(x))


class Hides(nn.Module):
    """A module with another in a container, whose parameters are none of its own."""

    def __init__(self, others) -> None:
        super().__init__()
        self.others = others

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0](x)


@pytest.mark.parametrize("kind", [lambda one: [one], lambda one: (one,), lambda one: {0: one}])
def test_refresh_detects_changes_in_module_inside_container(kind):
    dropout = nn.Dropout(0.5)
    module = Hides(kind(dropout))
    call = traced(module)
    for step in range(8):
        if step == 4:
            dropout.eval()
        assert call.refresh() == (step == 4)
        x, numbers = torch.randn(2, 3), torch.get_rng_state()
        found = call({"x": x})["y"]
        torch.set_rng_state(numbers)
        assert torch.equal(found, module(x))


def test_refresh_detects_changed_class_attribute():
    class Halves(nn.Module):
        share = 0.5

        def forward(self, x: Tensor) -> Tensor:
            return x * self.share

    module = Halves()
    call = traced(module)
    for step in range(8):
        if step == 4:
            Halves.share = 0.25
        assert call.refresh() == (step == 4)
        assert call({"x": torch.ones(2)})["y"].tolist() == [Halves.share] * 2


@pytest.mark.parametrize("change", CHANGES)
def test_refresh_detects_changes_in_module(change):
    module = Scaled()
    call = traced(module)
    for step in range(8):
        if step == 4:
            CHANGES[change](module)
        assert call.refresh() == (step == 4)
        x = torch.randn(2, 3)
        assert torch.equal(call({"x": x})["y"], module(x))
    assert call.reason == ""


HOOKS = {
    "before a module": lambda body, hook: body.register_forward_pre_hook(hook),
    "after a module": lambda body, hook: body.register_forward_hook(hook),
    "after all modules": lambda body, hook: register_module_forward_hook(hook),
    "of a module's gradients": lambda body, hook: body.register_full_backward_hook(hook),
    "of a parameter's gradient": lambda body, hook: body.weight.register_hook(hook),
    "after a parameter's gradient": lambda body, hook: (
        body.weight.register_post_accumulate_grad_hook(hook)
    ),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_traced_runs_eagerly_when_module_has_hooks(kind):
    module, calls, present = Scaled(), set(), [0]

    def gradient(given):
        module.zero_grad()
        with torch.enable_grad():
            module(given["x"]).sum().backward()
        return {"gradient": module.body.weight.grad.clone()}

    call = Traced(gradient, module, name="a gradient")
    for step in range(8):
        if step == 4:
            assert call.replays
            hook = HOOKS[kind](module.body, lambda *_: calls.add(present[0]))
        present[0] = step
        assert call.refresh() == (step == 4)
        warned = pytest.warns(UserWarning, match="a gradient runs eagerly: it has hooks")
        with warned if step == 4 else contextlib.nullcontext():
            call({"x": torch.randn(2, 3)})
    hook.remove()
    assert calls == {4, 5, 6, 7}


def replace_moments(states):
    states[-1]["exp_avg"] = torch.ones(3)


STATES = {
    "a moment": replace_moments,
    "a counter that is equal": lambda states: states[-1].update(step=states[-1]["step"].clone()),
    "all of one parameter": lambda states: states[-1].clear(),
}


@pytest.mark.parametrize("what", STATES)
def test_watch_detects_changed_optimizer_state(what):
    module = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(module.parameters())
    module.weight.grad, module.bias.grad = torch.ones(3, 3), torch.ones(3)
    optimizer.step()
    watch = Watch(optimizer)
    optimizer.step()
    assert not watch.changed()
    STATES[what](list(optimizer.state.values()))
    assert watch.changed()
    assert not watch.changed()


def test_watch_reports_incomparable_values_as_changed():
    module = Scaled()
    module.factors = np.ones(2)
    watch = Watch(module)
    module.factors = np.ones(2)
    assert watch.changed()


def test_traced_does_not_record_unrepeated_shapes():
    linear = nn.Linear(3, 2)
    run = traced(linear)
    for rows in range(1, 60):
        given = torch.randn(rows, 3)
        assert torch.equal(run({"x": given})["y"], linear(given))
    assert run.programs == 1
    for _ in range(3):
        run({"x": given})
    assert (run.programs, run.replays) == (2, True)


@pytest.mark.parametrize("faster", [False, True])
def test_traced_records_at_most_32_shapes(faster, monkeypatch):
    monkeypatch.setattr("kit.fast.traced.are_faster", lambda: faster)
    linear = nn.Linear(3, 2)
    run = Traced(lambda x: {"y": linear(x["x"])}, linear, name="", fast_products=True)
    for rows in [rows for _ in range(6) for rows in range(1, 40) for _ in range(3)]:
        given = torch.randn(rows, 3)
        assert torch.equal(run({"x": given})["y"], linear(given))
        assert run.programs <= 32
    assert run.programs == 32
    assert run.replays
    assert not run.reason


@pytest.mark.parametrize("every", [1, 5])
def test_traced_runs_eagerly_when_dependencies_keep_changing(every):
    module = Scaled()
    call = traced(module)
    with warnings.catch_warnings(record=True) as warned:
        for step in range(50 * every):
            module.scale = float(step // every)
            call.refresh()
            x = torch.randn(2, 3)
            assert torch.equal(call({"x": x})["y"], module(x))
    assert [str(warning.message) for warning in warned] == [
        "the module runs eagerly: its dependencies keep changing: scale"
    ]


# ---------------------------------------------------------------------- verified again
class Unwatched(nn.Module):
    """Reads a number from an array, where no change is noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = np.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * float(self.scale[0])


@pytest.mark.parametrize("changed_at", [3, 66, 400])
def test_traced_finds_an_unnoticed_change_when_it_verifies_again(changed_at):
    module = Unwatched()
    call, x = traced(module), torch.ones(2, 3)
    with warnings.catch_warnings(record=True) as warned:
        for step in range(1_500):
            module.scale[0] = 1 + (step >= changed_at)
            found = call({"x": x})["y"]
            if call.reason:
                break
    assert step == {3: 64, 66: 321, 400: 1346}[changed_at]
    assert torch.equal(found, module(x))
    assert (call.is_stale, call.replays) == (True, False)
    assert len(warned) == 1
    assert "the module runs eagerly: it reads a value whose change was" in str(warned[0].message)


@pytest.mark.parametrize("executor", ON_THE_CPU)
def test_traced_verifies_again_without_a_trace(executor, monkeypatch):
    monkeypatch.setattr("kit.fast.policy.FIRST_CHECK", 1)
    monkeypatch.setattr("kit.fast.policy.LAST_CHECK", 2)
    verified = []
    verify = Traced._verify
    monkeypatch.setattr(Traced, "_verify", lambda *given: verified.append(0) or verify(*given))
    ours, theirs = Noisy(), Noisy()
    call = traced(ours, executor=executor)
    for step in range(12):
        torch.manual_seed(step)
        x = torch.randn(4, 3)
        numbers = torch.get_rng_state()
        found, after = call({"x": x})["y"], torch.get_rng_state()
        torch.set_rng_state(numbers)
        assert torch.equal(found, theirs(x))
        assert torch.equal(after, torch.get_rng_state())
        for one, other in zip(ours.buffers(), theirs.buffers()):
            assert torch.equal(one, other)
    assert len(verified) == 5
    assert call.replays


# ---------------------------------------------------------------------- eager
def deciding(given):
    return {"y": given["x"] if float(given["x"].sum()) > 0 else -given["x"]}


def test_traced_reports_line_of_host_dependent_branch():
    call = Traced(deciding, name="the function")
    with pytest.warns(UserWarning, match=r"the function runs eagerly: .*test_traced.py:\d+"):
        assert float(call({"x": -torch.ones(())})["y"]) == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert float(call({"x": torch.ones(())})["y"]) == 1.0
    assert "float(given" in call.reason
    assert (call.replays, call.keys_read) == (False, [])


def test_eager_fallback_applies_writes_once():
    total = torch.zeros(())

    def add_and_decide(given):
        total.add_(1.0)
        given["count"][0] += torch.rand(()) * 0 + 1
        return deciding(given)

    call, count = Traced(add_and_decide, name="the function"), torch.zeros(2)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="runs eagerly"):
        call({"x": torch.ones(()), "count": count})
    assert (float(total), count.tolist()) == (1.0, [1.0, 0.0])
    after = torch.get_rng_state()
    torch.manual_seed(0)
    torch.rand(())
    assert torch.equal(after, torch.get_rng_state())


def test_traced_runs_unrepeatable_function_eagerly():
    calls = []

    def count(given):
        calls.append(1)
        return {"y": given["x"] * len(calls)}

    call = Traced(count, name="count")
    assert float(call({"x": torch.ones(())})["y"]) == 1.0
    with pytest.warns(UserWarning, match="it is not repeatable"):
        assert float(call({"x": torch.ones(())})["y"]) == 2.0
    assert float(call({"x": torch.ones(())})["y"]) == 3.0


def test_traced_detects_functions_with_unrepeatable_writes():
    calls, total = [], torch.zeros(())

    def count(given):
        calls.append(1)
        total.add_(float(len(calls)))
        return {"y": given["x"]}

    call = Traced(count, name="count")
    call({"x": torch.ones(())})
    with pytest.warns(UserWarning, match="it is not repeatable"):
        call({"x": torch.ones(())})
    assert float(total) == 3.0


class Exploring(nn.Module):
    """Acts otherwise now and then, as Python decides; in the first calls that may not be seen."""

    def __init__(self, decides: str) -> None:
        super().__init__()
        self.decides, self.count = decides, 0
        self.generators = [random.Random(0)]
        self.rng, self.older_rng = np.random.default_rng(0), np.random.RandomState(0)
        self.of_pytorch = torch.Generator().manual_seed(0)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.decides == "Python's random numbers":
            return -x if random.random() < 0.3 else x
        if self.decides == "NumPy's random numbers":
            return -x if np.random.rand() < 0.3 else x
        if self.decides == "a generator of Python":
            return -x if self.generators[0].random() < 0.3 else x
        if self.decides == "a generator of NumPy":
            return -x if self.rng.random() < 0.3 else x
        if self.decides == "an older generator of NumPy":
            return -x if self.older_rng.rand() < 0.3 else x
        if self.decides == "a generator of PyTorch":
            return torch.where(torch.rand((), generator=self.of_pytorch) < 0.3, -x, x)
        if self.decides == "a buffer that counts":
            self.calls += 1
            return -x if self.calls <= 5 else x
        self.count += 1
        return -x if self.count <= 5 else x


@pytest.mark.parametrize("decides", [
    "Python's random numbers", "NumPy's random numbers", "a generator of Python",
    "a generator of NumPy", "an older generator of NumPy", "a generator of PyTorch",
    "a buffer that counts", "an attribute that counts",
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_traced_does_not_record_stateful_decisions(decides):
    ours, theirs = Exploring(decides), Exploring(decides)
    call, x = traced(ours), torch.ones(4)
    found = []
    for act in (lambda: call({"x": x})["y"], lambda: theirs(x)):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        found.append(torch.stack([act() for _ in range(40)]))
    assert torch.equal(*found)
    assert 0 < int((found[0] < 0).sum()) < 160
    assert (call.replays, bool(call.reason)) == (False, True)


def test_traced_records_second_call_after_lazy_initialization():
    class Lazy(nn.Module):
        scale = None

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = 2.0
                return x * 0.5 + x * 1.5
            return x * self.scale

    call = traced(Lazy())
    for step in range(5):
        x = torch.randn(3)
        assert torch.equal(call({"x": x})["y"], x * 2.0)
        assert call.replays == (step >= 2)
    (program,) = call._programs.values()
    assert program.recording.operations == ["aten.mul.Tensor"]


def test_verification_restores_device_rng_state(monkeypatch):
    """A generator of its own stands for a device's, which no machine without one has."""
    library = torch.library.Library("device", "DEF")
    device = torch.Generator().manual_seed(0)
    library.define("rand() -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
    library.impl("rand", lambda: torch.rand(2, generator=device), "CompositeExplicitAutograd")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [device.get_state()])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: device.set_state(states[0]))
    call = Traced(lambda given: {"y": torch.ops.device.rand()}, name="the policy")
    drawn = [call({})["y"] for _ in range(4)]
    device.manual_seed(0)
    assert torch.equal(
        torch.stack(drawn), torch.stack([torch.rand(2, generator=device) for _ in drawn])
    )
    assert call.replays


# ---------------------------------------------------------------------- executors
def test_traced_uses_python_executor_without_interpreter(monkeypatch):
    monkeypatch.delattr(torch._C, "_create_function_from_graph")
    call = traced(nn.Linear(3, 2))
    for _ in range(3):
        call({"x": torch.ones(1, 3)})
    assert (call.replays, call.executor) == (True, "python")


def test_interpreter_leaves_torchscript_settings_unchanged():
    call = traced(nn.Linear(3, 2))
    for _ in range(4):
        call({"x": torch.ones(1, 3)})
        assert torch._C._get_graph_executor_optimize()


def test_record_drops_unused_operations_except_random_draws():
    def function(x):
        x.exp()
        torch.randn(2)
        return [x * 2]

    recording, _ = record(function, [torch.ones(3)])
    assert recording.operations == ["aten.randn.default", "aten.mul.Tensor"]


# ---------------------------------------------------------------------- fewer operations
def operations_of(function, *inputs):
    """Those of a recording, whose results all executors give, in a second call as in the first."""
    recording, _ = record(function, inputs)
    runs = [executors.executed(recording, name)[0] for name in ON_THE_CPU]
    for call in range(2):
        for run in runs:
            torch.manual_seed(call)
            found = run(*inputs)
            torch.manual_seed(call)
            assert all(map(torch.equal, found, function(*inputs)))
    return [name.split(".")[1] for name in recording.operations]


def test_record_merges_duplicate_operations():
    assert operations_of(lambda x: [x.exp() + x.exp()], torch.ones(2)) == ["exp", "add_"]
    both = operations_of(lambda x: [x.sort()[0] + x.sort()[1]], torch.randn(3))
    assert both == ["sort", "add_"]


def test_record_distinguishes_int_and_float_scalars():
    whole = torch.ones(2, dtype=torch.int64)
    assert operations_of(lambda x: [x * 1 + x * 1.0], whole) == ["mul", "mul", "add_"]


def test_record_does_not_merge_random_draws():
    twice = operations_of(lambda x: [x + torch.randn(2) + torch.randn(2)], torch.ones(2))
    assert twice.count("randn") == 2


def test_record_folds_constants():
    def function(x):
        return [x * (torch.ones_like(x) / torch.full((2,), 4.0))]

    assert operations_of(function, torch.ones(2)) == ["mul"]


# ---------------------------------------------------------------------- in place
def test_record_writes_in_place_after_last_read():
    def function(x, y):
        return [((x @ y) + x[0]).relu().tanh() * 2.0 - y]

    given = torch.randn(3, 3), torch.randn(3, 3)
    assert operations_of(function, *given) == [
        "mm",
        "select",
        "add_",
        "relu_",
        "tanh_",
        "mul_",
        "sub_",
    ]


KEPT = {
    "it is given": lambda x: [x.relu() + 1],
    "it is returned": lambda x: [y := x.exp(), y.relu()],
    "a view of it is returned": lambda x: [(y := x.exp())[0], y.relu()],
    "it is read later": lambda x: [(y := x.exp()).relu() @ y],
    "a view of it is read later": lambda x: [((z := (y := x.exp()).t()), y.relu() @ z)[1]],
    "the other argument shows it": lambda x: [(y := x @ x) - y.t()],
    "it is a view of what is given": lambda x: [x.t().relu() @ x],
    "it is of another type": lambda x: [((x > 0) * x) + 1],
    "it is of another shape": lambda x: [x.sum(0) + x],
    "it is one row many times": lambda x: [x.sum(0).expand(3, 3).neg() @ x],
    "it was written to": lambda x: [(y := x.exp(), y.add_(1), y.relu() @ x)[2]],
}


@pytest.mark.parametrize("why", list(KEPT))
def test_record_does_not_overwrite_needed_tensors(why):
    operations = operations_of(KEPT[why], torch.randn(3, 3))
    names = {"relu_", "neg_", "sub_"}
    if why in {"it is of another type", "it is of another shape"}:
        names = {"add_", "mul_"} if why == "it is of another shape" else set()
    assert not names & set(operations), operations


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scalar_factor_rounds_like_eager_in_half_precision(dtype):
    factor, x = torch.tensor(-0.01), torch.linspace(-5, 5, 64, dtype=dtype)
    function = Traced(lambda given: {"y": factor * given["x"].exp()}, name="the product")
    for _ in range(4):  # recorded, verified, replayed, replayed
        assert torch.equal(function({"x": x})["y"], factor * x.exp())
    assert function.reason == ""


def test_record_preserves_products_with_intermediate_writes():
    weights = torch.randn(64, 8)

    def of_gradients(x):
        copied = x.exp().transpose(1, 2).contiguous()
        copied[0].mul_(2.0)
        return [copied.view(64, 16).t() @ weights * 2]

    def of_inputs(x):
        outputs = (weights @ x.exp().t()).view(2, 32, 16)
        outputs[0].add_(1.0)
        return [outputs.transpose(1, 2).contiguous() * 2]

    operations_of(of_gradients, torch.randn(2, 16, 32))
    operations_of(of_inputs, torch.randn(16, 8))


OTHER_PRODUCTS = {
    "heads": lambda x, w: (w @ x.t()).view(2, 4, 2, 8).transpose(1, 2).contiguous(),
    "parts of rows": lambda x, w: (w @ x.t()).view(2, 4, 16).transpose(1, 2).contiguous(),
    "whole numbers": lambda x, w: (w.long() @ x.long().t()).view(2, 4, 16).mT.contiguous(),
}


@pytest.mark.parametrize("kind", list(OTHER_PRODUCTS))
def test_record_preserves_products_of_other_shapes(kind):
    operations_of(
        lambda x, w: [OTHER_PRODUCTS[kind](x, w) * 2], torch.ones(8, 5), torch.ones(16, 5)
    )


EACH = torch.func.vmap(torch.nn.functional.linear)
OF_ONE = torch.func.vmap(torch.nn.functional.linear, in_dims=(None, 0))


def gradient_of(x, y):
    """Of two linear layers in a row, for inputs and weights."""
    x, y = x.detach(), y.detach()
    with torch.enable_grad():
        x, weights = x.clone().requires_grad_(), torch.stack([y, x]).requires_grad_()
        outputs = EACH(OF_ONE(x, weights).tanh(), weights)
        of_x, of_weights = torch.autograd.grad(outputs.sum(), [x, weights])
    return (of_x + of_weights.flatten(1).view(2, 4, 4)[0]) / 8


STEPS = {
    "relu": lambda a, b: a.relu(),
    "tanh": lambda a, b: a.tanh(),
    "add": lambda a, b: a + b,
    "add a row": lambda a, b: a + b[0],
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: b * a,
    "product": lambda a, b: a @ b / 4,
    "transpose": lambda a, b: a.t(),
    "row": lambda a, b: a[1].expand(4, 4),
    "split": lambda a, b: torch.cat(a.split(2)[::-1]),
    "in place": lambda a, b: a.clone().mul_(0.5),
    "of each": lambda a, b: EACH(a.expand(2, 4, 4), torch.stack([b, a])).sum(0) / 4,
    "of one": lambda a, b: OF_ONE(a, torch.stack([b, a])).relu()[1] / 4,
    "gradient": lambda a, b: gradient_of(a, b),
    "write": lambda a, b: (c := a * 1.0, c[0].copy_(b[1]), c)[2],
}


@given(
    st.lists(
        st.tuples(st.sampled_from(list(STEPS)), st.integers(0, 9), st.integers(0, 9)), max_size=12
    ),
    st.sets(st.integers(0, 12), max_size=3),
)
@settings(max_examples=150)
def test_random_traced_graphs_match_their_functions(steps, returned):
    def function(x, y):
        values = [x, y]
        for name, one, other in steps:
            values.append(STEPS[name](values[one % len(values)], values[other % len(values)]))
        return [x + y, values[-1] * 1, *[values[n] * 1 for n in returned if n < len(values)]]

    operations_of(function, torch.randn(4, 4), torch.randn(4, 4))


def test_traced_runs_lstm_gradient_eagerly():
    memory = nn.LSTM(3, 2, num_layers=2)

    def step(given):
        with torch.enable_grad():
            loss = memory(given["x"])[0].pow(2).sum()
            return dict(zip("abcdefgh", torch.autograd.grad(loss, [*memory.parameters()])))

    call = Traced(step, memory, name="the memory")
    given = {"x": torch.randn(4, 5, 3)}
    call(given)
    with pytest.warns(UserWarning, match="runs eagerly: PyTorch cannot execute its traced graph"):
        found = call(given)
    assert all(torch.equal(found[name], value) for name, value in step(given).items())


def test_traced_reports_missing_compiler_of_inductor(monkeypatch, tmp_path):
    config = pytest.importorskip("torch._inductor.config")
    monkeypatch.setattr(config.cpp, "cxx", ("/nonexistent",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    call = Traced(lambda given: {"y": given["x"] * 3 + 1}, name="the sum", executor="inductor")
    given = {"x": torch.ones(7)}
    with pytest.warns(UserWarning, match=r"eagerly: torch.compile fails \(.*C\+\+ compiler"):
        found = [call(given)["y"] for _ in range(3)]
    assert all(torch.equal(one, torch.full((7,), 4.0)) for one in found)


# ---------------------------------------------------------------------- layouts
def test_attention_gradient_preserves_layout_of_views():
    attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def function(x):
        with torch.enable_grad():
            outputs = attention(x, x, x)[0]
            return torch.autograd.grad(outputs.pow(2).sum(), [*attention.parameters()])

    operations_of(function, torch.randn(16, 3, 6))


@pytest.mark.parametrize("members", [2, 10])
def test_ensemble_layer_does_not_clone_outputs(members):
    weights = torch.randn(members, 32, 8)
    layers = torch.func.vmap(torch.nn.functional.linear, in_dims=(None, 0))
    assert "clone" not in operations_of(lambda x: [layers(x, weights).relu()], torch.randn(16, 8))


def test_outputs_are_distinct_new_tensors_in_every_call():
    def function(x):
        return [torch.zeros_like(x), x.exp(), x.exp(), torch.zeros_like(x)]

    given = torch.ones(2)
    assert operations_of(function, given) == ["zeros_like", "exp", "exp", "zeros_like"]
    run, _ = executors.executed(record(function, [given])[0])
    with torch.inference_mode():
        run(given)[0].add_(1.0)
    assert run(given)[0].tolist() == [0.0, 0.0]


def test_outputs_support_autograd_and_in_place_writes():
    module = Noisy()
    call = traced(module)
    for _ in range(4):
        found = call({"x": torch.randn(5, 3)})["y"]
    assert call.executor == "interpreter"
    assert not found.is_inference()
    found.add_(1)
    weight = torch.ones(2, requires_grad=True)
    with torch.enable_grad():
        (found * weight).sum().backward()
    assert torch.equal(weight.grad, found.sum(0))


def test_record_recomputes_values_after_intermediate_writes():
    def function(x):
        before, own = x.exp(), torch.zeros_like(x)
        own.add_(x)
        x.add_(1.0)
        return [before + x.exp() + own]

    def changed(x):
        return function(x.clone())

    assert operations_of(changed, torch.ones(2)).count("exp") == 2
    recording, _ = record(function, [torch.ones(2)])
    run, _ = executors.executed(recording)
    assert run(torch.ones(2))[0].tolist() == run(torch.ones(2))[0].tolist()


@pytest.mark.parametrize(("apart", "operation"), [(1, "add_"), (2, "_foreach_add_")])
def test_record_merges_updates_of_adjacent_tensor_elements(apart, operation):
    counters = torch.zeros(3)
    elements = list(counters)[::apart]

    def function(x):
        torch._foreach_add_(elements, 1)
        return [x + counters.sum()]

    recording, _ = record(function, [torch.ones(2)])
    assert [name.split(".")[1] for name in recording.operations] == [operation, "sum", "add"]
    run, _ = executors.executed(recording)
    assert run(torch.ones(2))[0].tolist() == [1.0 + counters.sum()] * 2
    assert counters.tolist() == [2.0, 4.0 - 2 * apart, 2.0]


@pytest.mark.parametrize(
    "function",
    [lambda x: x * True, lambda x: True * x.double() + False, lambda x: (x > False).long()],
)
def test_traced_accepts_booleans_as_scalars(function):
    call = Traced(lambda given: {"y": function(given["x"])}, name="it")
    for x in torch.randn(4, 3):
        assert torch.equal(call({"x": x})["y"], function(x))
    assert call.replays


def test_executors_support_operations_that_return_lists():
    def function(x, y):
        parts = torch.split(x, 2)
        values, order = torch.stack([parts[2], y]).sort(dim=1)
        return [values, order, *torch._foreach_mul([x, y], 2.0)]

    inputs = [torch.randn(6), torch.randn(2)]
    recording, expected = record(function, inputs)
    for name in ON_THE_CPU:
        run, _ = executors.executed(recording, name)
        assert all(map(torch.equal, run(*inputs), expected))


CHECKED = """
def checked(x):
    assert x.isfinite().all()
    assert not x.isnan().any()
    return [x * 2]
"""


def test_record_omits_finiteness_checks_of_libraries():
    library = {"__name__": "torchrl.objectives.own"}
    exec(CHECKED, library)
    assert record(library["checked"], [torch.ones(2)])[0].operations == ["aten.mul.Tensor"]


READS = {
    "a number": lambda x: [x * float(x.sum())],
    "whether any value is NaN": lambda x: [x.nan_to_num() if x.isnan().any() else x * 2],
    "whether all values are finite": lambda x: [x * 2 if x.isfinite().all() else x.nan_to_num()],
    "whether a TensorDict is finite": lambda x: [
        x * 2 if TensorDict({"x": x}, [2]).isfinite().all() else x.nan_to_num()
    ],
    "an array": lambda x: [torch.from_numpy(x.numpy() + 1)],
    "an array, by NumPy": lambda x: [torch.from_numpy(np.sqrt(x))],
    "a list": lambda x: [x * len([one for one in x.tolist() if one > 0])],
    "whether two are equal": lambda x: [x * 2 if torch.equal(x, x * x) else x],
}


@pytest.mark.parametrize("what", READS)
def test_record_rejects_host_reads(what):
    with pytest.raises(TraceError, match=r"reads a tensor on the host at .*:\d+"):
        record(READS[what], [torch.ones(2)])


SHAPES = {
    "those where a condition holds": lambda x: [x[x > 0].mean()],
    "the places of these": lambda x: [(x > 0).nonzero().sum()],
    "different values": lambda x: [x * len(x.unique())],
    "as many as are asked for": lambda x: [torch.repeat_interleave(x, x.long())],
}


@pytest.mark.parametrize("what", SHAPES)
def test_record_rejects_data_dependent_shapes(what):
    with pytest.raises(TraceError, match=r"a shape that depends on values at .*test_traced.py"):
        record(SHAPES[what], [torch.ones(2)])


def test_record_allows_shapes_that_depend_on_constants():
    allowed, places = torch.tensor([True, False, True]), torch.tensor([2, 0])
    recording, _ = record(
        lambda x: [x[allowed] * 2, x[places], x * allowed.tolist()[0]], [torch.ones(3)]
    )
    run, _ = executors.executed(recording)
    given = torch.arange(3.0)
    assert [one.tolist() for one in run(given)] == [[0.0, 4.0], [2.0, 0.0], [0.0, 1.0, 2.0]]
    allowed[1] = True
    assert not recording.is_valid()


def test_recording_stays_valid_while_truthiness_is_unchanged():
    clip = torch.tensor(0.5)  # clip_value of TorchRL's PPO losses, which is annealed
    recording, _ = record(lambda x: [x.clamp(max=clip) if clip else x], [torch.ones(1)])
    run, _ = executors.executed(recording)
    clip.fill_(0.25)
    assert recording.is_valid()
    assert run(torch.ones(1))[0].item() == 0.25
    clip.zero_()
    assert not recording.is_valid()


def test_recording_becomes_invalid_when_read_value_changes():
    clip = torch.tensor(0.5)
    for decides in [lambda: clip > 0.1, lambda: bool(clip) and clip.item() > 0.1]:
        clip.fill_(0.5)
        recording, _ = record(lambda x: [x * clip if decides() else x], [torch.ones(1)])  # noqa: B023
        assert recording.is_valid()
        clip.fill_(0.25)
        assert not recording.is_valid()


@dataclass
class Coefficients:
    """Settings of a loss, in an object of their own."""

    beta: float = 1.0


class Temperature:
    """A setting of a loss, in a class that is no dataclass."""

    def __init__(self) -> None:
        self.beta = 1.0


@pytest.mark.parametrize("kind", [Coefficients, Temperature, lambda: SimpleNamespace(beta=1.0)])
def test_refresh_detects_changes_in_settings_object(kind):
    module = nn.Linear(3, 1)
    module.settings = kind()
    scaled = Traced(
        lambda given: {"y": module(given["x"]) * module.settings.beta}, module, name="y"
    )
    x = torch.ones(2, 3)
    first = [scaled({"x": x})["y"].clone() for _ in range(3)][-1]
    module.settings.beta = 0.5
    assert scaled.refresh()
    assert_close(scaled({"x": x})["y"], first / 2)
    module.settings = kind()
    assert scaled.refresh()
    assert_close(scaled({"x": x})["y"], first)


def test_refresh_detects_changes_in_deque():
    module = nn.Identity()
    module.returns = collections.deque([1.0], maxlen=3)
    call = Traced(lambda given: {"y": given["x"] * sum(module.returns)}, module, name="y")
    found = []
    for _ in range(3):
        found += [float(call({"x": torch.ones(())})["y"]) for _ in range(3)]
        module.returns.append(2.0)
        assert call.refresh()
    assert found == [1.0] * 3 + [3.0] * 3 + [5.0] * 3
