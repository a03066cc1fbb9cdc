"""Flat programs of gradient steps: what they notice, and when they are not used."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchrl.objectives import LossModule

from kit.fast.optimizers import RMSprop as FixedRMSprop
from kit.fast.traced import Traced
from kit.update import Update, in_precision
from tests.losses import make_loss, minibatch_for
from tests.plain_steps import OPTIMIZERS, assert_same, plain_step, programs, state_of


# ---------------------------------------------------------------------- minibatches
@pytest.mark.parametrize("fused", [False, True])
def test_minibatches_of_changing_size_are_all_traced(fused):
    ours, theirs = make_loss("ClipPPOLoss, discrete"), make_loss("ClipPPOLoss, discrete")
    own, other = (Adam(loss.parameters(), lr=0.01, fused=fused) for loss in (ours, theirs))
    update = Update(ours, own)
    for step, rows in enumerate([8, 8, 3, 8, 3, 8, 1, 5, 5, 8, 1, 3, 8]):
        minibatch = minibatch_for("ClipPPOLoss, discrete", rows, seed=step)
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        assert_same(state_of(ours, own), state_of(theirs, other))
    assert sum(traced.programs for traced in update._traced.values()) == 4 + fused


def test_steps_of_an_optimizer_are_counted_in_one_operation_also_after_a_state_is_loaded():
    ours, theirs = make_loss("ClipPPOLoss, discrete"), make_loss("ClipPPOLoss, discrete")
    own, other = (Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs))
    update = Update(ours, own)
    for step in range(9):
        if step == 5:
            own.load_state_dict(copy.deepcopy(own.state_dict()))
        minibatch = minibatch_for("ClipPPOLoss, discrete", 8, seed=step)
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        assert_same(state_of(ours, own), state_of(theirs, other))
    operations = update._traced[(0,), "step"].operations
    assert "aten.add_.Scalar" in operations
    assert "aten._foreach_add_.Scalar" not in operations


def test_rmsprop_is_pytorchs_at_any_learning_rate_and_has_its_state():
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))] for _ in "ab")
    for one, other in zip(ours, theirs):
        other.data.copy_(one.data)
    how = {"lr": 0.01, "alpha": 0.9, "eps": 1e-5}
    own, other = FixedRMSprop(ours, **how), torch.optim.RMSprop(theirs, **how)
    for step in range(20):
        if step == 10:
            other.load_state_dict(copy.deepcopy(own.state_dict()))
        rate = 0.01 / (step + 1)
        own.param_groups[0]["lr"], other.param_groups[0]["lr"] = torch.tensor(rate), rate
        for one, two in zip(ours, theirs):
            one.grad = torch.randn_like(one)
            two.grad = one.grad.clone()
        own.step(), other.step()
        for one, two in zip(ours, theirs):
            assert torch.allclose(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_rmsprop_is_pytorchs_where_gradients_are_missing_and_in_any_layout(layout):
    torch.manual_seed(0)
    first = [torch.randn(2, 3, 2, 2).to(memory_format=layout), torch.randn(5), torch.randn(3)]
    ours, theirs = ([nn.Parameter(one.clone()) for one in first] for _ in "ab")
    own, other = FixedRMSprop(ours, lr=0.01), torch.optim.RMSprop(theirs, lr=0.01)
    for missing in (2, None, 0, 1, None):
        for number, (one, two) in enumerate(zip(ours, theirs)):
            one.grad = None if number == missing else torch.randn_like(one)
            two.grad = None if one.grad is None else one.grad.clone()
        own.step(), other.step()
        for one, two in zip(ours, theirs):
            assert torch.allclose(one, two, rtol=1e-5, atol=1e-7)


def test_rmsprop_is_recorded_whatever_its_learning_rate():
    ours, theirs = make_loss("A2CLoss"), make_loss("A2CLoss")
    own, other = (FixedRMSprop(loss.parameters(), lr=0.01) for loss in (ours, theirs))
    update = Update(ours, own)
    for step in range(12):
        own.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.01 / (step + 1)
        minibatch = minibatch_for("A2CLoss", 8, seed=step)
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        assert_same(state_of(ours, own), state_of(theirs, other))
    assert update._traced[(0,), "step"].replays


def test_the_order_of_keys_does_not_matter():
    ours, theirs = make_loss("ClipPPOLoss, discrete"), make_loss("ClipPPOLoss, discrete")
    own, other = (Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs))
    update = Update(ours, own)
    for step, rows in enumerate([8, 8, 8, 3, 3, 8, 3, 8, 3]):
        minibatch = minibatch_for("ClipPPOLoss, discrete", rows, seed=step)
        keys = sorted(minibatch.keys(True, True), key=str, reverse=step % 2 == 1)
        update(TensorDict({key: minibatch[key] for key in keys}, [rows]))
        plain_step(theirs, other, minibatch)
        assert_same(state_of(ours, own), state_of(theirs, other))


def test_minibatches_of_another_type_are_traced_anew():
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, minibatch: TensorDictBase) -> TensorDict:
            x = minibatch["x"]
            return TensorDict({"loss": self.w * (x / 2 if x.is_floating_point() else x // 2).sum()})

    ours, theirs = Sum(), Sum()
    own, other = (SGD(loss.parameters(), lr=0.1) for loss in (ours, theirs))
    update = Update(ours, own)
    for step in range(12):
        x = torch.arange(5) + step
        minibatch = TensorDict({"x": x.float() if step // 2 % 2 else x}, [5])
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        assert torch.equal(ours.w, theirs.w)


def test_keys_that_showed_the_same_memory_once_may_differ_later():
    ours, theirs = make_loss("SACLoss"), make_loss("SACLoss")
    own, other = (Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs))
    update = Update(ours, own)
    for step in range(8):
        minibatch = minibatch_for("SACLoss", seed=step)
        if step < 4:
            minibatch["next", "done"] = minibatch["next", "terminated"]
            minibatch["next", "observation"] = minibatch["observation"]
        torch.manual_seed(step)
        update(minibatch.copy())
        torch.manual_seed(step)
        plain_step(theirs, other, minibatch.clone())
        assert_same(state_of(ours, own), state_of(theirs, other))


def test_minibatches_of_sequences_have_any_batch_size():
    ours, theirs = make_loss("A2CLoss"), make_loss("A2CLoss")
    own, other = (Adam(loss.parameters(), lr=0.01) for loss in (ours, theirs))
    update = Update(ours, own)
    for step in range(5):
        minibatch = minibatch_for("A2CLoss", 6, seed=step).reshape(2, 3)
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
    assert_same(state_of(ours, own), state_of(theirs, other))


# ---------------------------------------------------------------------- what changes meanwhile
def pair(name: str, **optimizer: Any) -> tuple[Any, ...]:
    losses = make_loss(name), make_loss(name)
    optimizers = [Adam(loss.parameters(), lr=0.01, **optimizer) for loss in losses]
    return losses, optimizers, Update(losses[0], optimizers[0])


def follow(losses, optimizers, update, name: str, change: Any, steps: int = 10) -> None:
    """Make steps on both sides, with ``change(loss, optimizer, step)`` before each."""
    for step in range(steps):
        for loss, optimizer in zip(losses, optimizers):
            change(loss, optimizer, step)
        minibatch = minibatch_for(name, seed=step)
        torch.manual_seed(step)
        update(minibatch.clone())
        torch.manual_seed(step)
        plain_step(losses[1], optimizers[1], minibatch)
        assert_same(state_of(losses[0]), state_of(losses[1])), step


def test_a_coefficient_that_is_filled_in_place_takes_effect():
    losses, optimizers, update = pair("ClipPPOLoss", fused=True)
    follow(
        losses, optimizers, update, "ClipPPOLoss",
        lambda loss, _, step: loss.entropy_coeff.fill_(0.1 * step),
    )  # fmt: skip
    assert programs(update) == 1


def test_a_coefficient_that_is_replaced_takes_effect():
    losses, optimizers, update = pair("ClipPPOLoss", fused=True)

    def change(loss: LossModule, _: Any, step: int) -> None:
        loss.entropy_coeff = torch.tensor(0.1 * (step // 3))

    follow(losses, optimizers, update, "ClipPPOLoss", change)


def test_a_coefficient_kept_as_a_plain_number_takes_effect():
    losses, optimizers, update = pair("KLPENPPOLoss", fused=True)

    def change(loss: LossModule, _: Any, step: int) -> None:
        loss.samples_mc_entropy = 1 + step // 4
        loss.reduction = "sum" if step // 3 % 2 else "mean"

    follow(losses, optimizers, update, "KLPENPPOLoss", change)


CLIPPING = [{}, {"max_grad_norm": 0.1}, {"max_grad_norm": 0.2}, {"clip_value": 0.01}]


def test_another_clipping_takes_effect():
    losses, optimizers, update = pair("A2CLoss", fused=True)
    for step in range(16):
        clip = CLIPPING[step // 4]
        update.max_grad_norm, update.clip_value = clip.get("max_grad_norm"), clip.get("clip_value")
        minibatch = minibatch_for("A2CLoss", seed=step)
        update(minibatch.clone())
        plain_step(losses[1], optimizers[1], minibatch, **clip)
        assert_same(state_of(losses[0]), state_of(losses[1]))
        assert update.keys_read or step % 4 < 3


def test_a_setting_that_was_read_on_the_host_takes_effect():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.tensor(1.0))

        def forward(self, minibatch: TensorDictBase) -> TensorDict:
            return TensorDict({"loss": float(self.scale) * (self.w * minibatch["x"]).sum()})

    ours, theirs = Scaled(), Scaled()
    own, other = (Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs))
    update = Update(ours, own)
    for step in range(10):
        for loss in (ours, theirs):
            loss.scale.fill_(1.0 + step // 4)
        minibatch = TensorDict({"x": torch.arange(3.0) + step})
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        assert_same(state_of(ours), state_of(theirs))
    assert update.plain_reason == ""


@pytest.mark.parametrize("fused", [False, True])
def test_a_learning_rate_takes_effect_however_it_is_set(fused):
    losses, optimizers, update = pair("ClipPPOLoss", fused=fused)

    def change(_: Any, optimizer: Optimizer, step: int) -> None:
        rate = 0.01 / (1 + step)
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor) and step % 2:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    follow(losses, optimizers, update, "ClipPPOLoss", change, steps=30)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 40),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_schedulers_of_pytorch_take_effect_momentum_included(make, fused):
    losses, optimizers, update = pair("ClipPPOLoss", fused=fused)
    schedulers = [make(optimizer) for optimizer in optimizers]

    def change(_: Any, optimizer: Optimizer, step: int) -> None:
        if step:
            schedulers[optimizers.index(optimizer)].step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follow(losses, optimizers, update, "ClipPPOLoss", change, steps=15)


@pytest.mark.parametrize("optimizer", ["Adam, fused", "SGD, momentum"])
def test_an_optimiser_that_forgets_begins_anew(optimizer):
    losses = make_loss("A2CLoss"), make_loss("A2CLoss")
    optimizers = [OPTIMIZERS[optimizer](list(loss.parameters())) for loss in losses]
    update = Update(losses[0], optimizers[0])

    def change(_: Any, optimizer: Optimizer, step: int) -> None:
        if step == 6:
            optimizer.state.clear()

    follow(losses, optimizers, update, "A2CLoss", change, steps=12)


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_of_an_optimiser_are_called_at_every_step(of_all):
    loss = make_loss("A2CLoss")
    optimizer = Adam(loss.parameters(), fused=True)
    update, called = Update(loss, optimizer), []
    for step in range(4):
        update(minibatch_for("A2CLoss", seed=step))
    register = register_optimizer_step_post_hook if of_all else optimizer.register_step_post_hook
    hook = register(lambda *_: called.append(1))
    for step in range(4):
        update(minibatch_for("A2CLoss", seed=step))
    hook.remove()
    assert len(called) == 4


def test_parameters_loaded_in_place_and_moved_are_followed():
    losses, optimizers, update = pair("A2CLoss", fused=True)

    def change(loss: LossModule, _: Any, step: int) -> None:
        if step == 4:
            loss.load_state_dict({k: v + 0.1 for k, v in loss.state_dict().items()})
        if step == 7:
            for parameter in loss.parameters():
                parameter.data = parameter.data * 0.9

    follow(losses, optimizers, update, "A2CLoss", change)


def test_evaluation_mode_is_noticed():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))

        def forward(self, minibatch: TensorDictBase) -> TensorDict:
            return TensorDict({"loss": self.net(minibatch["x"]).sum()})

    torch.manual_seed(0)
    ours = Dropping()
    theirs = copy.deepcopy(ours)
    own, other = (Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs))
    update = Update(ours, own)
    for step in range(12):
        for loss in (ours, theirs):
            loss.train(step // 4 % 2 == 0)
        minibatch = TensorDict({"x": torch.randn(5, 3)}, [5])
        torch.manual_seed(step)
        update(minibatch.clone())
        torch.manual_seed(step)
        plain_step(theirs, other, minibatch)
        assert_same(state_of(ours), state_of(theirs))


# ---------------------------------------------------------------------- what cannot be traced
class Deciding(nn.Module):
    """A loss that looks at its data on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        total = (self.w * minibatch["x"]).sum()
        return TensorDict({"loss": total if float(minibatch["x"].mean()) > 0 else total.pow(2)})


def test_a_loss_that_decides_on_the_host_runs_eagerly_and_says_where():
    ours, theirs = Deciding(), Deciding()
    own, other = (Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs))
    update = Update(ours, own)
    for step in range(6):
        minibatch = TensorDict({"x": torch.arange(3.0) - step})
        if step:
            update(minibatch.clone())
        else:
            with pytest.warns(
                UserWarning, match=r"Deciding runs eagerly.*test_flat_update\.py:\d+"
            ):
                update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        assert_same(state_of(ours, own), state_of(theirs, other))
    assert "test_flat_update.py" in update.plain_reason
    assert update.keys_read == []


def test_a_loss_that_changes_from_call_to_call_runs_eagerly():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))
            self.count = [0]

        def forward(self, minibatch: TensorDictBase) -> TensorDict:
            self.count[0] += 1
            return TensorDict({"loss": self.w * self.count[0]})

    loss = Counting()
    update = Update(loss, SGD(loss.parameters(), lr=1.0))
    update(TensorDict({"x": torch.ones(1)}))
    update(TensorDict({"x": torch.ones(1)}))
    with pytest.warns(UserWarning, match="it changes its own attributes"):
        update(TensorDict({"x": torch.ones(1)}))
    assert update.plain_reason
    update(TensorDict({"x": torch.ones(1)}))
    assert float(loss.w.detach()) == 1.0 - (1 + 2 + 3 + 4)


def test_a_loss_that_is_not_finite_is_traced_like_any_other():
    ours, theirs = make_loss("A2CLoss"), make_loss("A2CLoss")
    own, other = (Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs))
    update = Update(ours, own)
    for step in range(5):
        minibatch = minibatch_for("A2CLoss", seed=step)
        minibatch["advantage"].fill_(math.nan)
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
    assert update.plain_reason == ""
    for one, two in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


def test_a_loss_that_keeps_statistics_changes_them_once_per_step():
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.norm = nn.BatchNorm1d(3)

        def forward(self, minibatch: TensorDictBase) -> TensorDict:
            return TensorDict({"loss": (self.w * self.norm(minibatch["x"])).pow(2).mean()})

    ours, theirs = Running(), Running()
    own, other = (Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs))
    update = Update(ours, own)
    for _ in range(6):
        minibatch = TensorDict({"x": torch.randn(5, 3)}, [5])
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        assert_same(state_of(ours, own), state_of(theirs, other))
    assert ours.norm.num_batches_tracked == 6


# ---------------------------------------------------------------------- compiled
@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [("TD3Loss", "float32"), ("A2CLoss", "bfloat16")])
def test_what_draws_or_rounds_otherwise_when_compiled_is_compiled_all_the_same(name, precision):
    loss = in_precision(make_loss(name), precision, "cpu")
    update = Update(loss, SGD(loss.parameters(), lr=0.01), compile=True)
    for step in range(4):
        update(minibatch_for(name, seed=step))
    assert update.plain_reason == ""
    assert [traced.programs for traced in update._traced.values()] == [1]


@pytest.mark.slow
def test_a_view_is_compiled_where_the_compiler_lays_out_memory_otherwise():
    def mixed(given):  # as in the recurrence of DreamerV3
        own = given["own"].view(2, 4, 16).transpose(0, 1)
        following = torch.lerp(own, given["other"] + 1, given["share"].sigmoid())
        return {"y": following.transpose(0, 1).reshape(2, 64)}

    call = Traced(mixed, name="the mixture", executor="inductor")
    blocks = {name: torch.randn(4, 2, 16) for name in ("other", "share")}
    given = {"own": torch.randn(2, 64), **blocks}
    for _ in range(3):
        torch.testing.assert_close(call(given)["y"], mixed(given)["y"])
    assert call.reason == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizers"),
    [
        ("ClipPPOLoss", (SGD, SGD)),
        ("SACLoss", (SGD, SGD)),
        ("DQNLoss", (SGD, SGD)),
        ("A2CLoss", (FixedRMSprop, torch.optim.RMSprop)),  # joins the parameters in one vector
    ],
)
def test_compiled_steps_are_close(name, optimizers):
    ours, theirs = make_loss(name), make_loss(name)
    pairs = zip(optimizers, (ours, theirs))
    own, other = (optimizer(loss.parameters(), lr=0.01) for optimizer, loss in pairs)
    update = Update(ours, own, compile=True)
    for step in range(6):
        minibatch = minibatch_for(name, seed=step)
        torch.manual_seed(step)
        update(minibatch.clone())
        torch.manual_seed(step)
        plain_step(theirs, other, minibatch)
    assert update.plain_reason == ""
    if name != "SACLoss":  # compiled programs draw random numbers of their own
        for one, two in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)
