"""A gradient step is that of plain PyTorch, bit for bit, however it is executed."""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from losses import LOSSES, has_targets, make_loss, minibatch_for, soft_update, transitions, value
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torchrl.objectives import HardUpdate, LossModule

from kit.steps import SettingError
from kit.update import Update

OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: Adam(p, lr=0.01),
    "Adam, one by one": lambda p: Adam(p, lr=0.01, foreach=False),
    "Adam, fused": lambda p: Adam(p, lr=0.01, eps=1e-5, fused=True),
    "Adam, amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True, weight_decay=0.01, fused=True),
    "AdamW, fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "SGD, fused": lambda p: SGD(p, lr=0.01, fused=True),
    "SGD, momentum": lambda p: SGD(p, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    "SGD, foreach": lambda p: SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "Adagrad, fused": lambda p: Adagrad(p, lr=0.01, fused=True),
    "RMSprop": lambda p: RMSprop(p, lr=0.01),
}


READ_ON_THE_HOST = {
    "KLPENPPOLoss": "if kl.mean() > self.dtarg",
    "DistributionalDQNLoss": "if (log_softmax_values > 0).any()",
}
"""Losses of TorchRL that decide something on the host, and where; they run eagerly."""


# ---------------------------------------------------------------------- plain PyTorch
def plain_step(
    loss: nn.Module,
    optimizers: Mapping[str, Optimizer] | Optimizer,
    minibatch: TensorDictBase,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    autocast: torch.dtype | None = None,
) -> TensorDictBase:
    """A gradient step as everybody writes it."""
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        losses = loss(minibatch)
    if isinstance(optimizers, Optimizer):
        pairs = [(optimizers, sum(v for k, v in losses.items() if k.startswith("loss")))]
    else:
        pairs = [(optimizer, losses[name]) for name, optimizer in optimizers.items()]
    for optimizer, total in pairs:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        total.backward(inputs=parameters, retain_graph=True)
    for optimizer, _ in pairs:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:  # autograd may give two of them one tensor
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()
        if clip_norm is not None:
            clip_grad_norm_(parameters, clip_norm)
        if clip_value is not None:
            clip_grad_value_(parameters, clip_value)
        optimizer.step()
        optimizer.zero_grad()
    return losses.detach()


def state_of(loss: nn.Module, *optimizers: Optimizer) -> dict[str, Tensor]:
    """Weights, buffers and what optimisers remember."""
    state = {name: tensor.clone() for name, tensor in loss.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for index, values in optimizer.state_dict()["state"].items():
            for name, tensor in values.items():
                if isinstance(tensor, Tensor):
                    state[f"optimizer {number} {index} {name}"] = tensor.clone()
    return state


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def eagerly(update: Update, minibatches: Iterable[TensorDictBase]) -> None:
    for minibatch in minibatches:
        update(minibatch)


def programs(update: Update) -> int:
    """Whole gradient steps that were traced."""
    return sum(known.step is not None for known in update._flat._known.values())


# ---------------------------------------------------------------------- every loss
@pytest.mark.parametrize("name", LOSSES)
def test_steps_are_those_of_plain_pytorch_for_every_loss(name):
    ours, theirs = make_loss(name), make_loss(name)
    optimizers = [Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs)]
    targets = [soft_update(loss) for loss in (ours, theirs)]
    update = Update(ours, optimizers[0], clip_norm=0.5, target_updater=targets[0])
    for step in range(6):
        mine, other = (minibatch_for(name, seed=step) for _ in range(2))
        torch.manual_seed(step)
        metrics = update(mine)
        torch.manual_seed(step)
        losses = plain_step(theirs, optimizers[1], other, clip_norm=0.5)
        if targets[1] is not None:
            targets[1].step()
        assert_same(state_of(ours, optimizers[0]), state_of(theirs, optimizers[1]))
        for key, value_ in losses.items():
            expected = value_.float().mean() if value_.numel() > 1 else value_.reshape(())
            assert torch.equal(metrics[key], expected), key
        added = set(other.keys()) - set(minibatch_for(name).keys())
        for key in added:
            assert torch.equal(mine[key], other[key]), key
    if name in READ_ON_THE_HOST:
        assert READ_ON_THE_HOST[name] in update.plain_reason
    else:
        assert update.plain_reason == ""
        assert programs(update) == 1
    assert update.optimizer_step_count == 6


@pytest.mark.parametrize("name", LOSSES)
def test_a_trace_leaves_the_random_numbers_where_an_eager_call_does(name):
    states = []
    for compile in ("auto", False):
        loss = make_loss(name)
        update = Update(loss, Adam(loss.parameters(), fused=True), compile=compile)
        torch.manual_seed(1)
        eagerly(update, (minibatch_for(name, seed=seed) for seed in range(5)))
        states.append((torch.get_rng_state(), state_of(loss)))
    assert torch.equal(states[0][0], states[1][0])
    assert_same(states[0][1], states[1][1])


# ---------------------------------------------------------------------- every optimiser
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}, {"clip_value": 0.01}])
def test_steps_are_those_of_plain_pytorch_for_every_optimiser(optimizer, clip):
    name = "SACLoss"
    ours, theirs = make_loss(name), make_loss(name)
    own, other = (OPTIMIZERS[optimizer](list(loss.parameters())) for loss in (ours, theirs))
    update = Update(ours, own, **clip)
    for step in range(8):
        minibatch = minibatch_for(name, seed=step)
        torch.manual_seed(step)
        update(minibatch.clone())
        torch.manual_seed(step)
        plain_step(theirs, other, minibatch, **clip)
        assert_same(state_of(ours, own), state_of(theirs, other))


def test_the_norm_that_is_told_is_that_before_clipping():
    loss = make_loss("ClipPPOLoss, discrete")
    update = Update(loss, SGD(loss.parameters(), lr=0.0), clip_norm=1e-3)
    for step in range(5):
        minibatch = minibatch_for("ClipPPOLoss, discrete", seed=step)
        sum(v for k, v in loss(minibatch.clone()).items() if k.startswith("loss")).backward()
        gradients = [p.grad for p in loss.parameters() if p.grad is not None]
        expected = torch.nn.utils.get_total_norm(gradients)
        loss.zero_grad()
        assert torch.equal(update(minibatch)["grad_norm"], expected)


def sac_optimizers(loss: LossModule, make: Any = Adam, **settings: Any) -> dict[str, Optimizer]:
    parts = {
        "loss_actor": loss.actor_network_params, "loss_qvalue": loss.qvalue_network_params,
    }  # fmt: skip
    made = {n: make(list(p.parameters()), lr=0.01, **settings) for n, p in parts.items()}
    return made | {"loss_alpha": make([loss.log_alpha], lr=0.01, **settings)}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_each_loss_can_have_an_optimiser_of_its_own(fused, clip_norm):
    ours, theirs = make_loss("SACLoss"), make_loss("SACLoss")
    own, other = sac_optimizers(ours, fused=fused), sac_optimizers(theirs, fused=fused)
    update = Update(ours, own, clip_norm=clip_norm)
    for step in range(6):
        minibatch = minibatch_for("SACLoss", seed=step)
        torch.manual_seed(step)
        metrics = update(minibatch.clone())
        torch.manual_seed(step)
        plain_step(theirs, other, minibatch, clip_norm=clip_norm)
        assert_same(state_of(ours, *own.values()), state_of(theirs, *other.values()))
        assert {"grad_norm_actor", "grad_norm_qvalue", "grad_norm_alpha"} <= set(metrics.keys())
    assert set(update.optimizers) == {"actor", "qvalue", "alpha"}


def test_losses_can_share_an_optimiser():
    ours, theirs = make_loss("ClipPPOLoss, discrete"), make_loss("ClipPPOLoss, discrete")
    actor = Adam(ours.actor_network_params.parameters(), lr=0.01)
    critic = Adam(ours.critic_network_params.parameters(), lr=0.02)
    update = Update(ours, {"loss_objective": actor, "loss_entropy": actor, "loss_critic": critic})
    optimizers = [
        Adam(theirs.actor_network_params.parameters(), lr=0.01),
        Adam(theirs.critic_network_params.parameters(), lr=0.02),
    ]
    for step in range(5):
        minibatch = minibatch_for("ClipPPOLoss, discrete", seed=step)
        update(minibatch.clone())
        losses = theirs(minibatch)
        sum(v for k, v in losses.items() if k.startswith("loss")).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(state_of(ours), state_of(theirs))
    assert set(update.optimizers) == {"objective_entropy", "critic"}


# ---------------------------------------------------------------------- gradients
class Shared(nn.Module):
    """Two parameters whose gradients are one and the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.c = nn.Parameter(torch.ones(3))

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        seen = minibatch["x"]
        return TensorDict({"loss": ((self.a + self.b + self.c.view(3)) * seen).pow(2).sum()})


@pytest.mark.parametrize("compile", ["auto", False])
@pytest.mark.parametrize("clip", [{"clip_norm": 0.1}, {"clip_value": 0.2}])
def test_gradients_that_are_one_tensor_are_clipped_once(clip, compile):
    ours, theirs = Shared(), Shared()
    own, other = (SGD(loss.parameters(), lr=0.1) for loss in (ours, theirs))
    update = Update(ours, own, compile=compile, **clip)
    for step in range(5):
        minibatch = TensorDict({"x": torch.full((3,), 1.0 + step)})
        update(minibatch.clone())
        plain_step(theirs, other, minibatch, **clip)
        assert_same(state_of(ours), state_of(theirs))


class Transposed(nn.Module):
    """A parameter that is not contiguous, and one that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, minibatch: TensorDictBase) -> TensorDict:
        return TensorDict({"loss": (minibatch["x"] @ self.weight).tanh().sum()})


@pytest.mark.parametrize("optimizer", ["Adam", "Adam, fused", "SGD, momentum"])
def test_odd_layouts_and_unused_parameters_are_taken(optimizer):
    ours, theirs = Transposed(), Transposed()
    own, other = (OPTIMIZERS[optimizer](list(loss.parameters())) for loss in (ours, theirs))
    update = Update(ours, own, clip_norm=0.5)
    for step in range(6):
        minibatch = TensorDict({"x": torch.full((4, 3), 0.1 + step)}, [4])
        update(minibatch.clone())
        plain_step(theirs, other, minibatch, clip_norm=0.5)
        assert_same(state_of(ours, own), state_of(theirs, other))
    assert torch.equal(ours.unused, torch.ones(2))


def test_gradients_are_not_left_behind():
    loss = make_loss("SACLoss")
    update = Update(loss, Adam(loss.parameters(), fused=True))
    for step in range(4):
        update(minibatch_for("SACLoss", seed=step))
        assert all(parameter.grad is None for parameter in loss.parameters())


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
    assert len(update._flat._known) == 4


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


# ---------------------------------------------------------------------- accumulation
@pytest.mark.parametrize("sizes", [(8, 8), (5, 2, 9), (16,)])
@pytest.mark.parametrize("compile", ["auto", False])
def test_accumulated_minibatches_make_the_step_of_all_their_rows(sizes, compile):
    ours, theirs = make_loss("A2CLoss"), make_loss("A2CLoss")
    own, other = (SGD(loss.parameters(), lr=0.1) for loss in (ours, theirs))
    update = Update(ours, own, clip_norm=0.5, compile=compile)
    for step in range(5):
        whole = minibatch_for("A2CLoss", 16, seed=step)
        metrics = update(*[part.clone() for part in whole.split(list(sizes))])
        losses = plain_step(theirs, other, whole, clip_norm=0.5)
        torch.testing.assert_close(metrics["loss_critic"], losses["loss_critic"])
        for one, two in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    assert update.optimizer_step_count == 5


# ---------------------------------------------------------------------- autocast
@pytest.mark.parametrize("name", ["ClipPPOLoss", "SACLoss", "DQNLoss"])
def test_autocast_computes_in_the_shorter_type_and_keeps_parameters(name):
    ours, theirs = make_loss(name), make_loss(name)
    own, other = (Adam(loss.parameters(), lr=0.01, fused=True) for loss in (ours, theirs))
    update = Update(ours, own, autocast=torch.bfloat16)
    exact = make_loss(name)
    for step in range(5):
        minibatch = minibatch_for(name, seed=step)
        torch.manual_seed(step)
        metrics = update(minibatch.clone())
        torch.manual_seed(step)
        losses = plain_step(theirs, other, minibatch.clone(), autocast=torch.bfloat16)
        assert_same(state_of(ours, own), state_of(theirs, other))
        if step == 0:
            torch.manual_seed(step)
            full = exact(minibatch)
            key = (
                "loss" if name == "DQNLoss" else "loss_critic" if name[0] == "C" else "loss_qvalue"
            )
            assert not torch.equal(losses[key].float(), full[key])
            torch.testing.assert_close(metrics[key].float(), full[key], rtol=0.1, atol=0.05)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}


# ---------------------------------------------------------------------- targets
@pytest.mark.parametrize("every", [1, 3])
def test_soft_updates_come_every_so_many_gradient_steps(every):
    ours, theirs = make_loss("DDPGLoss"), make_loss("DDPGLoss")
    own, other = (Adam(loss.parameters(), lr=0.01) for loss in (ours, theirs))
    targets = soft_update(theirs, tau=0.1)
    update = Update(ours, own, target_updater=soft_update(ours, tau=0.1), target_update_every=every)
    for step in range(1, 10):
        minibatch = minibatch_for("DDPGLoss", seed=step)
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        if step % every == 0:
            targets.step()
        assert_same(state_of(ours), state_of(theirs))


def test_a_soft_update_whose_share_changes_is_noticed():
    ours, theirs = make_loss("DDPGLoss"), make_loss("DDPGLoss")
    own, other = (SGD(loss.parameters(), lr=0.1) for loss in (ours, theirs))
    mine, targets = soft_update(ours, tau=0.1), soft_update(theirs, tau=0.1)
    update = Update(ours, own, target_updater=mine)
    for step in range(6):
        mine.eps = targets.eps = 0.9 - 0.05 * (step // 2)
        minibatch = minibatch_for("DDPGLoss", seed=step)
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        targets.step()
        assert_same(state_of(ours), state_of(theirs))


def test_hard_updates_keep_their_own_count_and_save_it():
    def make() -> tuple[LossModule, Update]:
        loss = make_loss("DQNLoss")
        hard = HardUpdate(loss, value_network_update_interval=3)
        return loss, Update(loss, Adam(loss.parameters(), lr=0.01), target_updater=hard)

    theirs = make_loss("DQNLoss")
    other, targets = Adam(theirs.parameters(), lr=0.01), None
    targets = HardUpdate(theirs, value_network_update_interval=3)
    ours, update = make()
    for step in range(12):
        if step == 5:  # in the middle of the hard update's interval
            saved = through_a_file((ours.state_dict(), update.state_dict()))
            ours, update = make()
            ours.load_state_dict(saved[0])
            update.load_state_dict(saved[1])
        minibatch = minibatch_for("DQNLoss", seed=step)
        update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        targets.step()
        assert_same(state_of(ours), state_of(theirs))


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


def test_hooks_of_an_optimiser_are_called_at_every_step():
    loss = make_loss("A2CLoss")
    optimizer = Adam(loss.parameters(), fused=True)
    update, called = Update(loss, optimizer), []
    for step in range(4):
        update(minibatch_for("A2CLoss", seed=step))
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    for step in range(4):
        update(minibatch_for("A2CLoss", seed=step))
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
            with pytest.warns(UserWarning, match=r"Deciding runs eagerly.*test_update\.py:\d+"):
                update(minibatch.clone())
        plain_step(theirs, other, minibatch)
        assert_same(state_of(ours, own), state_of(theirs, other))
    assert "test_update.py" in update.plain_reason
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
    with pytest.warns(UserWarning, match="does not repeat itself"):
        update(TensorDict({"x": torch.ones(1)}))
    assert update.plain_reason


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
@pytest.mark.parametrize("name", ["ClipPPOLoss", "SACLoss", "DQNLoss"])
def test_compiled_steps_are_close(name):
    ours, theirs = make_loss(name), make_loss(name)
    own, other = (SGD(loss.parameters(), lr=0.01) for loss in (ours, theirs))
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


# ---------------------------------------------------------------------- in and out
def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("where", [1, 3])
def test_a_restored_update_goes_on_bitwise(optimizer, where):
    def make() -> tuple[LossModule, Update]:
        loss = make_loss("SACLoss")
        return loss, Update(
            loss, OPTIMIZERS[optimizer](list(loss.parameters())), clip_norm=1.0,
            target_updater=soft_update(loss), target_update_every=2,
        )  # fmt: skip

    whole, resumed = make(), make()
    for step in range(6):
        if step == where:
            saved = through_a_file((resumed[0].state_dict(), resumed[1].state_dict()))
            resumed = make()
            resumed[0].load_state_dict(saved[0])
            resumed[1].load_state_dict(saved[1])
        for _, update in (whole, resumed):
            torch.manual_seed(step)
            update(minibatch_for("SACLoss", seed=step))
    own, other = (u.optimizers["optimizer"] for _, u in (whole, resumed))
    assert_same(state_of(whole[0], own), state_of(resumed[0], other))
    assert resumed[1].optimizer_step_count == 6


def test_state_that_is_loaded_in_the_middle_takes_effect_at_once():
    loss = make_loss("A2CLoss")
    update = Update(loss, Adam(loss.parameters(), lr=0.01, fused=True))
    states = []
    for step in range(8):
        if step == 4:
            saved = through_a_file((loss.state_dict(), update.state_dict()))
        update(minibatch_for("A2CLoss", seed=step))
    states.append(state_of(loss))
    loss.load_state_dict(saved[0])
    update.load_state_dict(saved[1])
    for step in range(4, 8):
        update(minibatch_for("A2CLoss", seed=step))
    assert_same(states[0], state_of(loss))


# ---------------------------------------------------------------------- bad settings
def test_contradicting_and_impossible_settings_are_refused():
    loss = make_loss("A2CLoss")
    optimizer = Adam(loss.parameters())
    with pytest.raises(SettingError, match=r"clip_value=0.5 contradicts clip_norm=1.0"):
        Update(loss, optimizer, clip_norm=1.0, clip_value=0.5)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(SettingError, match=r"clip_norm=.* is not positive"):
            Update(loss, optimizer, clip_norm=wrong)
    with pytest.raises(SettingError, match="target_update_every=0 is less than 1"):
        Update(loss, optimizer, target_update_every=0)
    with pytest.raises(SettingError, match="compile='fast' is not a way to run"):
        Update(loss, optimizer, compile="fast")


def test_an_optimiser_for_a_loss_that_does_not_exist_is_refused_with_those_that_do():
    loss = make_loss("A2CLoss")
    update = Update(loss, {"loss_actor": Adam(loss.parameters())})
    message = (
        "optimizer='loss_actor' is not a loss of the loss module.*loss_objective or loss_entropy"
    )
    with pytest.raises(SettingError, match=message):
        update(minibatch_for("A2CLoss"))


def test_a_loss_without_anything_to_minimise_is_refused():
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, minibatch: TensorDictBase) -> TensorDict:
            return TensorDict({"value": self.w * 2})

    loss = Empty()
    with pytest.raises(SettingError, match="has no entry named loss"):
        Update(loss, Adam(loss.parameters()))(TensorDict({"x": torch.ones(1)}))


def test_every_tested_loss_with_targets_is_known_to_have_them():
    """The helper that the tests above rely on."""
    with_targets = {name for name in LOSSES if has_targets(make_loss(name))}
    assert {"SACLoss", "DQNLoss", "TD3Loss", "DDPGLoss", "IQLLoss"} <= with_targets
    assert not with_targets & {"ClipPPOLoss", "A2CLoss"}
    assert value().out_keys == ["state_value"]
    assert transitions(3).batch_size == (3,)
