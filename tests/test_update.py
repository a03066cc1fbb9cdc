"""A gradient step is that of plain PyTorch, bit for bit, however it is executed."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torchrl.objectives import HardUpdate, LossModule

from kit.steps import SettingError
from kit.update import Update
from tests.losses import (
    LOSSES,
    has_targets,
    make_loss,
    minibatch_for,
    soft_update,
    transitions,
    value,
)
from tests.plain_steps import (
    OPTIMIZERS,
    READ_ON_THE_HOST,
    assert_same,
    eagerly,
    plain_step,
    programs,
    state_of,
)


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
