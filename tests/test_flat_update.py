"""Flat programs of gradient steps: what they notice, and when they are not used."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchrl.objectives import LossModule

from kit.fast.optimizers import RMSprop as FixedRMSprop
from kit.fast.traced import Traced
from kit.update import Update
from tests.losses import make_loss, minibatch_for
from tests.plain_steps import assert_same, plain_step, programs, state_of


# ---------------------------------------------------------------------- minibatches
@pytest.mark.parametrize("fused", [False, True])
def test_update_traces_every_minibatch_size(fused):
    ours, theirs = make_loss("ClipPPOLoss, discrete"), make_loss("ClipPPOLoss, discrete")
    own, other = (Adam(loss.parameters(), lr=0.01, fused=fused) for loss in (ours, theirs))
    update = Update(ours, own)
    for step, rows in enumerate([8, 8, 3, 8, 3, 8, 1, 5, 5, 8, 1, 3, 8]):
        minibatch = minibatch_for("ClipPPOLoss, discrete", rows, seed=step)
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        assert_same(state_of(ours, own), state_of(theirs, other))
    assert sum(traced.programs for traced in update.traced_step.traced.values()) == 4 + fused


def test_rmsprop_matches_pytorch_when_learning_rate_changes():
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
def test_rmsprop_matches_pytorch_when_gradients_are_missing(layout):
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


def test_rmsprop_like_tensorflow_matches_stable_baselines3():
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = FixedRMSprop([parameter], lr=0.1, eps=1e-5, like_tensorflow=True)
    # RMSpropTFLike of stable-baselines3 2.9.2
    steps = [
        ([0.5, -1.0], [0.9498117, -1.9000005]),
        ([2.0, 0.0], [0.7520326, -1.9000005]),
        ([-0.1, 3.0], [0.7619709, -2.1900065]),
    ]
    for gradient, expected in steps:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        torch.testing.assert_close(parameter.data, torch.tensor(expected))


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


def test_update_follows_coefficient_filled_in_place():
    losses, optimizers, update = pair("ClipPPOLoss", fused=True)
    follow(
        losses, optimizers, update, "ClipPPOLoss",
        lambda loss, _, step: loss.entropy_coeff.fill_(0.1 * step),
    )  # fmt: skip
    assert programs(update) == 1


CLIPPING = [{}, {"max_grad_norm": 0.1}, {"max_grad_norm": 0.2}, {"clip_value": 0.01}]


def test_update_follows_changed_gradient_clipping():
    losses, optimizers, update = pair("A2CLoss", fused=True)
    for step in range(16):
        clip = CLIPPING[step // 4]
        update.max_grad_norm, update.clip_value = clip.get("max_grad_norm"), clip.get("clip_value")
        minibatch = minibatch_for("A2CLoss", seed=step)
        update(minibatch.clone())
        plain_step(losses[1], optimizers[1], minibatch, **clip)
        assert_same(state_of(losses[0]), state_of(losses[1]))
        assert update.keys_read or step % 4 < 3


@pytest.mark.parametrize("fused", [False, True])
def test_update_follows_learning_rate_changes(fused):
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
def test_update_follows_pytorch_schedulers(make, fused):
    losses, optimizers, update = pair("ClipPPOLoss", fused=fused)
    schedulers = [make(optimizer) for optimizer in optimizers]

    def change(_: Any, optimizer: Optimizer, step: int) -> None:
        if step:
            schedulers[optimizers.index(optimizer)].step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        follow(losses, optimizers, update, "ClipPPOLoss", change, steps=15)


@pytest.mark.parametrize("of_all", [False, True])
def test_update_calls_optimizer_hooks_at_every_step(of_all):
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


def test_update_follows_loaded_and_replaced_parameters():
    losses, optimizers, update = pair("A2CLoss", fused=True)

    def change(loss: LossModule, _: Any, step: int) -> None:
        if step == 4:
            loss.load_state_dict({k: v + 0.1 for k, v in loss.state_dict().items()})
        if step == 7:
            for parameter in loss.parameters():
                parameter.data = parameter.data * 0.9

    follow(losses, optimizers, update, "A2CLoss", change)


# ---------------------------------------------------------------------- compiled
@pytest.mark.nightly
def test_inductor_compiles_reshape_of_transposed_tensor():
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "optimizers"),
    [
        ("ClipPPOLoss", (SGD, SGD)),
        ("SACLoss", (SGD, SGD)),
        ("DQNLoss", (SGD, SGD)),
        ("A2CLoss", (FixedRMSprop, torch.optim.RMSprop)),  # joins the parameters in one vector
    ],
)
def test_compiled_steps_are_close_to_eager_steps(name, optimizers):
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
